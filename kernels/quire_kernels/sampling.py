"""From logits to token ids: greedy, or a draw by counter-based Gumbel noise after min-p, top-k and top-p.

Each mask is a threshold on the logits' values, so tokens with equal logits are kept or masked together: the result
never depends on the order in which a sort leaves ties, and so not on the rest of the batch. The C++ kernel
(`kernels/csrc/sampling.inc`) keeps the same tokens as plain torch, with two exceptions: it counts all ties of the k-th
largest logit, and its sums of probabilities are exact, while torch's are rounded. So a nucleus can end one token
earlier or later if its sum and p agree to seven digits.

`argmax(logits + g)` with independent Gumbel noise g is a draw from `softmax(logits)` (Gumbel 1954; Maddison et al.
2014, https://arxiv.org/abs/1411.0030). Here g is a pure function of (seed, position, vocabulary id): no generator, no
state, so a token's noise is the same alone, in any batch, on any rank and after a replay.

The function is Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which is also what
the Triton language's `tl.philox` computes:

::

    key      = seed, low and high half           ┐
    counter  = (vocab_id // 4, position, 0, 0)   ┘ ─► 4 words; vocab_id takes word vocab_id % 4

The noise is -log(-log(u)) of the upper 23 bits of that word. C++ computes it bit for bit the same on all instruction
sets. The logarithms of torch or of a GPU may differ in the last bit, which changes a draw only if two tokens are that
close to each other.
"""

import torch

from quire_kernels.cpu import check_tensor, launch, library_for, pointer, structure, uses_triton, with_dense_rows

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CHUNK = 8192  # counters at a time, so that temporaries stay in the L2 cache: 32 × 32000 in 0.09 s rather than 1.1 s
_COLUMNS = {
    "temperature": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}
"""Dtypes of the arguments of `sample` with one entry per row."""

_SampleCall = structure("SampleCall")
_ProbabilitiesCall = structure("ProbabilitiesCall")


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, [S] int64: the first of equal ones, and NaN counts as the largest, as in
    torch."""
    if uses_triton(logits_SV):
        from quire_kernels.gpu import sampling as gpu

        return gpu.argmax(with_dense_rows(logits_SV))
    if library_for(logits_SV) is None:
        return logits_SV.argmax(-1)
    return _sample(logits_SV)


def sample(
    logits_SV: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Sample one token per row: [S] int64. For each row:

        1. If the temperature is 0, take the most likely token and stop.
        2. Divide by the temperature.
        3. Mask by min-p, then by top-k, then by top-p over the remaining tokens.
        4. Add Gumbel noise, and take the largest.

    Raises TypeError or ValueError if a column has another dtype, device or length than these.

    Args:
        logits_SV: float32 or bfloat16; rows may be strided. A row whose largest logit is not finite gets some token.
        temperature: [S] float32.
        min_p: [S] float32 up to 1; 0 keeps all.
        top_k: [S] int64, at least 1; V or more keeps all.
        top_p: [S] float32; 1 keeps all.
        seeds: [S] int64, the 64 bits of each row's seed.
        positions: [S] int64 below 2**32, the position of the row's token in its sequence.
    """
    columns = (temperature, min_p, top_k, top_p, seeds, positions)
    if uses_triton(logits_SV):
        from quire_kernels.gpu import sampling as gpu

        return gpu.sample(with_dense_rows(logits_SV), *(column.contiguous() for column in columns))
    if library_for(logits_SV) is None:
        return _sample_torch(logits_SV, *columns)
    dense = [column.contiguous() for column in columns]
    for (name, dtype), column in zip(_COLUMNS.items(), dense, strict=True):
        check_tensor(name, column, dtype, logits_SV.shape[0])
    return _sample(logits_SV, *dense)


