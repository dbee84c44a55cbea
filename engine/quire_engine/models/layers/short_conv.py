"""The gated short convolution of LFM2 (https://arxiv.org/abs/2511.23404, section 2.1): `out_proj(C · conv(B · x))`,
where B, C and x are projections of the hidden states. Each rank has some channels."""

import torch
from quire_kernels import activate_and_mul, causal_conv
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, RowParallel, SlicedWeight
from quire_engine.models.options import ShortConvOptions
from quire_engine.models.step_context import StepContext


class ShortConv(nn.Module):
    """The convolution of a layer."""

    def __init__(self, config: CheckpointConfig, options: ShortConvOptions, parallel: ParallelState) -> None:
        super().__init__()
        size = options.size
        parts = {"b_proj": size, "c_proj": size, "x_proj": size}
        self.in_proj = ColumnParallel(config.hidden_size, parts, options.bias, parallel)
        self.out_proj = RowParallel(size, "out_proj", config.hidden_size, options.bias, parallel)
        self.conv = SlicedWeight({"": size}, parallel, 1, options.conv_size)
        self.conv_bias = SlicedWeight({"conv": size}, parallel, kind="bias") if options.bias else None
        self.spec = RecurrentSpec((), ((options.conv_size - 1, self.in_proj.sizes[0]),))

    def pack(self) -> None:
        """Nothing is to be made."""

    def forward(self, hidden_TE: torch.Tensor, ring_NRC: torch.Tensor, context: StepContext) -> torch.Tensor:
        """[T, E] -> [T, E]; writes `B · x` to the cache."""
        assert context.states is not None
        b_TC, c_TC, x_TC = self.in_proj(hidden_TE).split(self.in_proj.sizes, dim=-1)
        mixed_TC = causal_conv(
            activate_and_mul(b_TC, "none", x_TC), self.conv.weight.squeeze(1),
            None if self.conv_bias is None else self.conv_bias.weight, ring_NRC, context.states, "none",
        )  # fmt: skip
        out_TE: torch.Tensor = self.out_proj(activate_and_mul(c_TC, "none", mixed_TC))
        return out_TE
