"""Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) over the paged cache."""

import torch
from quire_kernels import paged_attention, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import QKVParallel, RowParallel, SlicedWeight, Weight
from quire_engine.models.layers.rope import RopeTables
from quire_engine.models.options import AttentionOptions
from quire_engine.models.step_context import StepContext


class Attention(nn.Module):
    """The attention of a layer. The input of its projections has `in_features`, or `hidden_size` if that is None."""

    def __init__(
        self,
        config: CheckpointConfig,
        options: AttentionOptions,
        parallel: ParallelState,
        tables: RopeTables,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size, norms = config.head_size, config.options.norms
        self.qkv_proj = QKVParallel(
            in_features or config.hidden_size, config.num_heads, config.num_kv_heads, self.head_size,
            options.qkv_bias, parallel,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.spec = AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_size, options.window, is_causal=options.is_causal
        )
        q_size, kv_size = config.num_heads * self.head_size, config.num_kv_heads * self.head_size
        self.o_proj = RowParallel(q_size, "o_proj", config.hidden_size, options.o_bias, parallel)
        self.cos_sin, self.query_cos_sin = tables(options.rope, self.head_size)
        self.eps = config.rms_norm_eps
        self.scale, self.soft_cap = options.scale or self.head_size**-0.5, options.soft_cap
        self.sinks = SlicedWeight({"": config.num_heads}, parallel) if options.sinks else None
        self.q_norm = self.k_norm = None
        self.norms_projections = options.projection_norms
        if options.head_norms:
            self.q_norm, self.k_norm = (Weight.of_norm(self.head_size, norms) for _ in range(2))
        elif options.projection_norms:
            self.q_norm, self.k_norm = Weight.of_norm(q_size, norms), Weight.of_norm(kv_size, norms)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        context: StepContext,
        position_bias_HR: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, in_features] -> [T, E]; writes this step's keys and values to the cache first. The bias is as of
        `paged_attention`."""
        q, k, v = self.qkv_proj(hidden_TE).split(self.qkv_proj.sizes, dim=-1)
        query_norm = None if self.q_norm is None else self.q_norm.weight
        key_norm = None if self.k_norm is None else self.k_norm.weight
        if self.norms_projections:
            assert query_norm is not None
            assert key_norm is not None
            q, k = self.qkv_proj.norm_projections(q, k, query_norm, key_norm, self.eps)
            query_norm = key_norm = None
        query_THD = rope_and_cache(
            q.unflatten(-1, (self.num_heads, self.head_size)), k.unflatten(-1, (self.num_kv_heads, self.head_size)),
            v.unflatten(-1, (self.num_kv_heads, self.head_size)), context.positions, self.cos_sin, context.slot_mapping,
            key_cache_NKBD, value_cache_NKBD, query_norm_D=query_norm, key_norm_D=key_norm, eps=self.eps,
            query_cos_sin=self.query_cos_sin,
        )  # fmt: skip
        out_THD = paged_attention(
            query_THD, key_cache_NKBD, value_cache_NKBD, context.block_table, context.query_start_loc, context.seq_lens,
            self.scale, context.plans.get(self.spec), window=self.spec.window, is_causal=self.spec.is_causal,
            soft_cap=self.soft_cap, sinks_H=None if self.sinks is None else self.sinks.weight,
            position_bias_HR=position_bias_HR,
        )  # fmt: skip
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE
