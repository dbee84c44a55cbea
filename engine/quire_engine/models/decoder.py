"""The decoder of most families: RMSNorm, rotary GQA attention, SwiGLU, as in Llama (Touvron et al. 2023,
https://arxiv.org/abs/2302.13971), with options for the differences between families (`models/options.py`).

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj
    add_rms_norm ─ gate_up_proj (with SiLU · mul) ─ down_proj

Each `add_rms_norm` adds the previous line's output to the residual stream, and norms the sum. With several ranks the
projections are cut into slices, and the layers divided among stages (`models/parallel.py`).
"""

import contextlib
from collections.abc import Iterator

import torch
from quire_kernels import add_rms_norm, paged_attention, rms_norm, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.base import AttentionSpec, FeatureTaps, ForwardContext, KVCaches
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.layers import Weight, rope_cos_sin
from quire_engine.models.parallel import (
    ColumnParallel,
    QKVParallel,
    RowParallel,
    VocabParallel,
    num_parameters,
    receive_activations,
    send_activations,
    stage_layers,
)

__all__ = ["Decoder"]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache.

    Args:
        config: of the checkpoint.
        parallel: the rank.
        in_features: of the projections to queries, keys and values; unset: `hidden_size`.
    """

    def __init__(self, config: CheckpointConfig, parallel: ParallelState, in_features: int | None = None) -> None:
        super().__init__()
        self.head_size, options = config.head_size, config.options
        self.qkv_proj = QKVParallel(
            in_features or config.hidden_size, config.num_heads, config.num_kv_heads, self.head_size,
            options.qkv_bias, parallel, config.int8,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.spec = AttentionSpec(self.num_heads, self.num_kv_heads, self.head_size)
        size = config.num_heads * self.head_size
        self.o_proj = RowParallel(size, "o_proj", config.hidden_size, options.o_bias, parallel, config.int8)
        self.eps = config.rms_norm_eps
        self.q_norm = Weight(self.head_size) if options.qk_norm else None
        self.k_norm = Weight(self.head_size) if options.qk_norm else None

    def forward(
        self,
        hidden_TE: torch.Tensor,
        cos_sin: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """[T, in_features] -> [T, E]; writes this step's keys and values to the cache first."""
        q, k, v = self.qkv_proj(hidden_TE).split(self.qkv_proj.sizes, dim=-1)
        query_THD = rope_and_cache(
            q.unflatten(-1, (self.num_heads, self.head_size)),
            k.unflatten(-1, (self.num_kv_heads, self.head_size)),
            v.unflatten(-1, (self.num_kv_heads, self.head_size)),
            context.positions,
            cos_sin,
            context.slot_mapping,
            key_cache_NKBD,
            value_cache_NKBD,
            query_norm_D=None if self.q_norm is None else self.q_norm.weight,
            key_norm_D=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )
        out_THD = paged_attention(
            query_THD,
            key_cache_NKBD,
            value_cache_NKBD,
            context.block_table,
            context.query_start_loc,
            context.seq_lens,
            self.head_size**-0.5,
            context.plans.get(self.spec),
        )
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE


class GatedMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.options.mlp_bias
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallel(config.hidden_size, parts, bias, parallel, gated=True, int8=config.int8)
        self.down_proj = RowParallel(size, "down_proj", config.hidden_size, bias, parallel, config.int8)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        out_TE: torch.Tensor = self.down_proj(self.gate_up_proj(hidden_TE))
        return out_TE


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm, on one residual stream."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config, parallel)
        self.mlp = GatedMLP(config, parallel)
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)


class Decoder(nn.Module):
    """A `RecordableLM`; see there."""

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.parallel = parallel
        self.dtype = torch.get_default_dtype()
        self.feature_taps: FeatureTaps | None = None
        vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A tied head has no weights of its own, unless the embedding is on another stage.
        if parallel.is_first_stage or (parallel.is_last_stage and config.tie_word_embeddings):
            is_head = parallel.is_last_stage and config.tie_word_embeddings
            self.embed_tokens = VocabParallel(vocab_size, self.hidden_size, parallel, is_head)
        # By their numbers in the checkpoint, on every stage.
        numbers = stage_layers(config.num_layers, parallel)
        self.layers = nn.ModuleDict({str(number): DecoderLayer(config, parallel) for number in numbers})
        self.lm_head = None
        if parallel.is_last_stage:
            self.norm = Weight(self.hidden_size)
            if not config.tie_word_embeddings:
                self.lm_head = VocabParallel(vocab_size, self.hidden_size, parallel, is_head=True)
        self.cos_sin = rope_cos_sin(config.rope, config.head_size, max_model_len)

    def forward(self, token_ids_T: torch.Tensor, context: ForwardContext, kv_caches: KVCaches) -> torch.Tensor | None:
        """[T] -> [T, E], or None; receives from the previous stage, and sends to the next."""
        if self.parallel.is_first_stage:
            hidden, residual = self.embed(token_ids_T), None
        else:
            hidden, residual = receive_activations(self.parallel, len(token_ids_T), self.hidden_size, self.dtype)
        hidden, residual = self.run_layers(hidden, residual, context, kv_caches)
        if not self.parallel.is_last_stage:
            send_activations(self.parallel, hidden, residual)
            return None
        return self.final_norm(hidden, residual)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]; on the first stage only."""
        return self.embed_tokens.embed(token_ids_T)

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: ForwardContext,
        kv_caches: KVCaches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E] and the residual stream -> the last layer's output, and the stream."""
        taps = self.feature_taps
        for (number, layer), (key_cache, value_cache) in zip(self.layers.items(), kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            norm = layer.input_layernorm.weight
            if residual_TE is None:
                residual_TE, hidden_TE = hidden_TE, rms_norm(hidden_TE, norm, self.eps)
            else:
                hidden_TE = add_rms_norm(hidden_TE, residual_TE, norm, self.eps)
            if taps is not None:
                taps.store(int(number), residual_TE, context)
            hidden_TE = layer.self_attn(hidden_TE, self.cos_sin, key_cache, value_cache, context)
            hidden_TE = add_rms_norm(hidden_TE, residual_TE, layer.post_attention_layernorm.weight, self.eps)
            hidden_TE = layer.mlp(hidden_TE)
        assert residual_TE is not None, "a stage has at least one layer"
        return hidden_TE, residual_TE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """The results of `run_layers` -> [T, E]; on the last stage only."""
        return add_rms_norm(hidden_TE, residual_TE, self.norm.weight, self.eps)

    @contextlib.contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """They need as much memory as all layers, as each layer frees its memory before the next begins."""
        layers = self.layers
        first = {spec: number for number, spec in reversed(list(zip(layers, self.attention_specs, strict=True)))}
        self.layers = nn.ModuleDict({number: layers[number] for number in sorted(first.values(), key=int)})
        try:
            yield
        finally:
            self.layers = layers

    @property
    def recordable(self) -> "Decoder":
        """Itself."""
        return self

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """By layer of this stage."""
        return [layer.self_attn.spec for layer in self.layers.values() if isinstance(layer, DecoderLayer)]

    def num_parameters(self) -> int:
        """How many parameters this rank has."""
        return num_parameters(self)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V], or None."""
        return self.head.logits(hidden_SE)

    @property
    def head(self) -> VocabParallel:
        """The output matrix; on the last stage only."""
        return self.embed_tokens if self.lm_head is None else self.lm_head
