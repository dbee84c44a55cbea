"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.3), in calls::

    in_proj ──┬ query, key, value ─ causal_conv ─ gated_delta_rule ─ gated_rms_norm ─ out_proj
              └ z ───────────────────────────────────│───────────────────┘
    gate_proj ─ beta, gate ──────────────────────────┘

Each rank has some heads of keys, and the heads of values that use these.
"""

import torch
from quire_kernels import causal_conv, gated_delta_rule, gated_rms_norm
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, RowParallel, SlicedWeight, Weight
from quire_engine.models.options import GatedDeltaOptions
from quire_engine.models.step_context import StepContext


class _Gates(ColumnParallel):
    """A small projection whose results decide what the state keeps."""

    activation_bits = 16


class GatedDelta(nn.Module):
    """The gated delta rule of a layer. `pack` has to be called once its weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: GatedDeltaOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, self.eps = options, options.norm_eps or config.rms_norm_eps
        keys, values = options.num_key_heads * options.key_size, options.num_value_heads * options.value_size
        parts = {"q_proj": keys, "k_proj": keys, "v_proj": values, "z_proj": values}
        gates = {"b_proj": options.num_value_heads, "a_proj": options.num_value_heads}
        if options.by_key_head:
            parts, gates = {"in_proj_qkvz": sum(parts.values())}, {"in_proj_ba": sum(gates.values())}
        self.in_proj = ColumnParallel(config.hidden_size, parts, False, parallel)
        self.gate_proj = _Gates(config.hidden_size, gates, False, parallel)
        self.num_key_heads = options.num_key_heads // parallel.tensor_parallel_size
        self.num_value_heads = options.num_value_heads // parallel.tensor_parallel_size
        own_keys, own_values = self.num_key_heads * options.key_size, self.num_value_heads * options.value_size
        self.sizes = [own_keys, own_keys, own_values]
        if options.by_key_head:
            self.in_proj.order = self._order([*self.sizes, own_values])
            self.gate_proj.order = self._order([self.num_value_heads, self.num_value_heads])
        self.out_proj = RowParallel(values, "out_proj", config.hidden_size, False, parallel)

        channels = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        self.conv1d = SlicedWeight(channels, parallel, 1, options.conv_size)
        self.A_log, self.dt_bias = (SlicedWeight({"": options.num_value_heads}, parallel) for _ in range(2))
        self.norm = Weight(options.value_size, dtype=torch.float32)
        self.decay_H: torch.Tensor | None = None
        self.spec = RecurrentSpec(
            ((self.num_value_heads, options.key_size, options.value_size),),
            ((options.conv_size - 1, sum(self.sizes)), (0, own_keys + own_values + 2 * self.num_value_heads)),
        )

    def _order(self, sizes: list[int]) -> torch.Tensor:
        """The order of output features of which each head of keys has a part of each kind in the checkpoint; the sizes
        are those of the kinds."""
        places = torch.arange(sum(sizes), device="cpu").view(self.num_key_heads, -1)
        kinds = torch.split(places, [size // self.num_key_heads for size in sizes], dim=1)
        return torch.cat([kind.flatten() for kind in kinds])

    def pack(self) -> None:
        """Compute the decay."""
        self.decay_H = self.A_log.weight.exp()

    def forward(
        self,
        hidden_TE: torch.Tensor,
        state_NHDV: torch.Tensor,
        conv_ring_NRC: torch.Tensor,
        ring_NRI: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes the states of this step and its inputs to the cache."""
        one, rows = self.options, context.states
        assert rows is not None
        assert self.decay_H is not None, "pack was not called"
        mixed_TC, z_TV = self.in_proj(hidden_TE).split([sum(self.sizes), self.sizes[-1]], dim=-1)
        beta_TH, gate_TH = self.gate_proj(hidden_TE).chunk(2, dim=-1)
        mixed_TC = causal_conv(mixed_TC, self.conv1d.weight.squeeze(1), None, conv_ring_NRC, rows)
        query, key, value = torch.split(mixed_TC, self.sizes, dim=-1)
        num_rows = len(hidden_TE)
        out_THV = gated_delta_rule(
            query.view(num_rows, -1, one.key_size), key.view(num_rows, -1, one.key_size),
            value.view(num_rows, -1, one.value_size), gate_TH.unsqueeze(-1), beta_TH, self.decay_H,
            self.dt_bias.weight.unsqueeze(-1), state_NHDV, ring_NRI, rows, one.beta_scale,
        )  # fmt: skip
        normed_TV = gated_rms_norm(out_THV.flatten(1), z_TV, self.norm.weight, self.eps, one.value_size, False)
        out_TE: torch.Tensor = self.out_proj(normed_TV)
        return out_TE