def probabilities(
    logits_SV: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The distribution that `sample` draws each row's token from, for the same arguments: [S, V] float32, without NaN;
    exactly 0 for masked tokens. A row of temperature 0, or whose largest logit is not finite, has all its probability
    on the token of `argmax`. On a GPU the host does not wait."""
    columns = (temperature, min_p, top_k, top_p)
    if uses_triton(logits_SV) or library_for(logits_SV) is None:
        return _probabilities(logits_SV, *columns)
    logits_SV, dense = with_dense_rows(logits_SV), [column.contiguous() for column in columns]
    rows, vocab_size = logits_SV.shape
    for (name, dtype), column in zip(_COLUMNS.items(), dense, strict=False):
        check_tensor(name, column, dtype, rows)
    probabilities_SV = torch.empty(rows, vocab_size)
    call = _ProbabilitiesCall(
        logits_SV.data_ptr(), logits_SV.stride(0), *map(pointer, dense),
        probabilities_SV.data_ptr(), rows, vocab_size, logits_SV.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_probabilities", call)
    return probabilities_SV


def _probabilities(
    logits_SV: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    likeliest_S1 = argmax(logits_SV)[:, None]
    logits_SV = logits_SV.float()
    largest_S1 = logits_SV.gather(1, likeliest_S1)
    is_certain_S1 = (temperature == 0)[:, None] | ~largest_S1.isfinite()
    # A certain row gets the logits of its distribution: 0 for one token, minus infinity for the others.
    logits_SV = logits_SV.masked_fill(is_certain_S1, float("-inf"))
    logits_SV.scatter_(1, likeliest_S1, largest_S1.masked_fill(is_certain_S1, 0.0))
    columns = (temperature.masked_fill(is_certain_S1.squeeze(1), 1.0), min_p, top_k, top_p)
    if uses_triton(logits_SV):
        from quire_kernels.gpu import sampling as gpu

        return gpu.kept_logits(logits_SV, *(column.contiguous() for column in columns)).softmax(-1)
    return _kept_logits_torch(logits_SV, *columns).softmax(-1)


def _sample(logits_SV: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    logits_SV = with_dense_rows(logits_SV)
    rows, vocab_size = logits_SV.shape
    token_ids = torch.empty(rows, dtype=torch.int64)
    call = _SampleCall(
        logits_SV.data_ptr(), logits_SV.stride(0), *(map(pointer, columns) if columns else [None] * 6),
        token_ids.data_ptr(), rows, vocab_size, logits_SV.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_sample", call)
    return token_ids


def _sample_torch(
    logits_SV: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    token_ids_S = logits_SV.argmax(-1)
    rows = (temperature > 0).nonzero().squeeze(1)
    if not len(rows):
        return token_ids_S
    columns = (column[rows] for column in (temperature, min_p, top_k, top_p))
    noise_RV = _gumbel_noise_torch(seeds[rows], positions[rows], logits_SV.shape[1])
    token_ids_S[rows] = (_kept_logits_torch(logits_SV[rows].float(), *columns) + noise_RV).argmax(-1)
    return token_ids_S


def _kept_logits_torch(
    logits_SV: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """[S, V] float32: divided by the temperature, which is above 0, and minus infinity where masked.

    Each row is shifted so that its largest logit is 0: so nothing overflows, however small the temperature.
    """
    logits_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)) / temperature[:, None]
    if bool((min_p > 0).any()):
        logits_SV = _apply_min_p(logits_SV, min_p)
    if bool((top_p < 1).any()) or bool((top_k < logits_SV.shape[1]).any()):
        logits_SV = _apply_top_k_top_p(logits_SV, top_k, top_p)
    return logits_SV


def _apply_min_p(logits_SV: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask tokens less likely than `min_p` times the most likely one (https://arxiv.org/abs/2407.01082)."""
    threshold = logits_SV.amax(-1, keepdim=True) + min_p.log()[:, None]
    return logits_SV.masked_fill(logits_SV < threshold, float("-inf"))


def _apply_top_k_top_p(logits_SV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the `top_k` most likely tokens, and of these all but the smallest set that reaches `top_p`.

    1. Take the largest logits, sorted: as many as the largest top_k, or, if there is only top_p, first few and then
       more until they hold the probability that every row asks for. So the vocabulary is hardly ever sorted.
    2. top-k: the threshold is the k-th largest value.
    3. top-p (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751), over the tokens that top-k keeps, renormalised:
       the threshold is the first value at which the cumulative probability reaches p.
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
    # Rows without top-k normalise over the whole vocabulary, the others over the tokens that top-k keeps.
    log_kept = torch.where(top_k < vocab_size, within_k.logsumexp(-1), log_total)
    cumulative = (within_k - log_kept[:, None]).exp().cumsum(-1)
    nth = (cumulative < top_p[:, None]).sum(-1, keepdim=True).clamp(max=num_sorted - 1)
    nucleus = torch.where(top_p[:, None] < 1.0, values.gather(1, nth), float("-inf"))
    return logits_SV.masked_fill(logits_SV < torch.maximum(threshold, nucleus), float("-inf"))


def _gumbel_noise_torch(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[S, V] float32, finite: Gumbel noise for every token id of each row."""
    num_counters = -(-vocab_size // 4)
    rows = max(1, _CHUNK // num_counters)
    uniform_SV = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=seeds.device)
    for i in range(0, len(seeds), rows):
        words = _philox(seeds[i : i + rows], positions[i : i + rows], num_counters)[:, :vocab_size]
        # 23 bits and a half: exact in float32, and never 0 or 1, so that both logarithms are finite.
        uniform_SV[i : i + rows] = ((words >> 9).float() + 0.5) * 2.0**-23
    return uniform_SV.log_().neg_().log_().neg_()


def _philox(seeds: torch.Tensor, positions: torch.Tensor, num_counters: int) -> torch.Tensor:
    """[S, 4 * num_counters] int64, one 32-bit word each. Products wrap in int64, which keeps all their bits."""
    zeros = torch.zeros(len(seeds), num_counters, dtype=torch.int64, device=seeds.device)
    c0 = zeros + torch.arange(num_counters, device=seeds.device)
    c1 = zeros + positions[:, None]
    c2 = c3 = zeros
    k0, k1 = (seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None]
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)
