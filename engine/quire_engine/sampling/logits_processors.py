"""Masks of logits, applied before sampling. Min-p, top-k and top-p are part of sampling: `quire_kernels.sampling`."""

from itertools import chain

import numpy as np
import torch

from quire_engine.device.transfer import upload


def apply_min_tokens(logits_SV: torch.Tensor, forbidden: list[tuple[int, list[int]]]) -> None:
    """Mask in place, for the given rows, the tokens that would end the request."""
    if not forbidden:
        return
    rows = np.repeat([row for row, _ in forbidden], [len(token_ids) for _, token_ids in forbidden])
    columns = np.fromiter(chain.from_iterable(token_ids for _, token_ids in forbidden), dtype=np.int64)
    mask_tokens(logits_SV, *upload(logits_SV.device, rows, columns))


def mask_tokens(logits_SV: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Mask tokens in place, given by pairs of row and token id: [n] int64 each, on the logits' device."""
    logits_SV.index_put_((rows, token_ids), logits_SV.new_full((), float("-inf")))
