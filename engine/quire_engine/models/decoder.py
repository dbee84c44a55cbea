"""The decoder of all families: layers of attention and feed-forward on one residual stream, as in Llama (Touvron et al.
2023, https://arxiv.org/abs/2302.13971). A family decides what its layers are (`models/options.py`).

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj  [─ rms_norm]
    add_rms_norm ─ gate_up_proj (with activation · mul) ─ down_proj  [─ rms_norm]

Each `add_rms_norm` adds the previous line's output to the residual stream, and norms the sum; in families that norm
only outputs, it is `add_residual`, and in those with LayerNorms `add_layer_norm`. With a parallel residual, both lines
have the same stream, and the sum of their outputs is added to it. Where each layer has an input of its own, there is a
third line::

    add_residual ─ per_layer_input_gate ─ activation · input ─ per_layer_projection ─ rms_norm

With several ranks the projections are cut into slices, and the layers divided among stages (`layers/parallel.py`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from quire_kernels import (
    activate_and_mul,
    add_layer_norm,
    add_residual,
    add_rms_norm,
    layer_norm,
    rms_norm,
    soft_cap,
)
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import StateSpec
from quire_engine.models.base import OUTPUT, FeatureTaps, replace_rows
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.balanced_experts import BalancedExperts
from quire_engine.models.layers.experts import GatedMLP, MixtureOfExperts, SparseMLP
from quire_engine.models.layers.gated_delta import GatedDelta
from quire_engine.models.layers.latent_attention import LatentAttention
from quire_engine.models.layers.lockstep_experts import LockstepExperts
from quire_engine.models.layers.mamba import Mamba, Selective
from quire_engine.models.layers.parallel import (
    ColumnParallel,
    LayerNorm,
    OwnTable,
    Packable,
    Projection,
    StepAdapters,
    VocabParallel,
    Weight,
    num_parameters,
    receive_activations,
    scale_projections,
    send_activations,
    stage_layers,
)
from quire_engine.models.layers.rg_lru import RgLru
from quire_engine.models.layers.rope import RopeTables, rope_tables
from quire_engine.models.layers.short_conv import ShortConv
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    GatedDeltaOptions,
    LatentAttentionOptions,
    LayerOptions,
    MambaOptions,
    MLPOptions,
    RgLruOptions,
    SelectiveOptions,
    ShortConvOptions,
    StateOptions,
)
from quire_engine.models.step_context import ADAPTER, GRID_POSITIONS, KVCaches, RowColumn, StepContext

ALONE = ParallelState()
Features = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""Rows, [P], and what is added to them after each of the first layers, [P, E]."""
STREAM_BITS = 16
"""Bits of activations that are not normed, beside a quantised weight: a few features of the residual stream are many
times as large as the others."""


def make_feed_forward(
    config: CheckpointConfig, options: MLPOptions | ExpertsOptions, parallel: ParallelState
) -> GatedMLP | MixtureOfExperts:
    if isinstance(options, MLPOptions):
        return (SparseMLP if options.sparsity else GatedMLP)(config.hidden_size, options, parallel)
    kind = MixtureOfExperts if parallel.num_redundant_experts is None else BalancedExperts
    return (kind if parallel.expert_group is None else LockstepExperts)(config, options, parallel)


class Mixer(Protocol):
    """What mixes the tokens of a sequence in a layer."""

    @property
    def spec(self) -> StateSpec:
        """What it keeps."""

    def __call__(self, hidden_TE: torch.Tensor, *caches_and_context: Any) -> torch.Tensor:
        """[T, E] → [T, E]; takes the tensors of its spec, and the context."""


class Recurrence(Mixer, Protocol):
    """A mixer that keeps a state."""

    def pack(self) -> None:
        """Make what it computes with and no weight is alone."""


RECURRENCES: Mapping[type[StateOptions], Callable[..., Recurrence]] = {
    GatedDeltaOptions: GatedDelta, ShortConvOptions: ShortConv, MambaOptions: Mamba, SelectiveOptions: Selective,
    RgLruOptions: RgLru,
}  # fmt: skip


