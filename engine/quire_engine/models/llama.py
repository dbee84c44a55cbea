"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): RMSNorm, rotary GQA attention, SwiGLU.

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj
    add_rms_norm ─ gate_up_proj ─ silu_and_mul ─ down_proj

Each `add_rms_norm` adds the output of the line before to the residual stream, and norms the sum.
"""

import torch
import torch.nn.functional as F
from quire_kernels import add_rms_norm, paged_attention, rms_norm, rope_and_cache, silu_and_mul
from torch import nn

from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.layers import AttentionMetadata, Linear, Weight, rope_cos_sin

__all__ = ["LlamaForCausalLM"]


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.sizes = [q_size, kv_size, kv_size]
        qkv = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv_proj = Linear(config.hidden_size, qkv, config.attention_bias)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, config.attention_bias)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        cos_sin: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the cache first."""
        q, k, v = self.qkv_proj(hidden_TE).split(self.sizes, dim=-1)
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
        )
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": size, "up_proj": size}, config.mlp_bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, config.mlp_bias)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        out_TE: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden_TE)))
        return out_TE


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm, on one residual stream."""

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)


class LlamaForCausalLM(nn.Module):
    """The whole model, over a flattened batch of tokens."""

    def __init__(self, config: CheckpointConfig, max_model_len: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_layers))
        self.norm = Weight(config.hidden_size)
        # A tied head has no weights of its own.
        self.lm_head = None if config.tie_word_embeddings else Weight(config.vocab_size, config.hidden_size)
        self.cos_sin = rope_cos_sin(config.rope, config.head_size, max_model_len)

    def forward(
        self, token_ids_T: torch.Tensor, kv_caches: list[tuple[torch.Tensor, torch.Tensor]], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Compute one step.

        Args:
            token_ids_T: int64, the scheduled tokens of all requests, one after the other.
            kv_caches: per layer, keys and values, each [N, K, B, D]; written in place.
            metadata: whose tokens they are.

        Returns:
            [T, E] hidden states after the last norm.
        """
        hidden = F.embedding(token_ids_T, self.embed_tokens.weight)
        residual = torch.zeros_like(hidden)
        for layer, (key_cache, value_cache) in zip(self.layers, kv_caches, strict=True):
            assert isinstance(layer, LlamaDecoderLayer)
            hidden = add_rms_norm(hidden, residual, layer.input_layernorm.weight, self.eps)
            hidden = layer.self_attn(hidden, self.cos_sin, key_cache, value_cache, metadata)
            hidden = add_rms_norm(hidden, residual, layer.post_attention_layernorm.weight, self.eps)
            hidden = layer.mlp(hidden)
        return rms_norm(hidden + residual, self.norm.weight, self.eps)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """[S, E] -> [S, V], for the positions that are sampled only."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden_SE, head.weight)
