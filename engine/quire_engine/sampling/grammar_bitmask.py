"""Masking what a grammar does not allow."""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import apply_token_bitmask

__all__ = ["apply_grammar_bitmask"]


def apply_grammar_bitmask(logits_SV: torch.Tensor, rows: list[int], bitmask_RW: npt.NDArray[np.int32]) -> None:
    """Mask in place, in the given rows, the tokens whose bit is not set.

    Args:
        logits_SV: the logits.
        rows: R of their S rows; the others are not touched.
        bitmask_RW: bit i % 32 of word i // 32 belongs to token i.
    """
    apply_token_bitmask(logits_SV, torch.tensor(rows, dtype=torch.int64), torch.from_numpy(bitmask_RW))
