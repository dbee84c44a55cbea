"""Recurrences over tokens in the Triton language: the gated delta rule, state spaces, and the RG-LRU.

::

    scan    program (sequence, head, block of columns)    state ─► its tokens, one after the other ─► out, states
            program (sequence, block of the state's rows, or of channels)
    keep    program (sequence, one of its last R rows)    inputs ─► the ring of the target

A program holds its part of the state in registers over all tokens, and the number of programs depends on no data. Rings
are written after all states: several programs read the same inputs of a ring.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import both, cast
from quire_kernels.gpu.states import exists, softplus, step_of, token_input
from quire_kernels.states import StateRows

STATE = 4096
"""Numbers of the state in a program: 32 for each of 128 threads."""
MAX_ROWS = 64
"""Of a program of state spaces; with Mamba's 16 numbers in a row, more programs."""
LRU_BLOCK = 128
"""Channels of a program of the RG-LRU: one for each thread, as tokens follow each other."""
BLOCK = 1024
"""Numbers that are copied to a ring at a time."""


@triton.jit
def _unit(x_D):
    return x_D * tl.math.rsqrt(tl.sum(x_D * x_D, 0) + 1e-6)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_delta_kernel(
    inputs, strides, decay, gate_bias, state, ring, out, step, state_stride, ring_stride, num_rows, beta_scale,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, GATE_WIDTH: tl.constexpr,
    RING_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, block of columns)."""
    query, key, value, gate, beta = inputs
    query_stride, key_stride, value_stride, gate_stride, beta_stride = strides
    positions, query_start_loc, sources, num_replayed, _, store_start_loc, store_lens, store_blocks = step
    seq, head = tl.program_id(0), tl.program_id(1)
    if not exists(seq, query_start_loc, num_rows, BLOCK_S):
        return
    start, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    first, source, replayed = tl.load(positions + start), tl.load(sources + seq), tl.load(num_replayed + seq)
    d_D, v_V = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_D, in_V = d_D < SIZE, v_V < WIDTH
    in_DV = in_D[:, None] & in_V[None, :]
    key_at = head // (HEADS // GROUPS) * SIZE + d_D
    value_at = head * WIDTH + v_V
    gate_at = head * GATE_WIDTH + (d_D if GATE_WIDTH > 1 else tl.zeros_like(d_D))
    states = state + head * SIZE * WIDTH + d_D[:, None] * WIDTH + v_V[None, :]
    state_DV = tl.load(states + source * state_stride, mask=both(in_DV, source >= 0), other=0.0)
    rate, bias_D = tl.load(decay + head), tl.load(gate_bias + gate_at, mask=in_D, other=0.0)
    store, store_end = tl.load(store_start_loc + seq), tl.load(store_start_loc + seq + 1)
    next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)
    for token in range(replayed + end - start):
        is_replayed, row = token < replayed, start + token - replayed
        old = ring
        if RING_SIZE > 0:
            old += source * ring_stride
            old += (first - replayed + token) % RING_SIZE * (GROUPS * SIZE + HEADS * (WIDTH + GATE_WIDTH + 1))
        key_D = _unit(token_input(key + row * key_stride + key_at, old + key_at, in_D, is_replayed))
        old += GROUPS * SIZE
        value_V = token_input(value + row * value_stride + value_at, old + value_at, in_V, is_replayed)
        old += HEADS * WIDTH
        gate_D = token_input(gate + row * gate_stride + gate_at, old + gate_at, in_D, is_replayed)
        old += HEADS * GATE_WIDTH
        scale = beta_scale * tl.sigmoid(token_input(beta + row * beta_stride + head, old + head, True, is_replayed))
        query_D = tl.load(query + row * query_stride + key_at, mask=both(in_D, token >= replayed), other=0.0)
        query_D = _unit(query_D.to(tl.float32)) * (1.0 / SIZE**0.5)

        state_DV *= tl.exp(-rate * softplus(gate_D + bias_D))[:, None]
        delta_V = scale * (value_V - tl.sum(state_DV * key_D[:, None], 0))
        state_DV += key_D[:, None] * delta_V[None, :]
        out_V = cast(tl.sum(state_DV * query_D[:, None], 0), out.dtype.element_ty)
        tl.store(out + row * HEADS * WIDTH + value_at, out_V, mask=both(in_V, token >= replayed))
        while next_len == token + 1:
            tl.store(states + tl.load(store_blocks + store) * state_stride, state_DV, mask=in_DV)
            store += 1
            next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)


@triton.jit(do_not_specialize=["num_rows"])
def _state_space_kernel(
    inputs, strides, decay, skip, dt_bias, state, ring, out, step, state_stride, ring_stride, num_rows, dt_limits,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, DECAY_SIZE: tl.constexpr,
    RING_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block of rows of the state). The heads of a block are in one group."""
    x, dt, b, c = inputs
    x_stride, dt_stride, b_stride, c_stride = strides
    dt_lowest, dt_highest = dt_limits
    positions, query_start_loc, sources, num_replayed, _, store_start_loc, store_lens, store_blocks = step
    seq = tl.program_id(0)
    if not exists(seq, query_start_loc, num_rows, BLOCK_S):
        return
    start, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    first, source, replayed = tl.load(positions + start), tl.load(sources + seq), tl.load(num_replayed + seq)
    GROUP_ROWS: tl.constexpr = HEADS // GROUPS * CHANNELS
    PARTS: tl.constexpr = (GROUP_ROWS + BLOCK_R - 1) // BLOCK_R
    group, n_N = tl.program_id(1) // PARTS, tl.arange(0, BLOCK_N)
    in_group_R = tl.program_id(1) % PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
    r_R, in_R, in_N = group * GROUP_ROWS + in_group_R, in_group_R < GROUP_ROWS, n_N < SIZE
    head_R, in_RN, b_at = r_R // CHANNELS, in_R[:, None] & in_N[None, :], group * SIZE + n_N
    states = state + r_R[:, None] * SIZE + n_N[None, :]
    state_RN = tl.load(states + source * state_stride, mask=both(in_RN, source >= 0), other=0.0)
    bias_R = tl.load(dt_bias + head_R, mask=in_R, other=0.0)
    if DECAY_SIZE == 1:
        rate_R1 = tl.load(decay + head_R, mask=in_R, other=0.0)[:, None]
    else:
        rate_R1 = tl.load(decay + head_R[:, None] * SIZE + n_N[None, :], mask=in_RN, other=0.0)
    store, store_end = tl.load(store_start_loc + seq), tl.load(store_start_loc + seq + 1)
    next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)
    for token in range(replayed + end - start):
        is_replayed, row = token < replayed, start + token - replayed
        old = ring
        if RING_SIZE > 0:
            old += source * ring_stride
            old += (first - replayed + token) % RING_SIZE * (HEADS * (CHANNELS + 1) + GROUPS * SIZE)
        x_R = token_input(x + row * x_stride + r_R, old + r_R, in_R, is_replayed)
        old += HEADS * CHANNELS
        dt_R = softplus(token_input(dt + row * dt_stride + head_R, old + head_R, in_R, is_replayed) + bias_R)
        dt_R = tl.where(dt_R < dt_lowest, dt_lowest, tl.where(dt_R > dt_highest, dt_highest, dt_R))
        old += HEADS
        b_N = token_input(b + row * b_stride + b_at, old + b_at, in_N, is_replayed)
        c_N = tl.load(c + row * c_stride + b_at, mask=both(in_N, token >= replayed), other=0.0).to(tl.float32)

        state_RN *= tl.exp(-rate_R1 * dt_R[:, None])
        state_RN += (dt_R * x_R)[:, None] * b_N[None, :]
        out_R = tl.sum(state_RN * c_N[None, :], 1)
        if skip is not None:
            out_R += tl.load(skip + head_R, mask=in_R, other=0.0) * x_R
        out_R = cast(out_R, out.dtype.element_ty)
        tl.store(out + row * HEADS * CHANNELS + r_R, out_R, mask=both(in_R, token >= replayed))
        while next_len == token + 1:
            tl.store(states + tl.load(store_blocks + store) * state_stride, state_RN, mask=in_RN)
            store += 1
            next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)


