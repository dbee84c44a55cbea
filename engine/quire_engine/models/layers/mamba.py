"""Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060, section 7), in calls::

              ┌ z ────────────────────────────────────────┐
    in_proj ──┤ x, B, C ─ causal_conv ─ state_space ─ gated_rms_norm ─ out_proj
              └ dt ────────────────────────┘

Each rank has some heads, and the groups of B and C that these use: with fewer groups than ranks, several ranks have the
same group.

And Mamba (Gu & Dao 2023, https://arxiv.org/abs/2312.00752, section 3.4)::

    in_proj ─┬ z ─────────────────────────────────────────────────────────────────────────────────────┐
             └ x ─ causal_conv ─┬───────────────────────────────────────────────── selective_scan ─ gate ─ out_proj
                                └ x_proj (a sum over the ranks) ─ B, C, and dt_proj ─────┘
"""

import torch
from quire_kernels import activate_and_mul, causal_conv, gated_rms_norm, rms_norm, selective_scan, state_space
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, RowParallel, SlicedWeight, Weight
from quire_engine.models.options import MambaOptions, SelectiveOptions
from quire_engine.models.step_context import StepContext


class Mamba(nn.Module):
    """Mamba-2 in a layer. `pack` has to be called once its weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: MambaOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, self.eps, self.group = options, options.norm_eps or config.rms_norm_eps, parallel.tensor_group
        num_heads, head_size, state_size = options.num_heads, options.head_size, options.state_size
        size, group_size = num_heads * head_size, options.num_groups * state_size
        unit = {"z_proj": head_size, "x_proj": head_size, "b_proj": state_size, "c_proj": state_size}
        parts = {"z_proj": size, "x_proj": size, "b_proj": group_size, "c_proj": group_size, "dt_proj": num_heads}
        self.in_proj = ColumnParallel(config.hidden_size, parts, options.in_bias, parallel, unit=unit)
        own_size, _, own_group_size, _, own_heads = self.in_proj.sizes
        self.num_heads, self.num_groups = own_heads, own_group_size // state_size
        self.sizes = [own_size, own_size + 2 * own_group_size, own_heads]
        self.out_proj = RowParallel(size, "out_proj", config.hidden_size, options.out_bias, parallel)

        channels = {"x_conv": size, "b_conv": group_size, "c_conv": group_size}
        unit = {name: unit[name.replace("conv", "proj")] for name in channels}
        self.conv1d = SlicedWeight(channels, parallel, 1, options.conv_size, unit=unit)
        self.conv_bias = SlicedWeight(channels, parallel, unit=unit, kind="bias") if options.conv_bias else None
        self.A_log, self.D, self.dt_bias = (SlicedWeight({"": num_heads}, parallel) for _ in range(3))
        # A group that several ranks have is normed as a whole.
        self.norms_whole = options.has_norm and options.num_groups < parallel.tensor_parallel_size
        self.gated_norm: SlicedWeight | None = None
        if options.has_norm:
            self.gated_norm = SlicedWeight({"": size}, ParallelState() if self.norms_whole else parallel)
        self.decay_H = torch.empty(0)
        self.spec = RecurrentSpec(
            ((own_heads, head_size, state_size),),
            ((options.conv_size - 1, self.sizes[1]), (0, own_size + own_heads + own_group_size)),
        )

    def pack(self) -> None:
        """Compute the decay of the weights."""
        self.decay_H = self.A_log.weight.exp()

    def forward(
        self,
        hidden_TE: torch.Tensor,
        state_MHPN: torch.Tensor,
        conv_ring_MRC: torch.Tensor,
        ring_MRI: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert context.states is not None
        options, rows = self.options, context.states
        gate_TI, mixed_TC, dt_TH = self.in_proj(hidden_TE).split(self.sizes, dim=-1)
        bias_C = None if self.conv_bias is None else self.conv_bias.weight
        mixed_TC = causal_conv(mixed_TC, self.conv1d.weight.squeeze(1), bias_C, conv_ring_MRC, rows)
        x_TI, b, c = torch.split(mixed_TC, self.in_proj.sizes[1:4], dim=-1)
        out_THP = state_space(
            x_TI.view(-1, self.num_heads, options.head_size), dt_TH,
            b.view(-1, self.num_groups, options.state_size), c.view(-1, self.num_groups, options.state_size),
            self.decay_H, self.D.weight, self.dt_bias.weight, state_MHPN, ring_MRI, rows, options.dt_limits,
        )  # fmt: skip
        out_TE: torch.Tensor = self.out_proj(self._gated(out_THP.flatten(1), gate_TI))
        return out_TE

    def _gated(self, out_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        own, (whole_size, _) = self.in_proj.projections[0].rows, self.in_proj.projections[0].shape
        if self.norms_whole:
            assert self.group is not None
            whole = out_TI.new_zeros(len(out_TI), 2, whole_size)
            whole[:, 0, own], whole[:, 1, own] = out_TI, gate_TI
            out_TI, gate_TI = self.group.all_reduce(whole).unbind(1)
        if self.gated_norm is None:
            return activate_and_mul(gate_TI, "silu", out_TI)
        gated_TI = gated_rms_norm(
            out_TI, gate_TI, self.gated_norm.weight, self.eps, whole_size // self.options.num_groups,
            self.options.gates_first,
        )  # fmt: skip
        return gated_TI[:, own] if self.norms_whole else gated_TI


class Selective(nn.Module):
    """Mamba in a layer. Each rank has some channels. `pack` has to be called once its weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: SelectiveOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, size, state_size = options, options.num_channels, options.state_size
        self.in_proj = ColumnParallel(config.hidden_size, {"u_proj": size, "z_proj": size}, options.bias, parallel)
        own_size = self.in_proj.sizes[0]
        self.conv1d = SlicedWeight({"": size}, parallel, 1, options.conv_size)
        self.conv_bias = SlicedWeight({"conv1d": size}, parallel, kind="bias") if options.conv_bias else None
        self.x_proj = RowParallel(size, "x_proj", options.dt_rank + 2 * state_size, False, parallel)
        self.dt_proj = ColumnParallel(options.dt_rank, {"dt_proj": size}, False, parallel)
        self.dt_bias = SlicedWeight({"dt_proj": size}, parallel, kind="bias")
        self.A_log, self.D = SlicedWeight({"": size}, parallel, state_size), SlicedWeight({"": size}, parallel)
        self.out_proj = RowParallel(size, "out_proj", config.hidden_size, options.bias, parallel)
        self.sizes = [options.dt_rank, state_size, state_size]
        if options.norm_eps is not None and options.norm_weights:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                Weight.of_norm(one, config.options.norms) for one in self.sizes
            )
        self.norms: list[torch.Tensor] = []
        self.decay_CN = torch.empty(0)
        self.spec = RecurrentSpec(
            ((own_size, state_size),), ((options.conv_size - 1, own_size), (0, 2 * own_size + state_size))
        )

    def pack(self) -> None:
        """Compute the decay, and the norms of which there are no weights."""
        self.decay_CN = self.A_log.weight.exp()
        if self.options.norm_eps is not None:
            self.norms = [self.D.weight.new_ones(size) for size in self.sizes]
            if self.options.norm_weights:
                self.norms = [one.weight for one in (self.dt_layernorm, self.b_layernorm, self.c_layernorm)]

    def forward(
        self,
        hidden_TE: torch.Tensor,
        state_MCN: torch.Tensor,
        conv_ring_MRC: torch.Tensor,
        ring_MRI: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert context.states is not None
        rows, eps = context.states, self.options.norm_eps
        x_TC, gate_TC = self.in_proj(hidden_TE).split(self.in_proj.sizes, dim=-1)
        bias_C = None if self.conv_bias is None else self.conv_bias.weight
        x_TC = causal_conv(x_TC, self.conv1d.weight.squeeze(1), bias_C, conv_ring_MRC, rows)
        parts = self.x_proj(x_TC).split(self.sizes, dim=-1)
        if eps is not None:
            parts = [rms_norm(part, weight, eps) for part, weight in zip(parts, self.norms, strict=True)]
        dt, b_TN, c_TN = parts
        out_TC = selective_scan(
            x_TC, self.dt_proj(dt), b_TN, c_TN, self.decay_CN, self.D.weight, self.dt_bias.weight, state_MCN, ring_MRI,
            rows,
        )  # fmt: skip
        out_TE: torch.Tensor = self.out_proj(activate_and_mul(gate_TC, "silu", out_TC))
        return out_TE