def has_grid_positions(layer: LayerOptions) -> bool:
    """Whether a layer's positions have three dimensions."""
    rope = layer.attention.rope if isinstance(layer.attention, AttentionOptions) else None
    return rope is not None and bool(rope.mrope_section)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, with norms before or after each, on one residual stream."""

    def __init__(
        self, config: CheckpointConfig, options: LayerOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__()
        self.options, self.norms = options, options.norms or config.options.norms
        for name in self.norms.names:
            self.add_module(name, Weight.of_norm(config.hidden_size, self.norms))
        attention = options.attention
        self.self_attn: Attention | LatentAttention | None = None
        if isinstance(attention, LatentAttentionOptions):
            self.self_attn = LatentAttention(config, attention, parallel, tables)
        elif attention is not None:
            self.self_attn = Attention(config, attention, parallel, tables)
        self.mixer: Recurrence | None = None
        if options.state is not None:
            self.mixer = RECURRENCES[type(options.state)](config, options.state, parallel)
        self.mlp = None if options.mlp is None else make_feed_forward(config, options.mlp, parallel)
        self.moe = None if options.experts is None else make_feed_forward(config, options.experts, parallel)
        self.layer_scalar = Weight(1, dtype=torch.float32) if config.options.layer_scales else None
        self.scale = 1.0
        """Multiplies the residual stream after the layer; from `pack`."""
        if config.options.layer_inputs is not None:
            size, inputs = config.hidden_size, config.options.layer_inputs
            self.input_gate = ColumnParallel(size, {"per_layer_input_gate": inputs.size}, False, ALONE)
            self.input_gate.activation_bits = STREAM_BITS
            self.input_projection = ColumnParallel(inputs.size, {"per_layer_projection": size}, False, ALONE)

    @property
    def mixers(self) -> list["Mixer"]:
        """What keeps something in the cache: attention, and a recurrence."""
        return [one for one in (self.self_attn, self.mixer) if one is not None]

    def mix(
        self, hidden_TE: torch.Tensor, caches: Iterator[tuple[tuple[torch.Tensor, ...], StepContext]]
    ) -> torch.Tensor:
        """The sum of what its mixers make of the rows; each takes its caches and its context."""
        first, *others = (
            mixer(hidden_TE, *own, context) for mixer, (own, context) in zip(self.mixers, caches, strict=False)
        )
        for other in others:
            add_residual(other, first)
        return first

    @property
    def mixture(self) -> MixtureOfExperts | None:
        """Its experts, if it has any."""
        return next((one for one in (self.mlp, self.moe) if isinstance(one, MixtureOfExperts)), None)

    def pack(self) -> None:
        if isinstance(self.self_attn, Attention):
            self.self_attn.pack()
        if self.mixer is not None:
            self.mixer.pack()
        if self.mixture is not None:
            self.mixture.pack()
        if self.layer_scalar is not None:
            self.scale = self.layer_scalar.weight.item()

    def norm(self, name: str | None) -> Weight | None:
        """One of its norms, by its name in the checkpoint."""
        if name is None:
            return None
        norm = getattr(self, name)
        assert isinstance(norm, Weight)
        return norm


class Decoder(nn.Module):
    """A `RecordableLM` of any family."""

    row_columns: Sequence[RowColumn] = ()
    layer_class = DecoderLayer

    def __init__(self, config: CheckpointConfig, max_model_len: int, parallel: ParallelState = ParallelState()) -> None:
        super().__init__()
        self.eps, options = config.rms_norm_eps, config.options
        self.norms, self.residual_multiplier = options.norms, options.residual_multiplier
        self.parallel_residual = options.parallel_residual
        self.logits_divisor, self.logits_soft_cap = options.logits_divisor, options.logits_soft_cap
        self.parallel = parallel
        self.dtype = torch.get_default_dtype()
        self.embedding_scale = torch.tensor(options.embedding_scale, dtype=self.dtype, device="cpu").item()
        self.feature_taps: FeatureTaps | None = None
        self.step_adapters = StepAdapters()
        vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A tied head has no weights of its own, unless the embedding is on another stage.
        self.has_head = options.has_head
        is_tied = config.tie_word_embeddings and self.has_head
        if parallel.is_first_stage or (parallel.is_last_stage and is_tied):
            self.embed_tokens = VocabParallel(vocab_size, self.hidden_size, parallel, is_tied)
        self.tables = rope_tables(max_model_len)
        numbers = stage_layers(config.num_layers, parallel, options.num_joined_layers)
        self.layer_inputs, self.input_size = options.layer_inputs, self.hidden_size
        if self.layer_inputs is not None:
            each = self.layer_inputs.size
            own = slice(numbers.start * each, numbers.stop * each)
            self.input_size += own.stop - own.start
            self.embed_tokens_per_layer = VocabParallel(
                self.layer_inputs.vocab_size, config.num_layers * each, parallel, is_head=False, columns=own
            )
            shape = config.num_layers * each, self.hidden_size
            self.input_projection = Packable(
                [Projection("per_layer_model_projection", shape, own, slice(0, self.hidden_size))]
            )
            self.per_layer_projection_norm = Weight.of_norm(each, options.norms)
        # By their numbers in the checkpoint, on every stage.
        self.layers = nn.ModuleDict({
            str(number): self.layer_class(config, options.layers[number], parallel, self.tables)
            for number in numbers
        })  # fmt: skip
        scale_projections(self, dict(options.scaled))
        self.turning = next(
            (layer.self_attn for layer in self.layers.values()
             if isinstance(layer.self_attn, Attention) and layer.self_attn.rope_dimensions is not None), None
        )  # fmt: skip
        """The first attention with positions of three dimensions, if there is one; all such turn alike."""
        if any(has_grid_positions(layer) for layer in options.layers):
            self.row_columns = (GRID_POSITIONS,)
        self.num_deepstack_layers = options.num_deepstack_layers
        ends = list(accumulate(len(layer.windows) for layer in options.layers))
        self._places = [range(end - len(layer.windows), end) for layer, end in zip(options.layers, ends, strict=True)]
        """By layer, the numbers of its mixers in the whole model."""
        self._numbers = list(self.layers)
        self.lm_head = None
        if parallel.is_last_stage:
            if options.encoder is None:
                self.norm = Weight.of_norm(self.hidden_size, options.norms)
            if self.has_head and not is_tied:
                self.lm_head = VocabParallel(
                    vocab_size, self.hidden_size, parallel, is_head=True, bias=options.head_bias
                )

    def pack(self) -> None:
        """Make what the layers compute with and no weight is alone, once all weights are loaded."""
        for layer in self.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.pack()
        if self.layer_inputs is not None:
            self._input_norm_I = self.per_layer_projection_norm.weight * 2**-0.5

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """[T] -> [T, E], or None. Receives from the previous stage, and sends to the next."""
        has_inputs, size = self.layer_inputs is not None, self.hidden_size
        residual: torch.Tensor | None = None
        features: Features | None = None
        if embedded is not None:
            rows_P, hidden_PE = embedded
            embedded = rows_P, hidden_PE[:, :size]
            if hidden_PE.shape[1] > size:
                features = rows_P, torch.split(hidden_PE[:, size:].to(self.dtype), size, 1)
            if self.turning is not None:
                context = context.with_cos_sin(self.turning.angles(context.columns[GRID_POSITIONS.name]))
        if self.parallel.is_first_stage:
            hidden = self._embed_prompt(token_ids_T, embedded)
        else:
            hidden, residual, *others = receive_activations(
                self.parallel, 2 + has_inputs, len(token_ids_T), size, self.dtype
            )
            if has_inputs:
                hidden = torch.cat((hidden, *others, self._embed_inputs(token_ids_T)), 1)
        embeddings = []
        if has_inputs and not self.parallel.is_last_stage:
            embeddings = [hidden[:, -self.input_size :][:, :size].clone()]  # which the residual stream overwrites
        hidden, residual = self.run_layers(hidden, residual, context, kv_caches, features)
        if not self.parallel.is_last_stage:
            if self.last_scale != 1:
                add_residual(hidden, residual, self.residual_multiplier, self.last_scale)
                hidden = torch.zeros_like(residual)
            send_activations(self.parallel, hidden, residual, *embeddings)
            return None
        return self.final_norm(hidden, residual, context)

    def _embed_prompt(
        self, token_ids_T: torch.Tensor, embedded: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """As `embed`, with the rows that are given in place of their tokens' embeddings; see `forward`."""
        hidden = self.embed(token_ids_T)
        if embedded is not None:
            replace_rows(hidden, embedded)
        return hidden

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        hidden_TE = self.embed_alone(token_ids_T)
        return hidden_TE if self.layer_inputs is None else torch.cat((hidden_TE, self._embed_inputs(token_ids_T)), 1)

    def embed_alone(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E], without the layers' own inputs."""
        hidden_TE = self.embed_tokens.embed(token_ids_T)
        if self.embedding_scale != 1:
            hidden_TE *= self.embedding_scale
        return hidden_TE

    def _embed_inputs(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, I], of each of the stage's layers, the part of its input that is the token's own."""
        assert self.layer_inputs is not None
        rows_T = token_ids_T.where(token_ids_T < self.layer_inputs.vocab_size, 0)
        for token_id in self.layer_inputs.placeholders:
            rows_T = rows_T.where(token_ids_T != token_id, self.layer_inputs.padding)
        inputs_TI: torch.Tensor = self.embed_tokens_per_layer.embed(rows_T) * (self.layer_inputs.size / 2) ** 0.5
        return inputs_TI

    def _complete_inputs(self, embedding_TE: torch.Tensor, inputs_TI: torch.Tensor) -> list[torch.Tensor]:
        """Add the part that is a projection of the embedding; returns the input of each layer. Both parts are divided
        by √2, and the projection by √E before its norm, which is why the epsilon is multiplied by E."""
        assert self.layer_inputs is not None
        inputs = list(torch.split(inputs_TI, self.layer_inputs.size, 1))
        projected_TI = self.input_projection.apply_linear(embedding_TE)
        for projected, input_ in zip(torch.split(projected_TI, self.layer_inputs.size, 1), inputs, strict=True):
            add_residual(rms_norm(projected, self._input_norm_I, self.eps * self.hidden_size), input_)
        return inputs

    def _layer_input(self, layer: DecoderLayer, hidden_TE: torch.Tensor, input_TI: torch.Tensor) -> torch.Tensor:
        """What a layer's own input, gated by its result, contributes, [T, E]."""
        assert self.layer_inputs is not None
        gated_TI = activate_and_mul(layer.input_gate(hidden_TE), self.layer_inputs.activation, input_TI)
        return self._norm(layer.input_projection(gated_TI), layer.norm(layer.norms.after_layer_input))

    def _each_mixer(
        self, context: StepContext, kv_caches: KVCaches
    ) -> Iterator[tuple[tuple[torch.Tensor, ...], StepContext]]:
        """The caches and the context of each mixer in turn, for rows whose adapters are noted."""
        self.step_adapters.index_T = context.columns.get(ADAPTER.name)
        return ((caches, context.for_layer(index)) for index, caches in enumerate(kv_caches))

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: StepContext,
        kv_caches: KVCaches,
        features: Features | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordableLM`."""
        taps, scale = self.feature_taps, 1.0
        each = self._each_mixer(context, kv_caches)
        inputs: dict[str, torch.Tensor] = {}
        if self.layer_inputs is not None:
            embedding_TE, inputs_TI = hidden_TE[:, -self.input_size :].tensor_split([self.hidden_size], 1)
            inputs = dict(zip(self._numbers, self._complete_inputs(embedding_TE, inputs_TI), strict=True))
            hidden_TE = hidden_TE[:, : self.hidden_size]
        for number, layer in self.layers.items():
            assert isinstance(layer, DecoderLayer)
            norms = layer.norms
            before = norms.before_attention if layer.mixers else norms.before_mlp
            if residual_TE is None:
                residual_TE = hidden_TE
                hidden_TE = self._norm(hidden_TE, layer.norm(before))
            else:
                hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(before), scale)
            if taps is not None:
                taps.store(int(number), residual_TE, context)
            if layer.mixers:
                hidden_TE, normed_TE = layer.mix(hidden_TE, each), hidden_TE
                if self.parallel_residual:
                    assert layer.mlp is not None
                    if norms.before_mlp is not None:
                        normed_TE = self._norm(residual_TE, layer.norm(norms.before_mlp))
                    attended_TE, hidden_TE = hidden_TE, layer.mlp(normed_TE)
                    add_residual(attended_TE, hidden_TE)
                    continue
                hidden_TE = self._norm(hidden_TE, layer.norm(norms.after_attention))
            if layer.mlp is not None:
                if layer.mixers:
                    hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(norms.before_mlp))
                hidden_TE = layer.mlp(hidden_TE)
                if layer.moe is not None:
                    dense_TE = self._norm(hidden_TE, layer.norm(norms.after_dense))
                    hidden_TE = layer.moe(self._norm(residual_TE, layer.norm(norms.before_experts)), residual_TE)
                    hidden_TE = self._norm(hidden_TE, layer.norm(norms.after_experts))
                    add_residual(dense_TE, hidden_TE)
                hidden_TE = self._norm(hidden_TE, layer.norm(norms.after_mlp))
            if self.layer_inputs is not None:
                add_residual(hidden_TE, residual_TE, self.residual_multiplier)
                hidden_TE = self._layer_input(layer, residual_TE, inputs[number])
            if features is not None and int(number) < len(features[1]):
                hidden_TE.index_add_(0, features[0], features[1][int(number)])
            scale = layer.scale
        assert residual_TE is not None, "a stage has at least one layer"
        return hidden_TE, residual_TE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, context: StepContext) -> torch.Tensor:
        hidden_TE = self._add_norm(hidden_TE, residual_TE, self.norm, self.last_scale)
        if self.feature_taps is not None:
            self.feature_taps.store(OUTPUT, hidden_TE, context)
        return hidden_TE

    @property
    def last_scale(self) -> float:
        """Multiplies the residual stream after the last layer."""
        layer = list(self.layers.values())[-1]
        assert isinstance(layer, DecoderLayer)
        return layer.scale

    def _norm(self, hidden_TE: torch.Tensor, norm: Weight | None) -> torch.Tensor:
        if norm is None:
            return hidden_TE
        if isinstance(norm, LayerNorm):
            return layer_norm(hidden_TE, norm.weight, norm.bias, self.eps)
        return rms_norm(hidden_TE, norm.weight, self.eps)

    def _add_norm(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, norm: Weight | None, scale: float = 1.0
    ) -> torch.Tensor:
        """Add to the residual stream, and scale it; return it, normed if there is a norm."""
        if isinstance(norm, LayerNorm):
            assert self.residual_multiplier == scale == 1
            return add_layer_norm(hidden_TE, residual_TE, norm.weight, norm.bias, self.eps)
        if norm is not None:
            return add_rms_norm(hidden_TE, residual_TE, norm.weight, self.eps, self.residual_multiplier, scale)
        add_residual(hidden_TE, residual_TE, self.residual_multiplier, scale)
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
        own = [layer for layer in layers.values() if isinstance(layer, DecoderLayer)]
        specs = [tuple(mixer.spec for mixer in layer.mixers) for layer in own]
        kinds = zip(specs, (layer.options.mlp for layer in own), strict=True)
        first = {kind: number for number, kind in reversed(list(zip(layers, kinds, strict=True)))}
        owners = [next((spec.cache_of for spec in each), None) for each in specs]
        kept = {int(number) for number in first.values()}
        kept |= {
            owner for number, owner in zip(layers, owners, strict=True) if owner is not None and int(number) in kept
        }
        self.layers = nn.ModuleDict({str(number): layers[str(number)] for number in sorted(kept)})
        try:
            yield
        finally:
            self.layers = layers

    @property
    def recordable(self) -> "Decoder":
        return self

    @property
    def state_specs(self) -> list[StateSpec]:
        layers = (layer for layer in self.layers.values() if isinstance(layer, DecoderLayer))
        return [mixer.spec for layer in layers for mixer in layer.mixers]

    @property
    def layer_numbers(self) -> list[int]:
        return [place for number in self.layers for place in self._places[int(number)]]

    @property
    def mixtures(self) -> dict[int, MixtureOfExperts]:
        """The feed-forwards of this stage's layers with experts, by the layer's number in the whole model."""
        layers = {int(number): layer for number, layer in self.layers.items() if isinstance(layer, DecoderLayer)}
        return {number: layer.mixture for number, layer in layers.items() if layer.mixture is not None}

    def num_parameters(self) -> int:
        return num_parameters(self)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        logits_SV = self.head.logits(hidden_SE) if self.has_head else None
        if logits_SV is None:
            return None
        if self.logits_divisor != 1:  # twice the logits, divided by twice the divisor, as this op can be recorded
            add_residual(logits_SV, logits_SV, scale=0.5 / self.logits_divisor)
        if self.logits_soft_cap is not None:
            logits_SV = soft_cap(logits_SV, self.logits_soft_cap)
        for slot, rows in self.step_adapters.rows_with_tables.items():
            if isinstance(own := self.head.own_heads.get(slot), OwnTable):
                logits_SV[rows, own.num_tokens :] = -torch.inf
        return logits_SV

    @property
    def head(self) -> VocabParallel:
        """The output matrix; on the last stage only."""
        return self.embed_tokens if self.lm_head is None else self.lm_head
