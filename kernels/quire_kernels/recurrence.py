"""Recurrences over the tokens of a sequence whose state is a matrix for each head or channel, kept in a cache
(`states.py`): the gated delta rule, and the state spaces of Mamba-2 and Mamba.

Each is computed token by token in float32. The ring of a block has the inputs that a replay needs, after the
convolution before the recurrence, one after the other; they are float32.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quire_kernels.states import StateRows


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
    (_, groups, size), (_, heads, width) = key_TGD.shape, value_THV.shape

    def step(state_HDV: torch.Tensor, query: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        key, value, gate, beta = inputs
        gate_HW = torch.exp(-decay_H[:, None] * F.softplus(gate.view(heads, -1) + gate_bias_HW))
        state_HDV *= gate_HW[:, :, None]
        key_HD = _unit(key.view(groups, size)).repeat_interleave(heads // groups, 0)
        delta_HV = value.view(heads, width) - (state_HDV * key_HD[:, :, None]).sum(1)
        delta_HV *= (beta_scale * torch.sigmoid(beta))[:, None]
        state_HDV += key_HD[:, :, None] * delta_HV[:, None]
        if query is None:
            return delta_HV
        query_HD = (_unit(query.view(groups, size)) / size**0.5).repeat_interleave(heads // groups, 0)
        out_HV: torch.Tensor = (state_HDV * query_HD[:, :, None]).sum(1)
        return out_HV

    inputs = [key_TGD, value_THV, gate_THW, beta_TH]
    return _scan(step, query_TGD, inputs, state_NHDV, ring_NRI, rows, value_THV)


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
    (_, heads, channels), (_, groups, size) = x_THP.shape, b_TGN.shape

    def step(state_HPN: torch.Tensor, c: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        x, dt, b = inputs
        x_HP, dt_H = x.view(heads, channels), F.softplus(dt + dt_bias_H).clamp(*dt_limits)
        b_HN = b.view(groups, size).repeat_interleave(heads // groups, 0)
        state_HPN *= torch.exp(-decay_H * dt_H)[:, None, None]
        state_HPN += (dt_H[:, None] * x_HP)[:, :, None] * b_HN[:, None]
        if c is None:
            return x_HP
        c_HN = c.view(groups, size).repeat_interleave(heads // groups, 0)
        out_HP = (state_HPN * c_HN[:, None]).sum(2)
        return out_HP if skip_H is None else out_HP + skip_H[:, None] * x_HP

    return _scan(step, c_TGN, [x_THP, dt_TH, b_TGN], state_MHPN, ring_MRI, rows, x_THP)


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

    def step(state_CN: torch.Tensor, c: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        x_C, dt, b_N = inputs
        dt_C = F.softplus(dt + dt_bias_C)
        state_CN *= torch.exp(-decay_CN * dt_C[:, None])
        state_CN += (dt_C * x_C)[:, None] * b_N
        return x_C if c is None else (state_CN * c).sum(1) + skip_C * x_C

    return _scan(step, c_TN, [x_TC, dt_TC, b_TN], state_MCN, ring_MRI, rows, x_TC)


Step = Callable[[torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor]], torch.Tensor]
"""(state, written in place; what reads it after the token, or None for a token that is replayed; the token's inputs) →
the token's output."""


def _scan(
    step: Step,
    reader: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    states: torch.Tensor,
    ring_NRI: torch.Tensor,
    rows: StateRows,
    like: torch.Tensor,
) -> torch.Tensor:
    """Run a recurrence in torch; the result has the shape and dtype of `like`."""
    flat, reader = torch.cat([one.flatten(1).float() for one in inputs], 1), reader.flatten(1).float()
    widths = [one[0].numel() for one in inputs]
    out, ring_size = torch.empty(like.shape, dtype=like.dtype, device=like.device), ring_NRI.shape[1]
    for one in rows.sequences():
        first = one.first - one.num_replayed
        state = torch.zeros_like(states[0]) if one.source < 0 else states[one.source].clone()
        replayed = [ring_NRI[one.source, position % ring_size].clone() for position in range(first, one.first)]
        for number, token in enumerate([*replayed, *flat[one.start : one.end]], 1):
            row = one.start + number - 1 - one.num_replayed
            result = step(state, None if row < one.start else reader[row], token.split(widths))
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
