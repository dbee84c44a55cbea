"""Rows written to slots of a table, in the Triton language."""

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements per program."""


@triton.jit
def _store_rows_kernel(rows, slot_mapping, out, rows_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, part of its row)."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token)
    values = tl.load(rows + token * rows_stride + i, mask=i < SIZE, other=0.0)
    tl.store(out + slot * out_stride + i, values, mask=i < SIZE)


def store_rows(rows_TE: torch.Tensor, slot_mapping_T: torch.Tensor, out_NE: torch.Tensor) -> None:
    rows, size = rows_TE.shape
    if rows:
        _store_rows_kernel[(rows, triton.cdiv(size, BLOCK))](
            rows_TE, slot_mapping_T.contiguous(), out_NE, rows_TE.stride(0), out_NE.stride(0), size, BLOCK
        )
