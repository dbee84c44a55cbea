"""Masking what a grammar does not allow."""

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["apply_grammar_bitmask"]


def apply_grammar_bitmask(logits_SV: torch.Tensor, rows: list[int], bitmask_RW: npt.NDArray[np.int32]) -> None:
    """Mask in place, in the given rows, the tokens whose bit is not set.

    Args:
        logits_SV: the logits.
        rows: R of their S rows; the others are not touched.
        bitmask_RW: bit i % 32 of word i // 32 belongs to token i.
    """
    forbidden = np.unpackbits((~bitmask_RW).view(np.uint8), axis=1, count=logits_SV.shape[1], bitorder="little")
    mask_RV = torch.from_numpy(forbidden).view(torch.bool).to(logits_SV.device)
    for row, mask_V in zip(rows, mask_RV, strict=True):
        logits_SV[row].masked_fill_(mask_V, float("-inf"))
