"""Masking of tokens that a grammar does not allow, by one bit per token."""

import numpy as np
import torch

from quire_kernels.cpu import check_tensor, launch, library_for, structure
from quire_kernels.dispatch import uses_triton

_BitmaskCall = structure("BitmaskCall")


def apply_token_bitmask(logits_SV: torch.Tensor, row_ids_R: torch.Tensor, bitmask_RW: torch.Tensor) -> None:
    """Mask in place, in the given rows, the tokens whose bit is not set.

    Args:
        logits_SV: the logits.
        row_ids_R: int64, R of their S rows; the others do not change. For logits on a GPU, on the GPU or the host.
        bitmask_RW: int32, bit i % 32 of word i // 32 belongs to token i. For logits on a GPU, on the GPU or the host.

    Raises:
        TypeError: row ids or bitmask have a wrong dtype.
        ValueError: the bitmask does not have one row per id, or has too few words for the vocabulary.
    """
    if uses_triton(logits_SV) and logits_SV.stride(1) == 1:
        from quire_kernels.gpu import token_bitmask as gpu

        gpu.apply_token_bitmask(logits_SV, row_ids_R, bitmask_RW.contiguous())
        return
    handle = library_for(logits_SV) if logits_SV.dtype == torch.float32 and logits_SV.stride(1) == 1 else None
    if handle is None:
        forbidden_RV = _unset_bits(bitmask_RW.cpu(), logits_SV.shape[1]).to(logits_SV.device)
        logits_SV[row_ids_R] = logits_SV[row_ids_R].masked_fill(forbidden_RV, float("-inf"))
        return
    row_ids_R, bitmask_RW = row_ids_R.contiguous(), bitmask_RW.contiguous()
    rows, vocab_size = row_ids_R.numel(), logits_SV.shape[1]
    words = -(-vocab_size // 32)
    check_tensor("row_ids_R", row_ids_R, torch.int64, rows)
    check_tensor("bitmask_RW", bitmask_RW, torch.int32, rows, max(words, bitmask_RW.shape[-1]))
    call = _BitmaskCall(
        logits_SV.data_ptr(), logits_SV.stride(0), row_ids_R.data_ptr(), bitmask_RW.data_ptr(), bitmask_RW.shape[1],
        rows, vocab_size,
    )  # fmt: skip
    launch(handle.quire_apply_bitmask, call)


def _unset_bits(bitmask_RW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    bits = np.unpackbits((~bitmask_RW.numpy()).view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)
