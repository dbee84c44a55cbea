"""The decoder of most families: RMSNorm, rotary GQA attention, SwiGLU, as in Llama (Touvron et al. 2023,
https://arxiv.org/abs/2302.13971), with options for the differences between families (`models/options.py`).

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj  [─ rms_norm]
    add_rms_norm ─ gate_up_proj (with activation · mul) ─ down_proj  [─ rms_norm]

Each `add_rms_norm` adds the previous line's output to the residual stream, and norms the sum; in families that norm
only outputs, it is `add_residual`. With several ranks the projections are cut into slices, and the layers divided among
stages (`models/parallel.py`).
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from quire_kernels import add_residual, add_rms_norm, paged_attention, rms_norm, rope_and_cache, soft_cap
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.balanced_experts import BalancedExperts
from quire_engine.models.base import FeatureTaps, replace_rows
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.experts import Expert, MixtureOfExperts
from quire_engine.models.latent_attention import LatentAttention
from quire_engine.models.layers import Weight
from quire_engine.models.lockstep_experts import LockstepExperts
from quire_engine.models.options import DecoderOptions
from quire_engine.models.parallel import (
    QKVParallel,
    RowParallel,
    Sinks,
    VocabParallel,
    num_parameters,
    receive_activations,
    send_activations,
    stage_layers,
)
from quire_engine.models.rope import rope_cos_sin
from quire_engine.models.rope_config import RopeConfig
from quire_engine.models.step_context import KVCaches, RowColumn, StepContext

__all__ = ["Decoder"]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache.

    Args:
        config: of the checkpoint.
        parallel: the rank.
        in_features: of the projections to queries, keys and values; unset: `hidden_size`.
        window: see `AttentionSpec`.
        has_rope: queries and keys are rotated.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        parallel: ParallelState,
        in_features: int | None = None,
        window: int | None = None,
        has_rope: bool = True,
    ) -> None:
        super().__init__()
        self.has_rope = has_rope
        self.head_size, options = config.head_size, config.options
        self.qkv_proj = QKVParallel(
            in_features or config.hidden_size, config.num_heads, config.num_kv_heads, self.head_size,
            options.qkv_bias, parallel,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.spec = AttentionSpec(self.num_heads, self.num_kv_heads, self.head_size, window)
        size = config.num_heads * self.head_size
        self.o_proj = RowParallel(size, "o_proj", config.hidden_size, options.o_bias, parallel)
        self.eps = config.rms_norm_eps
        self.scale, self.soft_cap = options.attention_scale or self.head_size**-0.5, options.attention_soft_cap
        self.sinks = Sinks(config.num_heads, parallel) if options.attention_sinks else None
        self.norms_projections = options.qk_projection_norm
        self.q_norm = self.k_norm = None
        if options.qk_norm:
            self.q_norm, self.k_norm = (_norm(self.head_size, options) for _ in range(2))
        elif self.norms_projections:
            self.q_norm = _norm(size, options)
            self.k_norm = _norm(config.num_kv_heads * self.head_size, options)

    def forward(
        self,
        hidden_TE: torch.Tensor,
        cos_sin: torch.Tensor,
        key_cache_NKBD: torch.Tensor,
        value_cache_NKBD: torch.Tensor,
        context: StepContext,
    ) -> torch.Tensor:
        """[T, in_features] -> [T, E]; writes this step's keys and values to the cache first."""
        q, k, v = self.qkv_proj(hidden_TE).split(self.qkv_proj.sizes, dim=-1)
        query_norm = None if self.q_norm is None else self.q_norm.weight
        key_norm = None if self.k_norm is None else self.k_norm.weight
        if self.norms_projections:
            assert query_norm is not None
            assert key_norm is not None
            q, k = self.qkv_proj.norm_projections(q, k, query_norm, key_norm, self.eps)
            query_norm = key_norm = None
        query_THD = rope_and_cache(
            q.unflatten(-1, (self.num_heads, self.head_size)),
            k.unflatten(-1, (self.num_kv_heads, self.head_size)),
            v.unflatten(-1, (self.num_kv_heads, self.head_size)),
            context.positions,
            cos_sin if self.has_rope else cos_sin[:, :0],
            context.slot_mapping,
            key_cache_NKBD,
            value_cache_NKBD,
            query_norm_D=query_norm,
            key_norm_D=key_norm,
            eps=self.eps,
        )
        out_THD = paged_attention(
            query_THD,
            key_cache_NKBD,
            value_cache_NKBD,
            context.block_table,
            context.query_start_loc,
            context.seq_lens,
            self.scale,
            context.plans.get(self.spec),
            window=self.spec.window,
            soft_cap=self.soft_cap,
            sinks_H=None if self.sinks is None else self.sinks.weight,
        )
        out_TE: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out_TE


