"""The decoder of all families: layers of attention and feed-forward on one residual stream, as in Llama (Touvron et al.
2023, https://arxiv.org/abs/2302.13971). A family decides what its layers are (`models/options.py`).

One layer, in calls::

    add_rms_norm ─ qkv_proj ─ rope_and_cache ─ paged_attention ─ o_proj  [─ rms_norm]
    add_rms_norm ─ gate_up_proj (with activation · mul) ─ down_proj  [─ rms_norm]

Each `add_rms_norm` adds the previous line's output to the residual stream, and norms the sum; in families that norm
only outputs, it is `add_residual`. With several ranks the projections are cut into slices, and the layers divided among
stages (`models/parallel.py`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from quire_kernels import add_residual, add_rms_norm, rms_norm, soft_cap
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import StateSpec
from quire_engine.models.base import FeatureTaps, replace_rows
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.balanced_experts import BalancedExperts
from quire_engine.models.layers.experts import GatedMLP, MixtureOfExperts
from quire_engine.models.layers.latent_attention import LatentAttention
from quire_engine.models.layers.lockstep_experts import LockstepExperts
from quire_engine.models.layers.mamba import Mamba, Selective
from quire_engine.models.layers.parallel import (
    StepAdapters,
    VocabParallel,
    Weight,
    num_parameters,
    receive_activations,
    scale_projections,
    send_activations,
    stage_layers,
)
from quire_engine.models.layers.rope import RopeTables, rope_tables
from quire_engine.models.options import (
    ExpertsOptions,
    LatentAttentionOptions,
    LayerOptions,
    MambaOptions,
    MLPOptions,
    SelectiveOptions,
    StateOptions,
)
from quire_engine.models.step_context import ADAPTER, KVCaches, RowColumn, StepContext


def make_feed_forward(
    config: CheckpointConfig, options: MLPOptions | ExpertsOptions, parallel: ParallelState
) -> GatedMLP | MixtureOfExperts:
    if isinstance(options, MLPOptions):
        return GatedMLP(config.hidden_size, options, parallel)
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


def make_recurrence(config: CheckpointConfig, options: StateOptions, parallel: ParallelState) -> Recurrence:
    if isinstance(options, MambaOptions):
        return Mamba(config, options, parallel)
    if isinstance(options, SelectiveOptions):
        return Selective(config, options, parallel)
    raise NotImplementedError(options)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, with norms before or after each, on one residual stream."""

    def __init__(
        self, config: CheckpointConfig, options: LayerOptions, parallel: ParallelState, tables: RopeTables
    ) -> None:
        super().__init__()
        for name in config.options.norms.names:
            self.add_module(name, Weight.of_norm(config.hidden_size, config.options.norms))
        attention = options.attention
        self.self_attn: Attention | LatentAttention | None = None
        if isinstance(attention, LatentAttentionOptions):
            self.self_attn = LatentAttention(config, attention, parallel, tables)
        elif attention is not None:
            self.self_attn = Attention(config, attention, parallel, tables)
        self.mixer: Recurrence | None = None
        if options.state is not None:
            self.mixer = make_recurrence(config, options.state, parallel)
        self.mlp = None if options.mlp is None else make_feed_forward(config, options.mlp, parallel)

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
            add_residual(other, first, 1.0)
        return first

    def norm(self, name: str | None) -> torch.Tensor | None:
        """The weight of one of its norms, by its name in the checkpoint."""
        if name is None:
            return None
        norm = getattr(self, name)
        assert isinstance(norm, Weight)
        return norm.weight


class Decoder(nn.Module):
    """A `RecordableLM` of any family."""

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
        self.step_adapters = StepAdapters()
        vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        # A tied head has no weights of its own, unless the embedding is on another stage.
        self.has_head = options.has_head
        is_tied = config.tie_word_embeddings and self.has_head
        if parallel.is_first_stage or (parallel.is_last_stage and is_tied):
            self.embed_tokens = VocabParallel(vocab_size, self.hidden_size, parallel, is_tied)
        self.tables = rope_tables(max_model_len)
        # By their numbers in the checkpoint, on every stage.
        self.layers = nn.ModuleDict({
            str(number): DecoderLayer(config, options.layers[number], parallel, self.tables)
            for number in stage_layers(config.num_layers, parallel)
        })  # fmt: skip
        scale_projections(self, dict(options.scaled))
        ends = list(accumulate(len(layer.windows) for layer in options.layers))
        self._places = [range(end - len(layer.windows), end) for layer, end in zip(options.layers, ends, strict=True)]
        """By layer, the numbers of its mixers in the whole model."""
        self.lm_head = None
        if parallel.is_last_stage:
            if options.encoder is None:
                self.norm = Weight.of_norm(self.hidden_size, options.norms)
            if self.has_head and not is_tied:
                self.lm_head = VocabParallel(vocab_size, self.hidden_size, parallel, is_head=True)

    def pack(self) -> None:
        """Make what the layers compute with and no weight is alone, once all weights are loaded."""
        for mixture in self.mixtures.values():
            mixture.pack()
        for layer in self.layers.values():
            if isinstance(layer, DecoderLayer) and layer.mixer is not None:
                layer.mixer.pack()

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """[T] -> [T, E], or None. Receives from the previous stage, and sends to the next."""
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
        hidden_TE = self.embed_tokens.embed(token_ids_T)
        if self.embedding_scale != 1:
            hidden_TE *= self.embedding_scale
        return hidden_TE

    def run_layers(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, context: StepContext, kv_caches: KVCaches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taps, norms = self.feature_taps, self.norms
        self.step_adapters.index_T = context.columns.get(ADAPTER.name)
        each = ((caches, context.for_layer(index)) for index, caches in enumerate(kv_caches))
        for number, layer in self.layers.items():
            assert isinstance(layer, DecoderLayer)
            before = norms.before_attention if layer.mixers else norms.before_mlp
            if residual_TE is None:
                residual_TE = hidden_TE
                hidden_TE = self._norm(hidden_TE, layer.norm(before))
            else:
                hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(before))
            if taps is not None:
                taps.store(int(number), residual_TE, context)
            if layer.mixers:
                hidden_TE = self._norm(layer.mix(hidden_TE, each), layer.norm(norms.after_attention))
            if layer.mlp is not None:
                if layer.mixers:
                    hidden_TE = self._add_norm(hidden_TE, residual_TE, layer.norm(norms.before_mlp))
                hidden_TE = self._norm(layer.mlp(hidden_TE), layer.norm(norms.after_mlp))
        assert residual_TE is not None, "a stage has at least one layer"
        return hidden_TE, residual_TE

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
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
            (*(mixer.spec for mixer in layer.mixers), type(layer.mlp))
            for layer in layers.values()
            if isinstance(layer, DecoderLayer)
        ]
        first = {kind: number for number, kind in reversed(list(zip(layers, kinds, strict=True)))}
        self.layers = nn.ModuleDict({number: layers[number] for number in sorted(first.values(), key=int)})
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
        return {number: layer.mlp for number, layer in layers.items() if isinstance(layer.mlp, MixtureOfExperts)}

    def num_parameters(self) -> int:
        return num_parameters(self)

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        logits_SV = self.head.logits(hidden_SE) if self.has_head else None
        if logits_SV is None:
            return None
        if self.logits_divisor != 1:
            logits_SV /= self.logits_divisor
        return logits_SV if self.logits_soft_cap is None else soft_cap(logits_SV, self.logits_soft_cap)

    @property
    def head(self) -> VocabParallel:
        """The output matrix; on the last stage only."""
        return self.embed_tokens if self.lm_head is None else self.lm_head
