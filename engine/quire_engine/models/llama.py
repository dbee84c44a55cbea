"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): RMSNorm, rotary GQA attention, SwiGLU.

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj
    add_rms_norm ─ gate_up_proj (with SiLU · mul) ─ down_proj

Each `add_rms_norm` adds the output of the line before to the residual stream, and norms the sum. With several ranks the
projections are cut into slices, and the layers divided among stages (`models/parallel.py`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from quire_kernels import add_rms_norm, paged_attention, plan_attention, rms_norm, rope_and_cache
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.layers import AttentionMetadata, Weight, rope_cos_sin
from quire_engine.models.parallel import (
    ColumnParallel,
    QKVParallel,
    RowParallel,
    VocabParallel,
    receive_activations,
    send_activations,
    stage_layers,
)

__all__ = ["LlamaForCausalLM"]


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.head_size, bias = config.head_size, config.attention_bias
        self.qkv_proj = QKVParallel(
            config.hidden_size, config.num_heads, config.num_kv_heads, self.head_size, bias, parallel, config.int8
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        in_features = config.num_heads * self.head_size
        self.o_proj = RowParallel(in_features, "o_proj", config.hidden_size, bias, parallel, config.int8)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        cos_sin: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the cache first."""
        q, k, v = self.qkv_proj(hidden_TE).split(self.qkv_proj.sizes, dim=-1)
        query_THD = rope_and_cache(
            q.unflatten(-1, (self.num_heads, self.head_size)),
            k.unflatten(-1, (self.num_kv_heads, self.head_size)),
            v.unflatten(-1, (self.num_kv_heads, self.head_size)),
            metadata.positions,
            cos_sin,
            metadata.slot_mapping,
            key_cache_NKBD,
            value_cache_NKBD,
        )
        out_THD = paged_attention(
            query_THD,
            key_cache_NKBD,
            value_cache_NKBD,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            self.head_size**-0.5,
            metadata.plan,
        )
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallel(config.hidden_size, parts, bias, parallel, gated=True, int8=config.int8)
        self.down_proj = RowParallel(size, "down_proj", config.hidden_size, bias, parallel, config.int8)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        out_TE: torch.Tensor = self.down_proj(self.gate_up_proj(hidden_TE))
        return out_TE


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, on one residual stream."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = LlamaAttention(config, parallel)
        self.mlp = LlamaMLP(config, parallel)
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)


class LlamaForCausalLM(nn.Module):
    """One rank's part of the model, over a flattened batch of tokens; with one rank, all of it."""

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.parallel = parallel
        self.dtype = torch.get_default_dtype()
        vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A tied head has no weights of its own, unless the embedding is on another stage.
        if parallel.is_first_stage or (parallel.is_last_stage and config.tie_word_embeddings):
            is_head = parallel.is_last_stage and config.tie_word_embeddings
            self.embed_tokens = VocabParallel(vocab_size, self.hidden_size, parallel, is_head)
        # By their numbers in the checkpoint, whichever stage this is.
        numbers = stage_layers(config.num_layers, parallel)
        self.layers = nn.ModuleDict({str(number): LlamaDecoderLayer(config, parallel) for number in numbers})
        self.lm_head = None
        if parallel.is_last_stage:
            self.norm = Weight(self.hidden_size)
            if not config.tie_word_embeddings:
                self.lm_head = VocabParallel(vocab_size, self.hidden_size, parallel, is_head=True)
        self.cos_sin = rope_cos_sin(config.rope, config.head_size, max_model_len)

    def forward(
        self, token_ids_T: torch.Tensor, kv_caches: list[tuple[torch.Tensor, torch.Tensor]], metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """Compute one step. All ranks take part.

        Args:
            token_ids_T: int64, the scheduled tokens of all requests, one after the other.
            kv_caches: per layer of this stage, keys and values, each [N, K, B, D]; written in place.
            metadata: whose tokens they are.

        Returns:
            [T, E] hidden states after the last norm; None on stages before the last.
        """
        if self.parallel.is_first_stage:
            hidden = self.embed_tokens.embed(token_ids_T)
            residual = torch.zeros_like(hidden)
        else:
            hidden, residual = receive_activations(self.parallel, len(token_ids_T), self.hidden_size, self.dtype)
        metadata = self._with_plan(metadata, kv_caches[0][0])
        for layer, (key_cache, value_cache) in zip(self.layers.values(), kv_caches, strict=True):
            assert isinstance(layer, LlamaDecoderLayer)
            hidden = add_rms_norm(hidden, residual, layer.input_layernorm.weight, self.eps)
            hidden = layer.self_attn(hidden, self.cos_sin, key_cache, value_cache, metadata)
            hidden = add_rms_norm(hidden, residual, layer.post_attention_layernorm.weight, self.eps)
            hidden = layer.mlp(hidden)
        if not self.parallel.is_last_stage:
            send_activations(self.parallel, hidden, residual)
            return None
        return rms_norm(hidden + residual, self.norm.weight, self.eps)

    @contextlib.contextmanager
    def first_layer_only(self) -> Iterator[None]:
        """While it lasts, a step computes one layer, and needs the KV cache of one.

        That is for measuring memory: all layers are alike, and each gives back what it took before the next one begins.
        """
        layers = self.layers
        number, layer = next(iter(layers.items()))
        self.layers = nn.ModuleDict({number: layer})
        try:
            yield
        finally:
            self.layers = layers

    def _with_plan(self, metadata: AttentionMetadata, key_cache_NKBD: torch.Tensor) -> AttentionMetadata:
        """All layers have as many heads, so one plan of the attention does for all of them."""
        layer = next(iter(self.layers.values()))
        assert isinstance(layer, LlamaDecoderLayer)
        num_heads = layer.self_attn.num_heads
        plan = plan_attention(metadata.query_start_loc, metadata.seq_lens, num_heads, key_cache_NKBD)
        return dataclasses.replace(metadata, plan=plan)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V], for the positions that are sampled only.

        All ranks of the last stage take part; those that do not sample get None.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden_SE)
