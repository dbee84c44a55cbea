"""Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) over the paged cache."""

from dataclasses import replace
from functools import partial

import torch
from quire_kernels import activate_and_mul, layer_norm, paged_attention, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, QKVParallel, RowParallel, SlicedWeight, Weight
from quire_engine.models.layers.rope import RopeTables, rope_dimensions, rope_order
from quire_engine.models.options import AttentionOptions
from quire_engine.models.step_context import GRID_POSITIONS, StepContext


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
            parallel, kv_names if options.cache_of is None else (), options.fused_name, options.output_gate,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.head_order = torch.arange(self.head_size, device="cpu")
        """Which of the checkpoint's features of a head of queries and keys comes at each place."""
        if options.interleaved and options.rope is not None:
            rotary_size = options.rope.rotary_size(self.head_size)
            self.head_order[:rotary_size] = rope_order(rotary_size, interleaved=True)
            order = torch.arange(sum(self.qkv_proj.sizes), device="cpu").view(-1, self.head_size)
            rotated = order[: self.num_heads + self.num_kv_heads]
            rotated.copy_(rotated[:, self.head_order])
            self.qkv_proj.order = order.flatten()
        self.spec = AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_size, options.window, is_causal=options.is_causal,
            is_chunked=options.is_chunked, cache_of=options.cache_of,
        )  # fmt: skip
        q_size, kv_size = config.num_heads * self.head_size, num_kv_heads * self.head_size
        self.o_proj = RowParallel(q_size, "o_proj", config.hidden_size, options.o_bias, parallel)
        self.cos_sin, self.query_cos_sin = tables(options.rope, self.head_size)
        self.no_rotation, _ = tables(None, self.head_size)
        self.rope_dimensions: torch.Tensor | None = None
        """Where positions have three dimensions, that of each rotated feature."""
        if options.rope is not None and options.rope.mrope_section:
            self.rope_dimensions = rope_dimensions(options.rope, self.head_size)
        self.eps = config.rms_norm_eps
        self.scale, self.soft_cap = options.scale or self.head_size**-0.5, options.soft_cap
        self.sinks = SlicedWeight({"": config.num_heads}, parallel) if options.sinks else None
        self.q_norm = self.k_norm = None
        self.head_layer_norms, self.has_gates = options.head_layer_norms, options.output_gate
        self.gate_proj: ColumnParallel | None = None
        if options.head_gates:
            self.gate_proj = ColumnParallel(
                in_features or config.hidden_size, {"gate_proj": config.num_heads}, False, parallel
            )
        self.has_bidirectional_parts = options.has_bidirectional_parts
        self.norms_projections, self.norms_after_rope = options.projection_norms, options.norms_after_rope
        if options.head_norms:
            if options.norms_after_rope:  # `pack` multiplies them
                norms = replace(norms, is_float32=True)
            self.q_norm = Weight.of_norm(self.head_size, norms)
            self.k_norm = Weight.of_norm(self.head_size, norms) if options.cache_of is None else None
        elif options.head_layer_norms:
            self.q_norm, self.k_norm = (
                SlicedWeight({"": heads}, parallel, self.head_size) for heads in (config.num_heads, config.num_kv_heads)
            )
        elif options.projection_norms:
            self.q_norm, self.k_norm = Weight.of_norm(q_size, norms), Weight.of_norm(kv_size, norms)
        self.unit_norm_D = self.value_norm_D = None
        if options.unit_norms or options.value_norms:
            ones_D = torch.ones(self.head_size, dtype=torch.float32 if norms.is_float32 else None)
            self.unit_norm_D = ones_D if options.unit_norms else None
            self.value_norm_D = ones_D if options.value_norms else None

    def pack(self) -> None:
        """Make the weights of norms after the rotation those that `forward` computes with: queries are multiplied by
        those of the keys too, which leaves the products as they are. So keys can be normed before the rotation, which
        changes no norm."""
        if self.head_layer_norms:
            norms = [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None]
            self._layer_norms = [weight_HD[:, self.head_order.to(weight_HD.device)] for weight_HD in norms]
        if self.norms_after_rope:
            assert self.q_norm is not None
            assert self.k_norm is not None
            self.q_norm.weight.mul_(self.k_norm.weight)
            self.k_norm.weight.fill_(1.0)

    def angles(self, positions_3T: torch.Tensor) -> torch.Tensor:
        """[T, R], the angles of rows whose dimensions of their position differ."""
        assert self.rope_dimensions is not None
        return self.cos_sin.gather(0, positions_3T[self.rope_dimensions].T)

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
        qkv_TQ = self.qkv_proj(hidden_TE)
        heads_TV = self.attend(qkv_TQ, key_cache_NKBD, value_cache_NKBD, context, position_bias_HR)
        if self.gate_proj is not None:
            heads_TV = activate_and_mul(self.gate_proj(hidden_TE), "sigmoid", heads_TV)
        out_TE: torch.Tensor = self.o_proj(heads_TV)
        return out_TE

    def attend(
        self,
        qkv_TQ: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        context: StepContext,
        position_bias_HR: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `qkv_proj` has computed -> the heads before `o_proj`, side by side."""
        query_THD, gate = self.write_cache(qkv_TQ, key_cache_NKBD, value_cache_NKBD, context)
        attend = partial(
            paged_attention, key_cache_NKBD=key_cache_NKBD, value_cache_NKBD=value_cache_NKBD, scale=self.scale,
            window=self.spec.signed_window, soft_cap=self.soft_cap,
            sinks_H=None if self.sinks is None else self.sinks.weight, position_bias_HR=position_bias_HR,
        )  # fmt: skip
        out_THD = attend(
            query_THD, block_table_SM=context.block_table, query_start_loc=context.query_start_loc,
            seq_lens=context.seq_lens, plan=context.plans.get(self.spec), is_causal=self.spec.is_causal,
        )  # fmt: skip
        both = context.bidirectional
        if both is not None and self.has_bidirectional_parts:
            out_THD[both.rows] = attend(
                query_THD[both.rows], block_table_SM=both.block_table, query_start_loc=both.query_start_loc,
                seq_lens=both.seq_lens, plan=both.plans.get(self.spec), is_causal=False,
            )  # fmt: skip
        heads_TV = out_THD.flatten(1)
        return heads_TV if gate is None else activate_and_mul(gate, "sigmoid", heads_TV)

    def write_cache(
        self,
        qkv_TQ: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        context: StepContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `qkv_proj` has computed -> queries, [T, H, D], and the gates of their outputs, if there are any; writes
        this step's keys and values to the cache."""
        sizes = [self.head_size * heads for heads in self.qkv_proj.heads]
        q, *projected = torch.split(qkv_TQ, sizes, dim=-1)
        gate = None
        if self.has_gates:
            q, gate = q.chunk(2, dim=-1)
        query_norm = self.unit_norm_D if self.q_norm is None else self.q_norm.weight
        key_norm = self.unit_norm_D if self.k_norm is None else self.k_norm.weight
        if self.norms_projections:
            assert query_norm is not None
            assert key_norm is not None
            q, projected[0] = self.qkv_proj.norm_projections(q, projected[0], query_norm, key_norm, self.eps)
            query_norm = key_norm = None
        elif self.head_layer_norms:
            q, projected[0] = (
                layer_norm(x, norm, None, self.eps)
                for x, norm in zip((q, projected[0]), self._layer_norms, strict=True)
            )
            query_norm = key_norm = None
        late_norm, query_norm = (query_norm, None) if self.norms_after_rope else (None, query_norm)
        query_THD = q.view(len(q), self.num_heads, self.head_size)
        kv_heads = [x.view(len(x), self.num_kv_heads, self.head_size) for x in projected]
        key_TKD, value_TKD = (kv_heads[0], kv_heads[-1]) if kv_heads else (query_THD[:, :0], None)
        positions, cos_sin, query_cos_sin = context.positions, self.cos_sin, self.query_cos_sin
        if context.cos_sin is not None:
            positions = torch.arange(len(query_THD), device=query_THD.device)
            cos_sin = query_cos_sin = context.cos_sin
        elif self.rope_dimensions is not None and GRID_POSITIONS.name in context.columns:
            positions = context.columns[GRID_POSITIONS.name][0]
        query_THD = rope_and_cache(
            query_THD, key_TKD, value_TKD, positions, cos_sin, context.slot_mapping, key_cache_NKBD,
            value_cache_NKBD if kv_heads else None, query_norm_D=query_norm, key_norm_D=key_norm,
            value_norm_D=self.value_norm_D, eps=self.eps, query_cos_sin=query_cos_sin,
        )  # fmt: skip
        if late_norm is not None:  # `rms_norm` would take the heads as rows, and a recorded op has a row for each token
            query_THD = rope_and_cache(
                query_THD, query_THD[:, :0], None, positions, self.no_rotation, context.slot_mapping, key_cache_NKBD,
                None, query_norm_D=late_norm, eps=self.eps,
            )  # fmt: skip
        return query_THD, gate
