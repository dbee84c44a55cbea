"""What the kernels of recurrent layers share: which sequences there are, and where the inputs of a token are."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import both
from quire_kernels.states import StateRows


def step_of(rows: StateRows) -> tuple[torch.Tensor, ...]:
    """What kernels take as `step`."""
    return (
        rows.positions, rows.query_start_loc, rows.sources, rows.num_replayed, rows.targets, rows.store_start_loc,
        rows.store_lens, rows.store_blocks,
    )  # fmt: skip


@triton.jit
def exists(seq, query_start_loc, num_rows, BLOCK_S: tl.constexpr):
    """Whether a program has a sequence: none of those before it ends with the last row."""
    seqs_S = tl.arange(0, BLOCK_S)
    starts_S = tl.load(query_start_loc + seqs_S, mask=seqs_S <= seq, other=0)
    return tl.max((starts_S == num_rows).to(tl.int32), 0) == 0


@triton.jit
def token_input(in_row, in_ring, mask, is_replayed):
    """Numbers of a token, float32: from its row, or from the ring if it is replayed."""
    new = tl.load(in_row, mask=both(mask, is_replayed == 0), other=0.0).to(tl.float32)
    return tl.where(is_replayed, tl.load(in_ring, mask=both(mask, is_replayed), other=0.0), new)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, to 1e-6 of itself: log(1 + u) is 2 · artanh(u / (2 + u)), a series in at most 1/9. A GPU's
    logarithm is exact to 1e-7 of 1 only."""
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    series = 1.0 / 13.0 + square * (1.0 / 15.0)
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * series)
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * series)
    series = 1.0 + square * (1.0 / 3.0 + square * series)
    return tl.where(x > 0, x, tl.where(x <= 0, 0.0, x)) + 2.0 * z * series
