"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.3), in calls::

    in_proj ──┬ query, key, value ─ causal_conv ─ gated_delta_rule ─ gated_rms_norm ─ out_proj
              └ z ───────────────────────────────────│───────────────────┘
    gate_proj ─ beta, gate ──────────────────────────┘

In Kimi Delta Attention (https://arxiv.org/abs/2510.26692, section 3) each channel of the keys has a decay::

    gates_down_proj ─┬ f_b_proj ─ gate, of each channel
                     └ g_b_proj ─ z, whose sigmoid is the output's gate

Each rank has some heads of keys, and the heads of values that use these.
"""

import torch
from quire_kernels import activate_and_mul, causal_conv, gated_delta_rule, gated_rms_norm
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, LoadTarget, RowParallel, SlicedWeight, Weight
from quire_engine.models.options import GatedDeltaOptions
from quire_engine.models.step_context import StepContext

OPEN_GATE = 32.0
"""Its SiLU is the same number, exactly, which divides the norm's weight: a norm of each head alone. `rms_norm` would
take the heads as rows, of which a recorded step may have no more than tokens."""


class _KeyedDecays(SlicedWeight):
    """A number of each head, as Kimi Linear's checkpoints have them, [1, 1, H, 1]."""

    def load_targets(self, path: str) -> dict[str, LoadTarget]:
        ((name, one),) = super().load_targets(path).items()
        (size,), (rows,), every = one.shape, one.index, slice(0, 1)
        return {name: LoadTarget(one.parameter.view(1, 1, -1, 1), (1, 1, size, 1), (every, every, rows, every))}


class _Gates(ColumnParallel):
    """A small projection whose results decide what the state keeps."""

    activation_bits = 16


class GatedDelta(nn.Module):
    """The gated delta rule of a layer. `pack` has to be called once its weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: GatedDeltaOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, self.eps = options, options.norm_eps or config.rms_norm_eps
        self.dtype = torch.get_default_dtype()
        keys, values = options.num_key_heads * options.key_size, options.num_value_heads * options.value_size
        parts = {"q_proj": keys, "k_proj": keys, "v_proj": values, "z_proj": values}
        gates = {"b_proj": options.num_value_heads, "a_proj": options.num_value_heads}
        if options.by_key_head:
            parts, gates = {"in_proj_qkvz": sum(parts.values())}, {"in_proj_ba": sum(gates.values())}
        self.gate_size, rank = 1, options.gate_rank
        if rank is not None:
            self.gate_size = options.key_size
            parts, gates = {"q_proj": keys, "k_proj": keys, "v_proj": values}, {"b_proj": options.num_value_heads}
            decays = options.num_value_heads * options.key_size
            self.gates_down_proj = _Gates(
                config.hidden_size, {"f_a_proj": rank, "g_a_proj": rank}, False, ParallelState()
            )
            self.decay_proj = _Gates(rank, {"f_b_proj": decays}, False, parallel, unit=options.key_size)
            self.z_proj = _Gates(rank, {"g_b_proj": values}, False, parallel, unit=options.value_size)
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
        self.A_log = (SlicedWeight if rank is None else _KeyedDecays)({"": options.num_value_heads}, parallel)
        self.dt_bias = SlicedWeight({"": options.num_value_heads * self.gate_size}, parallel, unit={"": self.gate_size})
        self.norm = Weight(options.value_size, dtype=torch.float32)
        self.decay_H: torch.Tensor | None = None
        self.spec = RecurrentSpec(
            ((self.num_value_heads, options.key_size, options.value_size),),
            (
                (options.conv_size - 1, sum(self.sizes)),
                (0, own_keys + own_values + (self.gate_size + 1) * self.num_value_heads),
            ),
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
        if self.options.gate_rank is not None:
            self._norm_V = self.norm.weight / OPEN_GATE
            self._open_gate = self._norm_V.new_full((1, self.sizes[-1]), OPEN_GATE, dtype=self.dtype)

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
        if one.gate_rank is None:
            mixed_TC, z_TV = self.in_proj(hidden_TE).split([sum(self.sizes), self.sizes[-1]], dim=-1)
            beta_TH, gate = self.gate_proj(hidden_TE).chunk(2, dim=-1)
        else:
            mixed_TC, beta_TH = self.in_proj(hidden_TE), self.gate_proj(hidden_TE)
            of_decays, of_output = self.gates_down_proj(hidden_TE).chunk(2, dim=-1)
            gate, z_TV = self.decay_proj(of_decays), self.z_proj(of_output)
        mixed_TC = causal_conv(mixed_TC, self.conv1d.weight.squeeze(1), None, conv_ring_NRC, rows)
        query, key, value = torch.split(mixed_TC, self.sizes, dim=-1)
        num_rows = len(hidden_TE)
        out_THV = gated_delta_rule(
            query.view(num_rows, -1, one.key_size), key.view(num_rows, -1, one.key_size),
            value.view(num_rows, -1, one.value_size), gate.unflatten(-1, (-1, self.gate_size)), beta_TH, self.decay_H,
            self.dt_bias.weight.view(-1, self.gate_size), state_NHDV, ring_NRI, rows, one.beta_scale,
        )  # fmt: skip
        out_TV = out_THV.flatten(1)
        if one.gate_rank is None:
            normed_TV = gated_rms_norm(out_TV, z_TV, self.norm.weight, self.eps, one.value_size, False)
        else:
            open_TV = self._open_gate.expand(num_rows, -1)
            normed_TV = gated_rms_norm(out_TV, open_TV, self._norm_V, self.eps, one.value_size, False)
            normed_TV = activate_and_mul(z_TV, "sigmoid", normed_TV)
        out_TE: torch.Tensor = self.out_proj(normed_TV)
        return out_TE