class GatedMLP(Expert):
    """Gated feed-forward, such as SwiGLU."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState) -> None:
        super().__init__(config, config.intermediate_size, parallel, config.options.mlp_bias)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        out_TE: torch.Tensor = self.down_proj(self.gate_up_proj(hidden_TE))
        return out_TE


def _norm(size: int, options: DecoderOptions) -> Weight:
    return Weight(size, dtype=torch.float32 if options.float32_norms else None, offset=options.norm_offset)


def feed_forward(config: CheckpointConfig, parallel: ParallelState, layer: int) -> nn.Module:
    """That of a layer, by its number in the checkpoint."""
    experts = config.options.experts
    if experts is not None and experts.are_in(layer):
        kind = MixtureOfExperts if parallel.num_redundant_experts is None else BalancedExperts
        return (kind if parallel.expert_group is None else LockstepExperts)(config, experts, parallel)
    return GatedMLP(config, parallel)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, with norms before or after each, on one residual stream."""

    def __init__(self, config: CheckpointConfig, parallel: ParallelState, number: int) -> None:
        super().__init__()
        for name in config.options.norms.names:
            self.add_module(name, _norm(config.hidden_size, config.options))
        has_rope = number not in config.options.layers_without_rope
        self.has_window = config.windows[number] is not None
        self.self_attn: Attention | LatentAttention
        if config.options.latent is None:
            self.self_attn = Attention(config, parallel, window=config.windows[number], has_rope=has_rope)
        else:
            self.self_attn = LatentAttention(config, parallel)
        self.mlp = feed_forward(config, parallel, number)

    def norm(self, name: str | None) -> torch.Tensor | None:
        """The weight of one of its norms, by its name in the checkpoint."""
        if name is None:
            return None
        norm = getattr(self, name)
        assert isinstance(norm, Weight)
        return norm.weight


