"""Masking of tokens that a grammar does not allow."""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import apply_token_bitmask

from quire_engine.device.transfer import upload


def apply_grammar_bitmask(logits_SV: torch.Tensor, rows: list[int], bitmask_RW: npt.NDArray[np.int32]) -> None:
    """Mask in place, in the given rows, the tokens whose bit is not set.

    Args:
        logits_SV: the logits.
        rows: R of their S rows; the others do not change.
        bitmask_RW: bit i % 32 of word i // 32 belongs to token i.
    """
    row_ids_R, words_RW = upload(logits_SV.device, np.array(rows, dtype=np.int64), bitmask_RW)
    apply_token_bitmask(logits_SV, row_ids_R, words_RW)
