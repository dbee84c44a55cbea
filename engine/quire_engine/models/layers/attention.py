"""Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) over the paged cache."""

import torch
from quire_kernels import paged_attention, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import QKVParallel, RowParallel, Sinks, Weight
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
        self.head_size, norms = options.head_size or config.head_size, config.options.norms
        num_kv_heads = options.num_kv_heads or config.num_kv_heads
        kv_names = ("k_proj",) if options.keys_are_values else ("k_proj", "v_proj")
        self.qkv_proj = QKVParallel(
            in_features or config.hidden_size, config.num_heads, num_kv_heads, self.head_size, options.qkv_bias,
            parallel, kv_names if options.cache_of is None else (),
        )  # fmt: skip
        if options.interleaved:
            head = torch.arange(self.head_size, device="cpu").view(-1, 2).t().flatten()
            num_rotated = self.qkv_proj.num_heads + self.qkv_proj.num_kv_heads
            order = torch.arange(sum(self.qkv_proj.sizes), device="cpu")
            order[: num_rotated * self.head_size] = (
                torch.arange(num_rotated, device="cpu")[:, None] * self.head_size + head
            ).flatten()
            self.qkv_proj.order = order
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.spec = AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_size, options.window, is_causal=options.is_causal,
            is_chunked=options.is_chunked, cache_of=options.cache_of,
        )  # fmt: skip
        q_size, kv_size = config.num_heads * self.head_size, num_kv_heads * self.head_size
        self.o_proj = RowParallel(q_size, "o_proj", config.hidden_size, options.o_bias, parallel)
        self.cos_sin, self.query_cos_sin = tables(options.rope, self.head_size)
        self.eps = config.rms_norm_eps
        self.scale, self.soft_cap = options.scale or self.head_size**-0.5, options.soft_cap
        self.sinks = Sinks(config.num_heads, parallel) if options.sinks else None
        self.q_norm = self.k_norm = None
        self.norms_projections = options.projection_norms
        if options.head_norms:
            self.q_norm = Weight.of_norm(self.head_size, norms)
            self.k_norm = Weight.of_norm(self.head_size, norms) if options.cache_of is None else None
        elif options.projection_norms:
            self.q_norm, self.k_norm = Weight.of_norm(q_size, norms), Weight.of_norm(kv_size, norms)
        ones_D = torch.ones(self.head_size, dtype=torch.float32 if norms.is_float32 else None)
        self.unit_norm_D = ones_D if options.unit_norms else None
        self.value_norm_D = ones_D if options.value_norms else None

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
        q, *projected = self.qkv_proj(hidden_TE).split(self.qkv_proj.sizes, dim=-1)
        query_norm = self.unit_norm_D if self.q_norm is None else self.q_norm.weight
        key_norm = self.unit_norm_D if self.k_norm is None else self.k_norm.weight
        if self.norms_projections:
            assert query_norm is not None
            assert key_norm is not None
            q, projected[0] = self.qkv_proj.norm_projections(q, projected[0], query_norm, key_norm, self.eps)
            query_norm = key_norm = None
        query_THD = q.unflatten(-1, (self.num_heads, self.head_size))
        heads = [x.unflatten(-1, (self.num_kv_heads, self.head_size)) for x in projected]
        key_TKD, value_TKD = (heads[0], heads[-1]) if heads else (query_THD[:, :0], None)
        query_THD = rope_and_cache(
            query_THD, key_TKD, value_TKD, context.positions, self.cos_sin, context.slot_mapping, key_cache_NKBD,
            value_cache_NKBD if heads else None, query_norm_D=query_norm, key_norm_D=key_norm,
            value_norm_D=self.value_norm_D, eps=self.eps, query_cos_sin=self.query_cos_sin,
        )  # fmt: skip
        out_THD = paged_attention(
            query_THD, key_cache_NKBD, value_cache_NKBD, context.block_table, context.query_start_loc, context.seq_lens,
            self.scale, context.plans.get(self.spec), window=self.spec.signed_window, is_causal=self.spec.is_causal,
            soft_cap=self.soft_cap, sinks_H=None if self.sinks is None else self.sinks.weight,
            position_bias_HR=position_bias_HR,
        )  # fmt: skip
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE
