"""Recurrences over the tokens of a sequence whose state is a matrix for each head or channel, kept in a cache
(`states.py`): the gated delta rule, the state spaces of Mamba-2 and Mamba, and the RG-LRU, whose state is a number.

Each is computed token by token in float32. The ring of a block has the inputs that a replay needs, after the
convolution before the recurrence, one after the other; they are float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quire_kernels.cpu import check_tensor, launch, library_for, pointer, structure, uses_triton, with_dense_rows
from quire_kernels.states import StateRows, block_stride, step_of

_GatedDeltaCall, _StateSpaceCall = structure("GatedDeltaCall"), structure("StateSpaceCall")
_RgLruCall = structure("RgLruCall")


def gated_delta_rule(
    query_TGD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_THV: torch.Tensor,
    gate_THW: torch.Tensor,
    beta_TH: torch.Tensor,
    decay_H: torch.Tensor,
    gate_bias_HW: torch.Tensor,
    state_NHDV: torch.Tensor,
    ring_NRI: torch.Tensor,
    rows: StateRows,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.1), [T, H, V]::

        g = exp(-decay · softplus(gate + gate_bias))        q, k = of length 1 (eps 1e-6); q / √D
        S = g · S;  S += k ⊗ (beta · (v - kᵀS));  out = qᵀS        beta = beta_scale · sigmoid(beta_TH)

    Raises TypeError or ValueError if a tensor does not fit the others; so do the next two.

    Args:
        query_TGD: of G heads, each for H / G consecutive heads of values; rows may be parts of longer ones, as those of
            all inputs.
        key_TGD: likewise.
        value_THV: of H heads.
        gate_THW: W is 1, or D for a decay of each channel of the keys (Kimi Linear, https://arxiv.org/abs/2510.26692).
        beta_TH: before the sigmoid.
        decay_H: float32.
        gate_bias_HW: float32.
        state_NHDV: float32.
        ring_NRI: float32, of I = G·D + H·V + H·W + H inputs: key, value, gate, beta. R is at least the number of drafts
            that a step may have.
        rows: of the step.
        beta_scale: see above.
    """
    (num_rows, groups, size), (_, heads, width), gate_width = key_TGD.shape, value_THV.shape, gate_THW.shape[-1]
    if heads % groups or gate_width not in (1, size):
        raise ValueError(
            f"{heads} heads of values must be a multiple of {groups} heads of keys, and each have a gate, or {size}, "
            f"not {gate_width}"
        )
    inputs = _rows_of(
        num_rows, query_TGD=(query_TGD, groups, size), key_TGD=(key_TGD, groups, size),
        value_THV=(value_THV, heads, width), gate_THW=(gate_THW, heads, gate_width), beta_TH=(beta_TH, heads),
    )  # fmt: skip
    if uses_triton(value_THV):
        from quire_kernels.gpu import recurrence as gpu

        return gpu.gated_delta_rule(inputs, decay_H, gate_bias_HW, state_NHDV, ring_NRI, rows, beta_scale)
    if library_for(*inputs) is not None:
        check_tensor("decay_H", decay_H, torch.float32, heads)
        check_tensor("gate_bias_HW", gate_bias_HW, torch.float32, heads, gate_width)
        query, key, value, gate, beta = inputs
        out_THV = torch.empty(num_rows, heads, width, dtype=value.dtype)
        num_inputs, ring_size = groups * size + heads * (width + gate_width + 1), ring_NRI.shape[1]
        call = _GatedDeltaCall(
            query=query.data_ptr(), query_stride=query.stride(0), key=key.data_ptr(), key_stride=key.stride(0),
            value=value.data_ptr(), value_stride=value.stride(0), gate=gate.data_ptr(), gate_stride=gate.stride(0),
            beta=beta.data_ptr(), beta_stride=beta.stride(0), decay=decay_H.data_ptr(),
            gate_bias=gate_bias_HW.data_ptr(), state=state_NHDV.data_ptr(),
            state_stride=block_stride("state_NHDV", state_NHDV, heads, size, width), ring=ring_NRI.data_ptr(),
            ring_stride=block_stride("ring_NRI", ring_NRI, ring_size, num_inputs), out=out_THV.data_ptr(),
            groups=groups, heads=heads, size=size, width=width, gate_width=gate_width, ring_size=ring_size,
            beta_scale=beta_scale, is_float=value.dtype == torch.float32, step=step_of(rows, num_rows), rows=num_rows,
        )  # fmt: skip
        launch("quire_gated_delta_rule", call)
        return out_THV

    def step(
        state_HDV: torch.Tensor, query: torch.Tensor | None, inputs: Sequence[torch.Tensor], _: int
    ) -> torch.Tensor:
        key, value, gate, beta = inputs
        gate_HW = torch.exp(-decay_H[:, None] * F.softplus(gate.view(heads, -1) + gate_bias_HW))
        state_HDV *= gate_HW[:, :, None]
        key_HD = _unit(key.view(groups, size)).repeat_interleave(heads // groups, 0)
        delta_HV = value.view(heads, width) - (state_HDV * key_HD[:, :, None]).sum(1)
        delta_HV *= (beta_scale * torch.sigmoid(beta))[:, None]
        state_HDV += key_HD[:, :, None] * delta_HV[:, None]
        if query is None:
            return delta_HV
        query_HD = (_unit(query.view(groups, size)) / math.sqrt(size)).repeat_interleave(heads // groups, 0)
        return (state_HDV * query_HD[:, :, None]).sum(1)

    return _scan(step, inputs[0], inputs[1:], state_NHDV, ring_NRI, rows, value_THV)


def state_space(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    b_TGN: torch.Tensor,
    c_TGN: torch.Tensor,
    decay_H: torch.Tensor,
    skip_H: torch.Tensor | None,
    dt_bias_H: torch.Tensor,
    state_MHPN: torch.Tensor,
    ring_MRI: torch.Tensor,
    rows: StateRows,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Mamba-2's state space (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section 7), [T, H, P]::

        dt = clamp(softplus(dt + dt_bias), *dt_limits)
        S = exp(-decay · dt) · S + dt · x ⊗ B;  out = S·C + skip · x

    Args:
        x_THP: of H heads of P channels; rows may be parts of longer ones, as those of all inputs.
        dt_TH: before the softplus.
        b_TGN: of G groups, each for H / G consecutive heads.
        c_TGN: likewise.
        decay_H: float32, as are the next two.
        skip_H: None: there is none.
        dt_bias_H: added to dt.
        state_MHPN: float32, by block.
        ring_MRI: float32, of I = H·P + H + G·N inputs: x, dt, B. R is at least the number of drafts of a step.
        rows: of the step.
        dt_limits: of dt.
    """
    (num_rows, heads, channels), (_, groups, size) = x_THP.shape, b_TGN.shape
    if heads % groups:
        raise ValueError(f"{heads} heads must be a multiple of {groups} groups")
    inputs = _rows_of(
        num_rows, x_THP=(x_THP, heads, channels), dt_TH=(dt_TH, heads), b_TGN=(b_TGN, groups, size),
        c_TGN=(c_TGN, groups, size),
    )  # fmt: skip
    out = _state_space(inputs, decay_H[:, None], skip_H, dt_bias_H, state_MHPN, ring_MRI, rows, dt_limits, groups)
    return out.view(num_rows, heads, channels)


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    decay_CN: torch.Tensor,
    skip_C: torch.Tensor,
    dt_bias_C: torch.Tensor,
    state_MCN: torch.Tensor,
    ring_MRI: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Mamba's selective state space (Gu & Dao 2023, https://arxiv.org/abs/2312.00752, section 3.2), [T, C]::

        dt = softplus(dt + dt_bias);  S = exp(-decay · dt) · S + (dt · x) ⊗ B;  out = S·C + skip · x

    Args:
        x_TC: of C channels; rows may be parts of longer ones, as those of all inputs.
        dt_TC: before the bias and the softplus.
        b_TN: of N numbers, shared by all channels.
        c_TN: likewise.
        decay_CN: float32, as are the next two.
        skip_C: multiplies x.
        dt_bias_C: added to dt.
        state_MCN: float32, by block.
        ring_MRI: float32, of I = 2·C + N inputs: x, dt, B. R is at least the number of drafts of a step.
        rows: of the step.
    """
    (num_rows, channels), size = x_TC.shape, b_TN.shape[1]
    inputs = _rows_of(
        num_rows, x_TC=(x_TC, channels), dt_TC=(dt_TC, channels), b_TN=(b_TN, size), c_TN=(c_TN, size)
    )  # fmt: skip
    limits = (0.0, float("inf"))
    return _state_space(inputs, decay_CN, skip_C, dt_bias_C, state_MCN, ring_MRI, rows, limits, 1)


def rg_lru(
    x_TC: torch.Tensor,
    gates_THG: torch.Tensor,
    gate_bias_HG: torch.Tensor,
    decay_C: torch.Tensor,
    state_MC: torch.Tensor,
    ring_MRI: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """The real-gated linear recurrent unit of Griffin (De et al. 2024, https://arxiv.org/abs/2402.19427, section 2.4),
    [T, C]::

        i, r = sigmoid(gates + gate_bias);  a = exp(-decay · r), 0 at position 0
        S = a · S + √(1 - a²) · i · x;  out = S

    Args:
        x_TC: rows may be parts of longer ones, as those of the gates.
        gates_THG: of H heads of C / H channels; i of all channels of a head, then r.
        gate_bias_HG: float32, as is the next.
        decay_C: 8 times the softplus of the learned parameter.
        state_MC: float32, by block.
        ring_MRI: float32, of I = 3·C inputs: x, gates. R is at least the number of drafts of a step.
        rows: of the step.
    """
    (num_rows, channels), heads = x_TC.shape, gate_bias_HG.shape[0]
    if channels % heads:
        raise ValueError(f"{channels} channels must be a multiple of {heads} heads")
    size = channels // heads
    x, gates = _rows_of(num_rows, x_TC=(x_TC, channels), gates_THG=(gates_THG, heads, 2 * size))
    if uses_triton(x):
        from quire_kernels.gpu import recurrence as gpu

        return gpu.rg_lru((x, gates), gate_bias_HG, decay_C, state_MC, ring_MRI, rows)
    if library_for(x, gates) is not None:
        check_tensor("gate_bias_HG", gate_bias_HG, torch.float32, heads, 2 * size)
        check_tensor("decay_C", decay_C, torch.float32, channels)
        out_TC, ring_size = torch.empty(num_rows, channels, dtype=x.dtype), ring_MRI.shape[1]
        call = _RgLruCall(
            x=x.data_ptr(), x_stride=x.stride(0), gates=gates.data_ptr(), gates_stride=gates.stride(0),
            gate_bias=gate_bias_HG.data_ptr(), decay=decay_C.data_ptr(), state=state_MC.data_ptr(),
            state_stride=block_stride("state_MC", state_MC, channels), ring=ring_MRI.data_ptr(),
            ring_stride=block_stride("ring_MRI", ring_MRI, ring_size, 3 * channels), out=out_TC.data_ptr(),
            heads=heads, size=size, ring_size=ring_size, is_float=x.dtype == torch.float32,
            step=step_of(rows, num_rows), rows=num_rows,
        )  # fmt: skip
        launch("quire_rg_lru", call)
        return out_TC

    def step(
        state_C: torch.Tensor, _: torch.Tensor | None, inputs: Sequence[torch.Tensor], position: int
    ) -> torch.Tensor:
        both_H2W = (inputs[1].view(heads, -1) + gate_bias_HG).sigmoid().view(heads, 2, size)
        input_C, state_gate_C = both_H2W[:, 0].flatten() * inputs[0], both_H2W[:, 1].flatten()
        if position == 0:
            return state_C.copy_(input_C)
        log_C = -decay_C * state_gate_C
        scale_C = (1 - (2 * log_C).exp()).sqrt()
        return state_C.mul_(log_C.exp()).add_(scale_C * input_C)

    return _scan(step, x, (x, gates), state_MC, ring_MRI, rows, x_TC)


def _rows_of(num_rows: int, **inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Each input, of T tokens, as a matrix whose rows have no gaps. It is given with the shape that a row must have."""
    matrices = []
    for name, (tensor, *shape) in inputs.items():
        if tensor.shape != (num_rows, *shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {[num_rows, *shape]}")
        matrices.append(with_dense_rows(tensor.flatten(1)))
    return matrices


def _state_space(
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
    """Mamba's and Mamba-2's in one: the heads of Mamba have one channel, and decays that differ. x, dt, B and C are
    matrices, and so is the result."""
    x, dt, b, c = inputs
    heads, (num_rows, width), ring_size = dt.shape[1], x.shape, ring_MRI.shape[1]
    channels, size = width // heads, b.shape[1] // groups
    if uses_triton(x):
        from quire_kernels.gpu import recurrence as gpu

        return gpu.state_space(inputs, decay_HN, skip_H, dt_bias_H, state, ring_MRI, rows, dt_limits, groups)
    if library_for(*inputs) is None:

        def step(state: torch.Tensor, c: torch.Tensor | None, inputs: Sequence[torch.Tensor], _: int) -> torch.Tensor:
            state_HPN, dt_H = state.view(heads, channels, size), F.softplus(inputs[1] + dt_bias_H).clamp(*dt_limits)
            x_HP, b_HN = inputs[0].view(heads, channels), by_head(inputs[2])
            state_HPN *= torch.exp(-decay_HN * dt_H[:, None])[:, None]
            state_HPN += (dt_H[:, None] * x_HP)[:, :, None] * b_HN[:, None]
            if c is None:
                return x_HP
            out_HP = (state_HPN * by_head(c)[:, None]).sum(2)
            return (out_HP if skip_H is None else out_HP + skip_H[:, None] * x_HP).flatten()

        def by_head(values: torch.Tensor) -> torch.Tensor:
            return values.view(groups, size).repeat_interleave(heads // groups, 0)

        return _scan(step, c, inputs[:3], state, ring_MRI, rows, x)
    check_tensor("decay", decay_HN, torch.float32, heads, decay_HN.shape[1])
    check_tensor("dt_bias", dt_bias_H, torch.float32, heads)
    if skip_H is not None:
        check_tensor("skip", skip_H, torch.float32, heads)
    state_shape = (heads, channels, size) if state.dim() == 4 else (heads, size)
    out = torch.empty(num_rows, width, dtype=x.dtype)
    call = _StateSpaceCall(
        x=x.data_ptr(), x_stride=x.stride(0), dt=dt.data_ptr(), dt_stride=dt.stride(0), b=b.data_ptr(),
        b_stride=b.stride(0), c=c.data_ptr(), c_stride=c.stride(0), decay=decay_HN.data_ptr(), skip=pointer(skip_H),
        dt_bias=dt_bias_H.data_ptr(), state=state.data_ptr(),
        state_stride=block_stride("the states", state, *state_shape), ring=ring_MRI.data_ptr(),
        ring_stride=block_stride("ring_MRI", ring_MRI, ring_size, width + heads + b.shape[1]), out=out.data_ptr(),
        heads=heads, channels=channels, groups=groups, size=size, decay_size=decay_HN.shape[1], ring_size=ring_size,
        dt_lowest=dt_limits[0], dt_highest=dt_limits[1], is_float=x.dtype == torch.float32,
        step=step_of(rows, num_rows), rows=num_rows,
    )  # fmt: skip
    launch("quire_state_space", call)
    return out


Step = Callable[[torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor], int], torch.Tensor]
"""(state, written in place; what reads it after the token, or None for a token that is replayed; the token's inputs and
its position) → the token's output."""


def _scan(
    step: Step,
    reader: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    states: torch.Tensor,
    ring_NRI: torch.Tensor,
    rows: StateRows,
    like: torch.Tensor,
) -> torch.Tensor:
    """Run a recurrence in torch, with matrices of rows; the result has the shape and dtype of `like`."""
    flat, reader, widths = torch.cat(list(inputs), 1).float(), reader.float(), [one.shape[1] for one in inputs]
    out, ring_size = torch.empty(like.shape, dtype=like.dtype, device=like.device), ring_NRI.shape[1]
    for one in rows.sequences():
        first = one.first - one.num_replayed
        state = torch.zeros_like(states[0]) if one.source < 0 else states[one.source].clone()
        replayed = [ring_NRI[one.source, position % ring_size].clone() for position in range(first, one.first)]
        for number, token in enumerate([*replayed, *flat[one.start : one.end]], 1):
            row = one.start + number - 1 - one.num_replayed
            result = step(state, None if row < one.start else reader[row], token.split(widths), first + number - 1)
            if row >= one.start:
                out[row] = result.to(out.dtype)
            for length, block in one.stores:
                if length == number:
                    states[block] = state
        for row in range(max(one.start, one.end - ring_size), one.end) if ring_size else ():
            ring_NRI[one.target, (one.first + row - one.start) % ring_size] = flat[row]
    return out


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)