class Decoder(nn.Module):
    """A `RecordableLM`; see there."""

    row_columns: Sequence[RowColumn] = ()

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__()
        self.eps, options = config.rms_norm_eps, config.options
        self.norms, self.residual_multiplier = options.norms, options.residual_multiplier
        self.logits_divisor, self.logits_soft_cap = options.logits_divisor, options.logits_soft_cap
        self.parallel = parallel
        self.dtype = torch.get_default_dtype()
        self.embedding_scale = torch.tensor(options.embedding_scale, dtype=self.dtype, device="cpu").item()
        self.feature_taps: FeatureTaps | None = None
        vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A tied head has no weights of its own, unless the embedding is on another stage.
        if parallel.is_first_stage or (parallel.is_last_stage and config.tie_word_embeddings):
            self.embed_tokens = VocabParallel(vocab_size, self.hidden_size, parallel, config.tie_word_embeddings)
        # By their numbers in the checkpoint, on every stage.
        numbers = stage_layers(config.num_layers, parallel)
        self.layers = nn.ModuleDict({str(number): DecoderLayer(config, parallel, number) for number in numbers})
        self.lm_head = None
        if parallel.is_last_stage:
            self.norm = _norm(self.hidden_size, options)
            if not config.tie_word_embeddings:
                self.lm_head = VocabParallel(vocab_size, self.hidden_size, parallel, is_head=True)
        self.cos_sin = self.window_cos_sin = rope_cos_sin(config.rope, config.head_size, max_model_len)
        if options.window_rope_theta is not None:
            rope = RopeConfig(rope_theta=options.window_rope_theta)
            self.window_cos_sin = rope_cos_sin(rope, config.head_size, max_model_len)

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """[T] -> [T, E], or None; receives from the previous stage, and sends to the next."""
        if self.parallel.is_first_stage:
            hidden, residual = self.embed(token_ids_T), None
            if embedded is not None:
                replace_rows(hidden, embedded)
        else:
            hidden, residual = receive_activations(self.parallel, len(token_ids_T), self.hidden_size, self.dtype)
        hidden, residual = self.run_layers(hidden, residual, context, kv_caches)
        if not self.parallel.is_last_stage:
            send_activations(self.parallel, hidden, residual)
            return None
        return self.final_norm(hidden, residual)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]; on the first stage only."""
        hidden_TE = self.embed_tokens.embed(token_ids_T)
        if self.embedding_scale != 1:
            hidden_TE *= self.embedding_scale
        return hidden_TE

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: StepContext,
        kv_caches: KVCaches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E] and the residual stream -> the last layer's output, and the stream."""
        taps, norms = self.feature_taps, self.norms
        for index, ((number, layer), caches) in enumerate(zip(self.layers.items(), kv_caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            if residual_TE is None:
                residual_TE = hidden_TE
                hidden_TE = self._norm(hidden_TE, layer.norm(norms.before_attention))
            else:
                hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(norms.before_attention))
            if taps is not None:
                taps.store(int(number), residual_TE, context)
            cos_sin = self.window_cos_sin if layer.has_window else self.cos_sin
            hidden_TE = layer.self_attn(hidden_TE, cos_sin, *caches, context.for_layer(index))
            hidden_TE = self._norm(hidden_TE, layer.norm(norms.after_attention))
            hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(norms.before_mlp))
            hidden_TE = self._norm(layer.mlp(hidden_TE), layer.norm(norms.after_mlp))
        assert residual_TE is not None, "a stage has at least one layer"
        return hidden_TE, residual_TE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """The results of `run_layers` -> [T, E]; on the last stage only."""
        return add_rms_norm(hidden_TE, residual_TE, self.norm.weight, self.eps, self.residual_multiplier)

    def _norm(self, hidden_TE: torch.Tensor, weight_E: torch.Tensor | None) -> torch.Tensor:
        return hidden_TE if weight_E is None else rms_norm(hidden_TE, weight_E, self.eps)

    def _add_norm(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to the residual stream, and return the sum, normed if there is a weight."""
        if weight_E is not None:
            return add_rms_norm(hidden_TE, residual_TE, weight_E, self.eps, self.residual_multiplier)
        add_residual(hidden_TE, residual_TE, self.residual_multiplier)
        return residual_TE

    def serve_experts(self) -> None:
        """Take part in a step in which this engine has no tokens, and others that share its experts have."""
        for mixture in self.mixtures.values():
            assert isinstance(mixture, LockstepExperts)
            mixture.serve()

    @contextlib.contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """They need as much memory as all layers, as each layer frees its memory before the next begins."""
        layers = self.layers
        kinds = [
            (layer.self_attn.spec, type(layer.mlp)) for layer in layers.values() if isinstance(layer, DecoderLayer)
        ]
        first = {kind: number for number, kind in reversed(list(zip(layers, kinds, strict=True)))}
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
    def state_specs(self) -> list[AttentionSpec]:
        """By layer of this stage."""
        return [layer.self_attn.spec for layer in self.layers.values() if isinstance(layer, DecoderLayer)]

    @property
    def layer_numbers(self) -> list[int]:
        """Of this stage's layers, in the whole model."""
        return [int(number) for number in self.layers]

    @property
    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """The feed-forwards of this stage's layers with experts, by the layer's number in the whole model."""
        layers = {int(number): layer for number, layer in self.layers.items() if isinstance(layer, DecoderLayer)}
        return {number: layer.mlp for number, layer in layers.items() if isinstance(layer.mlp, MixtureOfExperts)}

    def num_parameters(self) -> int:
        """How many parameters this rank has."""
        return num_parameters(self)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V], or None."""
        logits_SV = self.head.logits(hidden_SE)
        if logits_SV is None:
            return None
        if self.logits_divisor != 1:
            logits_SV /= self.logits_divisor
        return logits_SV if self.logits_soft_cap is None else soft_cap(logits_SV, self.logits_soft_cap)

    @property
    def head(self) -> VocabParallel:
        """The output matrix; on the last stage only."""
        return self.embed_tokens if self.lm_head is None else self.lm_head
