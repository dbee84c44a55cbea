"""What changes or masks logits before a token is drawn, batched over rows.

Each mask is a threshold on the logits' values, so tokens with equal logits stay or go together: the result never
depends on the order in which a sort leaves ties, and so not on the rest of the batch.
"""

import torch

__all__ = ["apply_min_p", "apply_min_tokens", "apply_top_k_top_p"]


def apply_min_tokens(logits_SV: torch.Tensor, forbidden: list[tuple[int, list[int]]]) -> None:
    """Mask in place, for the given rows, the tokens that would end the request."""
    for row, token_ids in forbidden:
        logits_SV[row, token_ids] = float("-inf")


def apply_min_p(logits_SV: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask tokens less likely than `min_p` times the most likely one (https://arxiv.org/abs/2407.01082)."""
    threshold = logits_SV.amax(-1, keepdim=True) + min_p.log()[:, None]
    return logits_SV.masked_fill(logits_SV < threshold, float("-inf"))


def apply_top_k_top_p(logits_SV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` most likely tokens, and of these all but the smallest set that reaches `top_p`.

    1. Take the largest logits, sorted: as many as the largest top_k, or, where top_p has no such bound, first few and
       then ever more until they hold the probability that every row asks for. So the vocabulary is hardly ever sorted.
    2. top-k: the threshold is the k-th largest value.
    3. top-p (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751), over what top-k left, renormalised: the
       threshold is the first value at which the cumulative probability reaches p.
    """
    vocab_size = logits_SV.shape[1]
    top_k = top_k.clamp(max=vocab_size)
    num_sorted = min(vocab_size, max(256, int(top_k[top_k < vocab_size].max()) if (top_k < vocab_size).any() else 0))
    unbounded = (top_k == vocab_size) & (top_p < 1.0)
    log_total = logits_SV.logsumexp(-1)
    while True:
        values = logits_SV.topk(num_sorted).values
        held = (values[unbounded].logsumexp(-1) - log_total[unbounded]).exp()
        if num_sorted == vocab_size or bool((held >= top_p[unbounded]).all()):
            break
        num_sorted = min(vocab_size, num_sorted * 8)

    last = (top_k - 1).clamp(max=num_sorted - 1)[:, None]
    kth_value = values.gather(1, last)
    threshold = torch.where(top_k[:, None] < vocab_size, kth_value, float("-inf"))
    within_k = values.masked_fill(values < threshold, float("-inf"))
    # Rows without top-k normalise over the whole vocabulary, the others over what top-k left.
    log_kept = torch.where(top_k < vocab_size, within_k.logsumexp(-1), log_total)
    cumulative = (within_k - log_kept[:, None]).exp().cumsum(-1)
    nth = (cumulative < top_p[:, None]).sum(-1, keepdim=True).clamp(max=num_sorted - 1)
    nucleus = torch.where(top_p[:, None] < 1.0, values.gather(1, nth), float("-inf"))
    return logits_SV.masked_fill(logits_SV < torch.maximum(threshold, nucleus), float("-inf"))
