"""A decoder whose layers share blocks of attention and feed-forward, as in Zamba (Glorioso et al. 2024,
https://arxiv.org/abs/2405.16712, section 2), with products of low rank of each layer's own, as in Zamba2
(https://arxiv.org/abs/2411.15242, section 2.1).

A layer with such a block, in calls; x is the residual stream, e the embedding, and `low rank` the layer's products::

    x, e ─ rms_norm ─┬ qkv_proj ───────┬ rope_and_cache ─ paged_attention ─ o_proj
                     └ low rank ───── + ┘
         ─ rms_norm ─┬ gate_up_proj ───┬ activation · mul ─ down_proj ─ linear ─ y
                     └ low rank ───── + ┘
    x + y ─ rms_norm ─ Mamba-2, which is added to x

So y is no part of the residual stream: the recurrence of the same layer alone sees it. Stages send x and e.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from quire_kernels import activate_and_mul, add_residual, match_rms, rms_norm
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.altup import LEAST
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import ALONE, Decoder, DecoderLayer, Features, Mixer
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.parallel import (
    ColumnParallel,
    RowParallel,
    Weight,
    receive_activations,
    send_activations,
)
from quire_engine.models.layers.rope import RopeTables
from quire_engine.models.options import AttentionOptions, LayerOptions, MLPOptions
from quire_engine.models.step_context import KVCaches, StepContext


class LowRank(nn.Module):
    """Products of low rank, which a layer adds to a projection of its block.

    Args:
        in_features: of the projection.
        rank: of each product.
        parts: by product, the names and sizes of the projection's parts to which it is added, in their order.
        parallel: the rank.
        unit: output features that stay together.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        parts: Mapping[str, Mapping[str, int]],
        parallel: ParallelState,
        unit: int = 1,
    ) -> None:
        super().__init__()
        self.down = ColumnParallel(in_features, {f"{name}.0": rank for name in parts}, False, ALONE)
        each = [ColumnParallel(rank, own, False, parallel, unit=unit) for own in parts.values()]
        self.up, self.sizes = nn.ModuleList(each), [sum(one.sizes) for one in each]

    def add_to(self, out_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Add the products to what the projection has made of the rows; in place."""
        lows = self.down(x_TK).split(self.down.sizes, 1)
        for up, low_TR, part in zip(self.up, lows, torch.split(out_TN, self.sizes, 1), strict=True):
            add_residual(up(low_TR), part)


class SharedTransformer(nn.Module):
    """A block of attention and feed-forward."""

    def __init__(
        self, config: CheckpointConfig, options: LayerOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__()
        attention, mlp, size, norms = options.attention, options.mlp, config.hidden_size, config.options.norms
        assert isinstance(attention, AttentionOptions)
        assert isinstance(mlp, MLPOptions)
        self.eps, self.activation = config.rms_norm_eps, mlp.activation
        self.input_layernorm, self.pre_ff_layernorm = Weight.of_norm(2 * size, norms), Weight.of_norm(size, norms)
        self.self_attn = Attention(config, attention, parallel, tables, 2 * size)
        parts = dict.fromkeys(("gate_proj", "up_proj"), mlp.intermediate_size)
        self.gate_up_proj = ColumnParallel(size, parts, mlp.bias, parallel)
        self.down_proj = RowParallel(mlp.intermediate_size, "down_proj", size, mlp.bias, parallel)

    def forward(self, both_TE: torch.Tensor, layer: "SharedLayer", *caches_and_context: Any) -> torch.Tensor:
        """[T, 2 · E], residual stream and embedding → [T, E]."""
        normed_TE = rms_norm(both_TE, self.input_layernorm.weight, self.eps)
        qkv_TQ = self.self_attn.qkv_proj(normed_TE)
        if layer.attention_products is not None:
            layer.attention_products.add_to(qkv_TQ, normed_TE)
        attended_TE = self.self_attn.o_proj(self.self_attn.attend(qkv_TQ, *caches_and_context))
        normed_TE = rms_norm(attended_TE, self.pre_ff_layernorm.weight, self.eps)
        gate_up_TI = self.gate_up_proj(normed_TE)
        layer.mlp_products.add_to(gate_up_TI, normed_TE)
        out_TE: torch.Tensor = layer.linear(self.down_proj(activate_and_mul(gate_up_TI, self.activation)))
        return out_TE


class SharedLayer(DecoderLayer):
    """A recurrence, which may see the output of a shared block, too."""

    def __init__(
        self, config: CheckpointConfig, options: LayerOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__(config, replace(options, attention=None, mlp=None), parallel, tables)
        self.options, attention, mlp = options, options.attention, options.mlp
        self.block: list[SharedTransformer] = []
        """Empty without a block. In a list, as the weights are the decoder's, under one name."""
        if not isinstance(attention, AttentionOptions):
            return
        assert isinstance(mlp, MLPOptions)
        shared, size, inner = config.options.shared_transformer, config.hidden_size, mlp.intermediate_size
        assert shared is not None
        self.linear = ColumnParallel(size, {"linear": size}, False, ALONE)
        self.mlp_products = LowRank(size, shared.rank, {"gate_up": {"gate": inner, "up": inner}}, parallel)
        self.attention_products = None
        if shared.adapts_attention:
            head_size = attention.head_size or config.head_size
            parts = {name: {name: config.num_heads * head_size} for name in "qkv"}
            self.attention_products = LowRank(2 * size, shared.rank, parts, parallel, head_size)

    @property
    def mixers(self) -> list[Mixer]:
        return [*(block.self_attn for block in self.block), *super().mixers]


class SharedTransformerDecoder(Decoder):
    """A `Decoder` with the blocks that layers of its stage use."""

    layer_class = SharedLayer

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__(config, max_model_len, parallel)
        options, self.shared_transformer = config.options, nn.ModuleDict()
        assert options.shared_transformer is not None
        users = [number for number, layer in enumerate(options.layers) if layer.attention is not None]
        for i, number in enumerate(users):
            if str(number) not in self.layers:
                continue
            layer, name = self.layers[str(number)], str(i % options.shared_transformer.num_blocks)
            assert isinstance(layer, SharedLayer)
            if name not in self.shared_transformer:
                self.shared_transformer[name] = SharedTransformer(config, layer.options, parallel, self.tables)
            block = self.shared_transformer[name]
            assert isinstance(block, SharedTransformer)
            layer.block.append(block)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """[T] -> [T, E], or None. Stages send the residual stream and the embedding."""
        residual: torch.Tensor | None = None
        if self.parallel.is_first_stage:
            embedding = self._embed_prompt(token_ids_T, embedded)
        else:
            residual, embedding = receive_activations(self.parallel, 2, len(token_ids_T), self.hidden_size, self.dtype)
        hidden, residual = self.run_layers(embedding, residual, context, kv_caches)
        if self.parallel.is_last_stage:
            return self.final_norm(hidden, residual, context)
        add_residual(hidden, residual)
        send_activations(self.parallel, residual, embedding)
        return None

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: StepContext,
        kv_caches: KVCaches,
        features: Features | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordableLM`; takes the embedding, which is the residual stream of the first stage."""
        assert features is None
        each = self._each_mixer(context, kv_caches)
        both_TE = hidden_TE.new_empty(len(hidden_TE), 2 * self.hidden_size)
        stream_TE, embedding_TE = both_TE.chunk(2, 1)
        for half_TE, source_TE in ((stream_TE, residual_TE), (embedding_TE, hidden_TE)):
            source_TE = hidden_TE if source_TE is None else source_TE
            match_rms(source_TE, source_TE, LEAST, half_TE)
        out_TE: torch.Tensor | None = None
        for number, layer in self.layers.items():
            assert isinstance(layer, SharedLayer)
            assert layer.mixer is not None
            norm = layer.norm(layer.norms.before_attention)
            if layer.block:
                if out_TE is not None:
                    add_residual(out_TE, stream_TE)
                (block,), (caches, own_context) = layer.block, next(each)
                normed_TE = self._add_norm(stream_TE, block(both_TE, layer, *caches, own_context), norm)
            elif out_TE is None:
                normed_TE = self._norm(stream_TE, norm)
            else:
                normed_TE = self._add_norm(out_TE, stream_TE, norm)
            if self.feature_taps is not None:
                self.feature_taps.store(int(number), stream_TE, context)
            caches, own_context = next(each)
            out_TE = layer.mixer(normed_TE, *caches, own_context)
        assert out_TE is not None, "a stage has at least one layer"
        return out_TE, stream_TE
