"""Encoders: layers that see all tokens of a sequence, with LayerNorms after each half (BERT, Devlin et al. 2019,
https://arxiv.org/abs/1810.04805) or before it (ModernBERT, https://arxiv.org/abs/2412.13663).

One layer, in calls::

    qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj ─ add_layer_norm
    up_proj (with activation) ─ down_proj ─ add_layer_norm

A sequence is computed whole in one step. So its keys and values are in the cache only while a layer computes, and all
layers use the same memory (`AttentionSpec.is_lasting`).
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import add_layer_norm, add_residual, layer_norm, load_rows
from quire_kernels.cpu import HEAD_SIZE_STEP

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder, DecoderLayer, Features
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.experts import GatedMLP
from quire_engine.models.layers.parallel import LayerNorm, Weight, shard
from quire_engine.models.step_context import ADAPTER, KVCaches, RowColumn, StepContext

TOKEN_TYPES = "token_type_ids"
NORMED_BITS = 16
"""Bits of activations that come from a LayerNorm, beside a quantised weight, where they have no zero point. A few
features are many times as large as the others: with 8 bits, the cosine of all-MiniLM-L6-v2's embeddings of short texts
is 0.991."""


def token_types(rows: Any, batch: Any) -> npt.NDArray[np.int64]:
    """[T], 1 for tokens of the second text of a pair. `rows` are `StepRows`, `batch` their `InputBatch`."""
    is_second: npt.NDArray[np.bool_] = rows.positions >= batch.segment_starts[rows.token_slots]
    return is_second.astype(np.int64)


class PositionBias(Weight):
    """What is added to the scores by the distance between query and key (T5, https://arxiv.org/abs/1910.10683, section
    2.1). Near distances have a bucket each, farther ones share them, and all from `MAX_DISTANCE` on are in one."""

    MAX_DISTANCE = 128
    table: torch.Tensor
    """[H, R] of the rank's heads, as `paged_attention` takes it; from `pack`."""

    def __init__(self, num_buckets: int, num_heads: int, parallel: ParallelState) -> None:
        super().__init__(num_buckets, num_heads, dtype=torch.float32)
        self.heads = shard(num_heads, parallel)

    def pack(self) -> None:
        reach = self.MAX_DISTANCE + HEAD_SIZE_STEP
        distances = torch.arange(-reach, reach + 1, device=self.weight.device)
        each_side = len(self.weight) // 2
        num_exact = each_side // 2
        ratio = (distances.abs().float() / num_exact).clamp(min=1).log() / math.log(self.MAX_DISTANCE / num_exact)
        shared = (num_exact + (ratio * (each_side - num_exact)).long()).clamp(max=each_side - 1)
        buckets = torch.where(distances.abs() < num_exact, distances.abs(), shared) + (distances > 0) * each_side
        self.table = self.weight[buckets, self.heads].T.contiguous()


class Encoder(Decoder):
    """A `RecordableLM` of any family of encoders; in one stage."""

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__(config, max_model_len, parallel)
        options, size = config.options.encoder, self.hidden_size
        assert options is not None
        self.options = options
        if options.num_positions:
            self.position_embeddings = Weight(options.num_positions, size)
        if options.num_token_types:
            self.token_type_embeddings = Weight(options.num_token_types, size)
        if options.num_token_types > 1:
            self.row_columns = [RowColumn(TOKEN_TYPES, token_types)]
        self.position_bias = None
        if options.num_position_buckets:
            self.position_bias = PositionBias(options.num_position_buckets, config.num_heads, parallel)
        self.embedding_norm = norm = LayerNorm(size, options.norm_bias)
        for number, layer in self.layers.items():
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.self_attn, layer.mlp
            assert isinstance(attention, Attention)
            assert isinstance(mlp, GatedMLP)
            attention.qkv_proj.activation_bits = mlp.gate_up_proj.activation_bits = NORMED_BITS
            for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                module.asymmetric = True
            attn_norm = norm
            if not options.pre_norm or number != "0":
                layer.attn_norm = attn_norm = LayerNorm(size, options.norm_bias)
            layer.mlp_norm = mlp_norm = LayerNorm(size, options.norm_bias)
            if options.pre_norm:
                attention.qkv_proj.input_norm, mlp.gate_up_proj.input_norm = (attn_norm,), (mlp_norm,)
            else:
                attention.qkv_proj.input_norm, mlp.gate_up_proj.input_norm, norm = (norm,), (attn_norm,), mlp_norm
        if options.pre_norm:
            self.norm = LayerNorm(size, options.norm_bias)

    def pack(self) -> None:
        super().pack()
        if self.position_bias is not None:
            self.position_bias.pack()

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: StepContext,
        kv_caches: KVCaches,
        features: Features | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings in; the last layer's output and what it is added to out. See `RecordableLM`."""
        assert residual_TE is None, "there is one stage"
        pre_norm, layers = self.options.pre_norm, list(self.layers.values())
        position_bias_HR = None if self.position_bias is None else self.position_bias.table
        self.step_adapters.index_T = context.columns.get(ADAPTER.name)
        stream_TE = self._finish_embeddings(hidden_TE, context)
        for index, (layer, caches) in enumerate(zip(layers, kv_caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            assert layer.self_attn is not None
            assert layer.mlp is not None
            input_TE = stream_TE
            if index > 0:  # finish the layer before
                norm = layer.attn_norm if pre_norm else layers[index - 1].mlp_norm
                input_TE, stream_TE = self._add(hidden_TE, stream_TE, norm)
            hidden_TE = layer.self_attn(input_TE, *caches, context.for_layer(index), position_bias_HR)
            norm = layer.mlp_norm if pre_norm else layer.attn_norm
            input_TE, stream_TE = self._add(hidden_TE, stream_TE, norm)
            hidden_TE = layer.mlp(input_TE)
        return hidden_TE, stream_TE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, context: StepContext) -> torch.Tensor:
        norm = self.norm if self.options.pre_norm else list(self.layers.values())[-1].mlp_norm
        return self._add(hidden_TE, residual_TE, norm)[0]

    def _add(self, hidden_TE: torch.Tensor, stream_TE: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the stream. Returns the sum, normed, and the stream that follows, which is the same after a norm of
        its own."""
        assert isinstance(norm, LayerNorm)
        normed_TE = add_layer_norm(hidden_TE, stream_TE, norm.weight, norm.bias, self.eps)
        return normed_TE, stream_TE if self.options.pre_norm else normed_TE

    def _finish_embeddings(self, hidden_TE: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Add positions and token types, and norm the sum."""
        options = self.options
        if options.num_positions:
            table = self.position_embeddings.weight[options.first_position :]
            add_residual(load_rows(table, context.positions), hidden_TE)
        if options.num_token_types > 1:
            add_residual(load_rows(self.token_type_embeddings.weight, context.columns[TOKEN_TYPES]), hidden_TE)
        elif options.num_token_types:
            add_residual(self.token_type_embeddings.weight.expand_as(hidden_TE), hidden_TE)
        norm = self.embedding_norm
        return layer_norm(hidden_TE, norm.weight, norm.bias, self.eps)
