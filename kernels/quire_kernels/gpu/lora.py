"""Low-rank adapters of linear layers in the Triton language (`quire_kernels/lora.py`).

::

    shrink   program (tile of T and number, projection and block of R):  x · Aᵀ                ─► hidden [T, P, R]
    expand   program (tile of T and number, block of N, projection):     out + hidden · Bᵀ     ─► out [T, N], in place

A tile of T has at most as many slots as rows: program number n computes the rows of the n-th, and returns at once if
there are fewer. So a CUDA graph can hold both kernels whatever slots the rows have. A and B are found by their
addresses. Tiles always have the same shape, so a row's result is the same in any batch.
"""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast, dot

BLOCK_M = 16
"""Rows of a tile: the fewest that the tensor cores take, as decodes have a different adapter in most rows."""
BLOCK_R = 16
BLOCK_N = 256


@triton.jit
def _rows_of_slot(index, rows, num_slots: tl.constexpr, BLOCK_M: tl.constexpr):
    """The slot of a program, -1 if its tile has fewer; the tile's rows; and which of these have that slot."""
    tile, number = tl.program_id(0) // num_slots, tl.program_id(0) % num_slots
    m_M = tl.arange(0, BLOCK_M)
    rows_M = tile * BLOCK_M + m_M
    slots_M = tl.load(index + rows_M, mask=rows_M < rows, other=-1)
    is_earlier_MM = (slots_M[:, None] == slots_M[None, :]) & (m_M[:, None] > m_M[None, :])
    is_first_M = (tl.sum(is_earlier_MM.to(tl.int32), 1) == 0) & (slots_M >= 0)
    is_chosen_M = is_first_M & (tl.cumsum(is_first_M.to(tl.int32), 0) == number + 1)
    slot = tl.max(tl.where(is_chosen_M, slots_M, -1), 0)
    return slot, rows_M.to(tl.int64), slots_M == slot


@triton.jit(do_not_specialize=["rows"])
def _lora_shrink_kernel(
    x, index, pairs, hidden, rows, x_stride, num_projections,
    NUM_SLOTS: tl.constexpr, IN_FEATURES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile and number, projection and block of ranks)."""
    slot, rows_M, has_M = _rows_of_slot(index, rows, NUM_SLOTS, BLOCK_M)
    if slot < 0:
        return
    projection = tl.program_id(1) // tl.cdiv(HIDDEN, BLOCK_R)
    ranks_R = tl.program_id(1) % tl.cdiv(HIDDEN, BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    pair = pairs + (slot * num_projections + projection) * 3
    rank = tl.load(pair + 2)
    if tl.min(ranks_R, 0) >= rank:
        return
    a = tl.multiple_of(tl.load(pair).to(tl.pointer_type(x.dtype.element_ty)), 16)
    k_K, in_ranks_R = tl.arange(0, BLOCK_K), ranks_R < rank
    x_MK = x + rows_M[:, None] * x_stride + k_K[None, :]
    a_KR = a + ranks_R.to(tl.int64)[None, :] * IN_FEATURES + k_K[:, None]
    sums_MR = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        inside_K = start + k_K < IN_FEATURES
        tile_MK = tl.load(x_MK + start, mask=has_M[:, None] & inside_K[None, :], other=0.0)
        tile_KR = tl.load(a_KR + start, mask=in_ranks_R[None, :] & inside_K[:, None], other=0.0)
        sums_MR = dot(tile_MK, tile_KR, sums_MR)
    hidden_MR = hidden + (rows_M * num_projections + projection)[:, None] * HIDDEN + ranks_R[None, :]
    tl.store(hidden_MR, cast(sums_MR, hidden.dtype.element_ty), mask=has_M[:, None] & in_ranks_R[None, :])


@triton.jit(do_not_specialize=["rows", "first"])
def _lora_expand_kernel(
    hidden, index, pairs, ends, out, rows, first, columns, out_stride, num_projections,
    NUM_SLOTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (tile and number, block of output features, projection). `first` is the number in the table of the first
    of `columns`."""
    slot, rows_M, has_M = _rows_of_slot(index, rows, NUM_SLOTS, BLOCK_M)
    if slot < 0:
        return
    projection = tl.program_id(2)
    pair = pairs + (slot * num_projections + projection) * 3
    rank = tl.load(pair + 2)
    begin = tl.load(ends + projection - 1, mask=projection > 0, other=0)
    features_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns_N = begin - first + features_N
    inside_N = (begin + features_N < tl.load(ends + projection)) & (columns_N >= 0) & (columns_N < columns)
    if rank == 0 or tl.max(inside_N.to(tl.int32), 0) == 0:
        return
    b = tl.multiple_of(tl.load(pair + 1).to(tl.pointer_type(hidden.dtype.element_ty)), 16)
    r_R = tl.arange(0, BLOCK_R)
    hidden_MR = hidden + (rows_M * num_projections + projection)[:, None] * HIDDEN + r_R[None, :]
    b_RN = b + features_N.to(tl.int64)[None, :] * rank + r_R[:, None]
    sums_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        inside_R = start + r_R < rank
        tile_MR = tl.load(hidden_MR + start, mask=has_M[:, None] & inside_R[None, :], other=0.0)
        tile_RN = tl.load(b_RN + start, mask=inside_N[None, :] & inside_R[:, None], other=0.0)
        sums_MN = dot(tile_MR, tile_RN, sums_MN)
    out_MN, mask = out + rows_M[:, None] * out_stride + columns_N[None, :], has_M[:, None] & inside_N[None, :]
    y_MN = tl.load(out_MN, mask=mask, other=0.0).to(tl.float32) + sums_MN
    tl.store(out_MN, cast(y_MN, out.dtype.element_ty), mask=mask)


