"""Log-probabilities of prompt tokens, in chunks of bounded memory."""

from collections.abc import Callable

import torch

from quire_engine.messages import PromptLogprobs
from quire_engine.sampling.logprobs import top_logprobs

CHUNK_LOGITS = 2**22
"""Logits at a time: 16 MiB in float32, whatever the length of the prompt."""


def compute_prompt_logprobs(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    start: int,
    num_logprobs: int,
    vocab_size: int,
) -> PromptLogprobs | None:
    """Score prompt tokens by the hidden states of the positions before them.

    Args:
        compute_logits: [T, E] → [T, V], or None on a rank that only takes part in the computation.
        hidden_TE: row i belongs to position `start - 1 + i`.
        token_ids_T: int64; token i is at position `start + i`, so row i predicts it.
        start: at least 1.
        num_logprobs: how many of the most likely tokens to add.
        vocab_size: V.

    Returns:
        The scores; None if `compute_logits` returns None.
    """
    num_logprobs = min(num_logprobs, vocab_size)
    rows = max(1, CHUNK_LOGITS // vocab_size)
    chunks = []
    for i in range(0, len(token_ids_T), rows):
        logits = compute_logits(hidden_TE[i : i + rows])
        if logits is not None:
            chunks.append(top_logprobs(logits.float().log_softmax(-1), token_ids_T[i : i + rows], num_logprobs))
    if not chunks:
        return None
    token_ids, logprobs, ranks = (torch.cat(columns).cpu() for columns in zip(*chunks, strict=True))
    return PromptLogprobs(
        start=start,
        num_logprobs=num_logprobs,
        token_ids=token_ids.to(torch.int32).numpy().tobytes(),
        logprobs=logprobs.numpy().tobytes(),
        ranks=ranks.to(torch.int32).numpy().tobytes(),
    )