@triton.jit(do_not_specialize=["num_rows"])
def _rg_lru_kernel(
    inputs, strides, gate_bias, decay, state, ring, out, step, state_stride, ring_stride, num_rows,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, RING_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (sequence, block of channels)."""
    x, gates = inputs
    x_stride, gates_stride = strides
    positions, query_start_loc, sources, num_replayed, _, store_start_loc, store_lens, store_blocks = step
    seq = tl.program_id(0)
    if not exists(seq, query_start_loc, num_rows, BLOCK_S):
        return
    start, end = tl.load(query_start_loc + seq), tl.load(query_start_loc + seq + 1)
    first, source, replayed = tl.load(positions + start), tl.load(sources + seq), tl.load(num_replayed + seq)
    c_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_C, gate_at = c_C < CHANNELS, c_C // SIZE * SIZE + c_C  # of inputs; those of states are SIZE further
    states = state + c_C
    state_C = tl.load(states + source * state_stride, mask=both(in_C, source >= 0), other=0.0)
    rate_C = tl.load(decay + c_C, mask=in_C, other=0.0)
    input_bias_C = tl.load(gate_bias + gate_at, mask=in_C, other=0.0)
    state_bias_C = tl.load(gate_bias + gate_at + SIZE, mask=in_C, other=0.0)
    store, store_end = tl.load(store_start_loc + seq), tl.load(store_start_loc + seq + 1)
    next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)
    for token in range(replayed + end - start):
        is_replayed, row, position = token < replayed, start + token - replayed, first - replayed + token
        old = ring
        if RING_SIZE > 0:
            old += source * ring_stride + position % RING_SIZE * (3 * CHANNELS)
        x_C = token_input(x + row * x_stride + c_C, old + c_C, in_C, is_replayed)
        old += CHANNELS
        own = gates + row * gates_stride + gate_at
        input_C = token_input(own, old + gate_at, in_C, is_replayed) + input_bias_C
        log_C = token_input(own + SIZE, old + gate_at + SIZE, in_C, is_replayed) + state_bias_C
        input_C, log_C = tl.sigmoid(input_C) * x_C, -rate_C * tl.sigmoid(log_C)
        rest_C = 1.0 - tl.exp(2.0 * log_C)
        rest_C = tl.where(rest_C < 0, 0.0, rest_C)
        next_C = tl.exp(log_C) * state_C + tl.sqrt(rest_C) * input_C
        state_C = tl.where(position == 0, input_C, next_C)
        tl.store(out + row * CHANNELS + c_C, cast(state_C, out.dtype.element_ty), mask=both(in_C, token >= replayed))
        while next_len == token + 1:
            tl.store(states + tl.load(store_blocks + store) * state_stride, state_C, mask=in_C)
            store += 1
            next_len = tl.load(store_lens + store, mask=store < store_end, other=-1)


@triton.jit
def _copy(source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(0, SIZE, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i, mask=i < SIZE, other=0.0).to(tl.float32), mask=i < SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def _store_inputs_kernel(
    inputs, strides, ring, positions, query_start_loc, targets, ring_stride, num_rows,
    SIZES: tl.constexpr, INPUTS: tl.constexpr, RING_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (sequence, row, counted from its last)."""
    seq = tl.program_id(0)
    if not exists(seq, query_start_loc, num_rows, BLOCK_S):
        return
    row = tl.load(query_start_loc + seq + 1) - 1 - tl.program_id(1)
    if row < tl.load(query_start_loc + seq):
        return
    slot = tl.load(positions + row) % RING_SIZE
    out = ring + tl.load(targets + seq) * ring_stride + slot * INPUTS
    for i in tl.static_range(len(SIZES)):
        _copy(inputs[i] + row * strides[i], out, SIZES[i], BLOCK)
        out += SIZES[i]


def _store_inputs(inputs: Sequence[torch.Tensor], ring_NRI: torch.Tensor, rows: StateRows) -> None:
    """To the rings of the targets."""
    num_seqs, ring_size = len(rows.sources), ring_NRI.shape[1]
    if not ring_size:
        return
    _store_inputs_kernel[(num_seqs, ring_size)](
        tuple(inputs), _strides(inputs), ring_NRI, rows.positions, rows.query_start_loc, rows.targets,
        ring_NRI.stride(0), len(rows.positions), tuple(one.shape[1] for one in inputs), ring_NRI.shape[2], ring_size,
        triton.next_power_of_2(num_seqs + 1), BLOCK,
    )  # fmt: skip


def _strides(inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(one.stride(0) for one in inputs)


def gated_delta_rule(
    inputs: Sequence[torch.Tensor],
    decay_H: torch.Tensor,
    gate_bias_HW: torch.Tensor,
    state_NHDV: torch.Tensor,
    ring_NRI: torch.Tensor,
    rows: StateRows,
    beta_scale: float,
) -> torch.Tensor:
    """The inputs are matrices: query, key, value, gate and beta."""
    (_, heads, size, width), num_seqs, num_rows = state_NHDV.shape, len(rows.sources), len(rows.positions)
    block_d = triton.next_power_of_2(size)
    block_v = min(max(STATE // block_d, 1), triton.next_power_of_2(width))
    out_THV = inputs[2].new_empty(num_rows, heads, width)
    _gated_delta_kernel[(num_seqs, heads, triton.cdiv(width, block_v))](
        tuple(inputs), _strides(inputs), decay_H, gate_bias_HW, state_NHDV, ring_NRI, out_THV, step_of(rows),
        state_NHDV.stride(0), ring_NRI.stride(0), num_rows, beta_scale, inputs[1].shape[1] // size, heads, size, width,
        gate_bias_HW.shape[1], ring_NRI.shape[1], triton.next_power_of_2(num_seqs + 1), block_d, block_v,
    )  # fmt: skip
    _store_inputs(inputs[1:], ring_NRI, rows)
    return out_THV


def state_space(
    inputs: Sequence[torch.Tensor],
    decay_HN: torch.Tensor,
    skip_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor,
    state: torch.Tensor,
    ring_MRI: torch.Tensor,
    rows: StateRows,
    dt_limits: tuple[float, float],
    groups: int,
) -> torch.Tensor:
    """The inputs are matrices: x, dt, B and C. Returns one, too."""
    (num_rows, width), heads, size = inputs[0].shape, inputs[1].shape[1], inputs[2].shape[1] // groups
    num_seqs, out, block_n = len(rows.sources), inputs[0].new_empty(num_rows, width), triton.next_power_of_2(size)
    block_r = min(max(STATE // block_n, 1), MAX_ROWS, triton.next_power_of_2(width // groups))
    _state_space_kernel[(num_seqs, groups * triton.cdiv(width // groups, block_r))](
        tuple(inputs), _strides(inputs), decay_HN, skip_H, dt_bias_H, state, ring_MRI, out, step_of(rows),
        state.stride(0), ring_MRI.stride(0), num_rows, dt_limits, groups, heads, width // heads, size,
        decay_HN.shape[1], ring_MRI.shape[1], triton.next_power_of_2(num_seqs + 1), block_r, block_n,
    )  # fmt: skip
    _store_inputs(inputs[:3], ring_MRI, rows)
    return out


def rg_lru(
    inputs: Sequence[torch.Tensor],
    gate_bias_HG: torch.Tensor,
    decay_C: torch.Tensor,
    state_MC: torch.Tensor,
    ring_MRI: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """The inputs are matrices: x and gates."""
    (num_rows, channels), num_seqs = inputs[0].shape, len(rows.sources)
    out_TC, block_c = inputs[0].new_empty(num_rows, channels), min(LRU_BLOCK, triton.next_power_of_2(channels))
    _rg_lru_kernel[(num_seqs, triton.cdiv(channels, block_c))](
        tuple(inputs), _strides(inputs), gate_bias_HG, decay_C, state_MC, ring_MRI, out_TC, step_of(rows),
        state_MC.stride(0), ring_MRI.stride(0), num_rows, channels, channels // len(gate_bias_HG), ring_MRI.shape[1],
        triton.next_power_of_2(num_seqs + 1), block_c,
    )  # fmt: skip
    _store_inputs(inputs, ring_MRI, rows)
    return out_TC