def shrink(x_TK: torch.Tensor, slots_T: torch.Tensor, pairs: torch.Tensor, hidden_TPR: torch.Tensor) -> None:
    """Write `x · Aᵀ` of the rows that have an adapter, up to its rank; `pairs` is `LoraTable.pairs`."""
    (rows, in_features), (max_loras, projections, _), hidden_size = x_TK.shape, pairs.shape, hidden_TPR.shape[2]
    if rows:
        num_slots = min(max_loras, BLOCK_M)
        grid = triton.cdiv(rows, BLOCK_M) * num_slots, projections * triton.cdiv(hidden_size, BLOCK_R)
        _lora_shrink_kernel[grid](
            x_TK, slots_T, pairs, hidden_TPR, rows, x_TK.stride(0), projections,
            NUM_SLOTS=num_slots, IN_FEATURES=in_features, HIDDEN=hidden_size, BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R,
            BLOCK_K=64 if x_TK.itemsize == 4 else 128, num_warps=4, num_stages=4,
        )  # fmt: skip


def expand(
    hidden_TPR: torch.Tensor, slots_T: torch.Tensor, pairs: torch.Tensor, ends: torch.Tensor, largest: int,
    out_TN: torch.Tensor, first: int,
) -> None:  # fmt: skip
    """Add `hidden · Bᵀ` to the rows that have an adapter.

    Args:
        pairs, ends: as of `LoraTable`.
        largest: output features of the largest projection.
        first: the number of the first column of `out_TN` in the table.
    """
    (rows, columns), (max_loras, projections, _) = out_TN.shape, pairs.shape
    assert out_TN.stride(1) == 1
    if rows:
        num_slots = min(max_loras, BLOCK_M)
        grid = triton.cdiv(rows, BLOCK_M) * num_slots, triton.cdiv(largest, BLOCK_N), projections
        _lora_expand_kernel[grid](
            hidden_TPR, slots_T, pairs, ends, out_TN, rows, first, columns, out_TN.stride(0), projections,
            NUM_SLOTS=num_slots, HIDDEN=hidden_TPR.shape[2], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_R=BLOCK_R,
            num_warps=4,
        )  # fmt: skip
