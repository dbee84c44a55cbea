"""The short causal convolution in the Triton language.

::

    convolve   program (row, block of channels)        its last K inputs, of rows and of the ring     ─► out
    keep       program (sequence, block of channels)   the last inputs before each state, and of all  ─► rings
"""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import both, cast
from quire_kernels.gpu.rows import gated
from quire_kernels.gpu.states import exists, step_of
from quire_kernels.states import StateRows

BLOCK = 256
"""Channels of a program: 2 for each of 128 threads."""


@triton.jit
def _conv_kernel(
    x, weight, bias, ring, out, positions, query_start_loc, sources,
    x_stride, weight_strides, ring_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING_SIZE: tl.constexpr, ACTIVATION: tl.constexpr,
    NUM_SEQS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of channels)."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, seqs_S = c < CHANNELS, tl.arange(0, BLOCK_S)
    ends_S = tl.load(query_start_loc + 1 + seqs_S, mask=seqs_S < NUM_SEQS, other=0)
    seq = tl.min(tl.where(ends_S > row, seqs_S, NUM_SEQS - 1), 0)
    back = row - tl.load(query_start_loc + seq)  # rows of the sequence before this one
    source, position = tl.load(sources + seq), tl.load(positions + row)
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=inside, other=0.0)
    for tap in tl.static_range(WIDTH):
        distance = WIDTH - 1 - tap
        at = position - distance
        in_row, in_ring = back >= distance, (back < distance) & (at >= 0) & (source >= 0)
        old = ring + source * ring_stride + at % RING_SIZE * CHANNELS + c if RING_SIZE else ring + c
        value = tl.load(x + (row - distance) * x_stride + c, mask=both(inside, in_row), other=0.0).to(tl.float32)
        value += tl.load(old, mask=both(inside, in_ring), other=0.0)
        total += tl.load(weight + c * weight_strides[0] + tap * weight_strides[1], mask=inside, other=0.0) * value
    if ACTIVATION == "silu":
        total = gated(total, 1.0, "silu")
    tl.store(out + row * CHANNELS + c, cast(total, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _conv_ring_kernel(
    x, ring, step, x_stride, ring_stride, num_rows,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block of channels). The ring of the source is written last, and what it has is not copied."""
    positions, query_start_loc, sources, num_replayed, targets, store_start_loc, store_lens, store_blocks = step
    seq, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if not exists(seq, query_start_loc, num_rows, BLOCK_S):
        return
    start = tl.load(query_start_loc + seq)
    first, source, target = tl.load(positions + start), tl.load(sources + seq), tl.load(targets + seq)
    end, begin = first + tl.load(query_start_loc + seq + 1) - start, first - tl.load(num_replayed + seq)
    before = first if source < 0 else tl.maximum(begin - WIDTH + 1, 0)  # positions that are not known
    store_end = tl.load(store_start_loc + seq + 1)
    for writes_source in tl.static_range(2):
        for entry in range(tl.load(store_start_loc + seq), store_end + 1):
            is_store = entry < store_end
            block = tl.where(is_store, tl.load(store_blocks + entry, mask=is_store, other=0), target)
            last = tl.where(is_store, begin + tl.load(store_lens + entry, mask=is_store, other=0), end)
            oldest = tl.where(is_store, last - WIDTH + 1, end - RING_SIZE)
            # What the target gets later anyway is not written twice, as two threads would have no order.
            oldest = tl.where(block == target, tl.maximum(oldest, end - RING_SIZE), oldest)
            oldest = tl.maximum(oldest, first if writes_source else before)
            if (block == source) == (writes_source == 1):
                at_R1 = (oldest + tl.arange(0, BLOCK_R))[:, None]
                inside_RC = (at_R1 < last) & (c < CHANNELS)[None, :]
                slot_RC = at_R1 % RING_SIZE * CHANNELS + c[None, :]
                old_RC = tl.load(ring + source * ring_stride + slot_RC, mask=inside_RC & (at_R1 < first), other=0.0)
                new = x + (start + at_R1 - first) * x_stride + c[None, :]
                new_RC = tl.load(new, mask=inside_RC & (at_R1 >= first), other=0.0).to(tl.float32)
                tl.store(ring + block * ring_stride + slot_RC, old_RC + new_RC, mask=inside_RC)


def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    ring_NRC: torch.Tensor,
    rows: StateRows,
    activation: str,
) -> torch.Tensor:
    (num_rows, channels), (_, ring_size, _), num_seqs = x_TC.shape, ring_NRC.shape, len(rows.sources)
    out_TC, width = x_TC.new_empty(num_rows, channels), weight_CK.shape[1]
    block_s, blocks = triton.next_power_of_2(num_seqs + 1), triton.cdiv(channels, BLOCK)
    _conv_kernel[(num_rows, blocks)](
        x_TC, weight_CK, bias_C, ring_NRC, out_TC, rows.positions, rows.query_start_loc, rows.sources,
        x_TC.stride(0), weight_CK.stride(), ring_NRC.stride(0), channels, width, ring_size, activation, num_seqs,
        block_s, BLOCK,
    )  # fmt: skip
    if ring_size:
        _conv_ring_kernel[(num_seqs, blocks)](
            x_TC, ring_NRC, step_of(rows), x_TC.stride(0), ring_NRC.stride(0), num_rows, channels, width, ring_size,
            block_s, triton.next_power_of_2(ring_size), BLOCK,
        )  # fmt: skip
    return out_TC
