"""The recurrent block of Griffin (De et al. 2024, https://arxiv.org/abs/2402.19427, section 2.3), in calls::

    in_proj ─┬ x ─ causal_conv ─┬ head_linear ─ gates ─┐
             │                  └────────────────── rg_lru ─┐
             └ y ───────────────────────────────── activation · mul ─ linear_out

The gates are products of the channels of a head alone. Each rank has some heads.
"""

import torch
import torch.nn.functional as F
from quire_kernels import HeadLinearWeight, activate_and_mul, causal_conv, head_linear, pack_head_linear, rg_lru
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import (
    ColumnParallel,
    LoadTarget,
    Packable,
    Projection,
    RowParallel,
    SlicedWeight,
    shard,
)
from quire_engine.models.linear import LoadedLinear
from quire_engine.models.options import RgLruOptions
from quire_engine.models.step_context import StepContext

GATES = "input_gate", "recurrent_gate"


class _Gates(Packable):
    """The matrices of both gates of each head of this rank. They are small and stay in the model's dtype."""

    takes_adapters = False

    def __init__(self, options: RgLruOptions, parallel: ParallelState) -> None:
        self.num_heads, self.size = options.num_heads, options.width // options.num_heads
        own, columns = shard(options.width, parallel, self.size), slice(0, self.size)
        self.own_heads = slice(own.start // self.size, own.stop // self.size)
        super().__init__([Projection(name, (options.width, self.size), own, columns) for name in GATES])

    def load_targets(self) -> dict[str, LoadTarget]:
        """The checkpoint has a matrix [in, out] for each head."""
        assert self.weight is not None
        matrices_2HNK, whole = self.weight.data.view(2, -1, self.size, self.size), slice(0, self.size)
        shape = self.num_heads, self.size, self.size
        return {
            f"{name}.weight": LoadTarget(own_HNK.transpose(1, 2), shape, (self.own_heads, whole, whole), module=self)
            for name, own_HNK in zip(GATES, matrices_2HNK, strict=True)
        }

    def packed_bytes(self, like: torch.Tensor) -> int:
        return self.num_parameters * self._dtype.itemsize

    def packed_of(self, loaded: LoadedLinear) -> HeadLinearWeight:
        """[H, 2 · W, W]"""
        matrices_2HNK = self.method.dense(loaded).view(2, -1, self.size, self.size)
        return pack_head_linear(matrices_2HNK.transpose(0, 1).reshape(-1, 2 * self.size, self.size))


class RgLru(nn.Module):
    """The recurrent block of a layer. `pack` has to be called once its weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: RgLruOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, width, size = options, options.width, config.hidden_size
        self.in_proj = ColumnParallel(size, {"linear_x": width, "linear_y": width}, True, parallel)
        own, _ = self.in_proj.sizes
        self.conv_1d = SlicedWeight({"": width}, parallel, 1, options.conv_size)
        self.conv_bias = SlicedWeight({"conv_1d": width}, parallel, kind="bias")
        self.gates = _Gates(options, parallel)
        heads = dict.fromkeys(GATES, options.num_heads)
        self.gate_biases = SlicedWeight(heads, parallel, width // options.num_heads, kind="bias")
        self.recurrent_param = SlicedWeight({"": width}, parallel)
        self.linear_out = RowParallel(width, "linear_out", size, True, parallel)
        self.bias_HG = self.decay_C = torch.empty(0)
        self.spec = RecurrentSpec(((own,),), ((options.conv_size - 1, own), (0, 3 * own)))

    def pack(self) -> None:
        """Compute the decay, and the biases of both gates of a head side by side."""
        input_HW, state_HW = self.gate_biases.weight.chunk(2)
        self.bias_HG = torch.cat((input_HW, state_HW), 1)
        self.decay_C = 8 * F.softplus(self.recurrent_param.weight)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        state_MC: torch.Tensor,
        conv_ring_MRC: torch.Tensor,
        ring_MRI: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert context.states is not None
        rows = context.states
        x_TC, y_TC = self.in_proj(hidden_TE).split(self.in_proj.sizes, dim=-1)
        x_TC = causal_conv(x_TC, self.conv_1d.weight.squeeze(1), self.conv_bias.weight, conv_ring_MRC, rows, "none")
        gates_THG = head_linear(x_TC.view(len(x_TC), -1, self.gates.size), self.gates.packed_weight)
        out_TC = rg_lru(x_TC, gates_THG, self.bias_HG, self.decay_C, state_MC, ring_MRI, rows)
        out_TE: torch.Tensor = self.linear_out(activate_and_mul(y_TC, self.options.activation, out_TC))
        return out_TE
