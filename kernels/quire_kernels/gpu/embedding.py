"""Embedding in the Triton language: rows of a table by token id, scaled if the table is quantised."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast

BLOCK = 1024
"""Elements per program."""


@triton.jit
def _embedding_kernel(
    token_ids, weight, scales, out, weight_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Program (token, part of its row)."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token)
    values = tl.load(weight + row * weight_stride + i, mask=i < SIZE, other=0.0)
    if HAS_SCALES:
        values = cast(values.to(tl.float32) * tl.load(scales + row), out.dtype.element_ty)
    tl.store(out + token * SIZE + i, values, mask=i < SIZE)


def embedding(
    token_ids_T: torch.Tensor, weight_VE: torch.Tensor, scales_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The tokens' rows of `weight_VE`, times their scales if there are any, in `dtype`."""
    size = weight_VE.shape[1]
    out_TE = torch.empty(len(token_ids_T), size, dtype=dtype, device=weight_VE.device)
    if len(token_ids_T):
        _embedding_kernel[(len(token_ids_T), triton.cdiv(size, BLOCK))](
            token_ids_T.contiguous(), weight_VE, scales_V, out_TE, weight_VE.stride(0), size, BLOCK,
            scales_V is not None,
        )  # fmt: skip
    return out_TE
