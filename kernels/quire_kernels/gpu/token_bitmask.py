"""Masking by one bit per token in the Triton language: writes the forbidden tokens' logits and reads none."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Tokens per program."""


@triton.jit(do_not_specialize=["vocab_size"])
def _bitmask_kernel(logits, row_ids, bitmask, logits_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    """Program (row of the bitmask, part of the vocabulary)."""
    row, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(bitmask + row * words_stride + tokens // 32, mask=inside, other=-1)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    pointers = logits + tl.load(row_ids + row) * logits_stride + tokens
    masked = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(pointers, masked, mask=inside & forbidden)


def apply_token_bitmask(logits_SV: torch.Tensor, row_ids_R: torch.Tensor, bitmask_RW: torch.Tensor) -> None:
    """See `quire_kernels.apply_token_bitmask`; the row ids and the bitmask may be on the host."""
    assert logits_SV.stride(1) == bitmask_RW.stride(1) == 1
    if len(row_ids_R):
        row_ids_R, bitmask_RW = (x.to(logits_SV.device, non_blocking=True) for x in (row_ids_R, bitmask_RW))
        _bitmask_kernel[(len(row_ids_R), triton.cdiv(logits_SV.shape[1], BLOCK))](
            logits_SV, row_ids_R, bitmask_RW, logits_SV.stride(0), bitmask_RW.stride(0), logits_SV.shape[1], BLOCK
        )
