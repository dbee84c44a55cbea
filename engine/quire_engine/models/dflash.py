"""DFlash: a few layers that draft a block of tokens in one pass (Chen et al. 2026, https://arxiv.org/abs/2602.06036).

The block is the last known token, and a mask token in the place of each draft. Its rows see each other, and all
positions before; there keys and values are made of the target's hidden states at the outputs of several layers, and of
nothing else. ::

    before the block    hidden states ─ fc ─ hidden_norm ─ keys, values of each layer
                                                                 │
    the block           token, mask, mask, … ─ embedding ─ decoder layers ─ norm ─ logits of the drafts

In layers with a window a row of the block sees no later one, unless `config.json` says otherwise. Embedding and output
matrix are the target's; where its ranks have parts of them, the rank that drafts loads them as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from quire_kernels import rms_norm, soft_cap

from quire_engine.device.transfer import CPU
from quire_engine.models.base import OUTPUT
from quire_engine.models.checkpoints import StoredTensor, open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig, read_architecture
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, Fields, read_config
from quire_engine.models.decoder import STREAM_BITS, Decoder, DecoderLayer
from quire_engine.models.families.reading import make_layers, read_attention, read_mlp, read_window, read_windows
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.parallel import ColumnParallel, Weight, load_targets
from quire_engine.models.loader import META, bounded_config, build, check_tensors, load_draft_model, vocabulary_tensor
from quire_engine.models.options import AttentionOptions, LayerOptions, ModelOptions
from quire_engine.models.registry import DFLASH_ARCHITECTURES
from quire_engine.models.step_context import KVCaches, StepContext


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashCheckpoint:
    """What `config.json` and the headers of the weight files say about a drafting model."""

    decoder: CheckpointConfig
    target_hidden_size: int
    tapped_layers: tuple[int, ...]
    """As `FeatureTaps` has them."""
    block_size: int
    """The longest block: one more than the drafts."""
    mask_token_id: int
    embedding_scale: float
    """Multiplies the target's embeddings, which are not scaled otherwise."""
    logits_scale: float
    logits_soft_cap: float | None
    tensors: Mapping[str, StoredTensor]
    """By the names of `DFlash`."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "DFlashCheckpoint":
        """Read and check everything but the weights themselves. Raises CheckpointError if something is missing,
        truncated or of the wrong shape, or does not fit the target."""
        fields = read_config(folder, "speculative_config: model")
        architecture, inner = read_architecture(fields, DFLASH_ARCHITECTURES), fields.inner("dflash_config")
        attention = read_attention(fields, head_norms=True)
        windows = read_windows(fields, read_window(fields, None), lambda number: False)
        layers = make_layers(fields, attention, read_mlp(fields), windows)
        options = ModelOptions(layers=_with_causality(fields, inner, layers), has_head=False)
        decoder = CheckpointConfig.from_fields(folder, fields, architecture, options)
        if decoder.weight_format.method != "unquantised":
            raise fields.error("quantization_config", "unset: it is quantised as its target is, when it is loaded")
        for name, size in (
            ("vocab_size", target.vocab_size), ("draft_vocab_size", target.vocab_size),
            ("hidden_size", target.hidden_size), ("target_hidden_size", target.hidden_size),
            ("num_target_layers", target.num_layers),
        ):  # fmt: skip
            fields.same_as_target(name, size)

        def where(name: str) -> Fields:
            return inner if inner.values.get(name) is not None else fields

        stored = open_checkpoint(folder).tensors
        checkpoint = cls(
            decoder=decoder,
            target_hidden_size=target.hidden_size,
            tapped_layers=_tapped_layers(where("target_layer_ids"), target.num_layers),
            block_size=where("block_size").integer("block_size", 2, MAX_POSITIONS, 16),
            mask_token_id=where("mask_token_id").integer("mask_token_id", 0, target.vocab_size - 1),
            embedding_scale=where("input_embedding_scale").positive("input_embedding_scale", 1.0),
            logits_scale=where("output_multiplier").positive("output_multiplier", 1.0),
            logits_soft_cap=where("final_logit_softcapping").positive_or_null("final_logit_softcapping", None),
            tensors={name.removeprefix("model."): tensor for name, tensor in stored.items()},
        )
        bounded = replace(checkpoint, decoder=bounded_config(decoder, len(checkpoint.tensors)))
        module = build(lambda: DFlash(bounded, 1, None), torch.float32, META)
        check_tensors(folder, checkpoint.tensors, load_targets(module), lambda name: name.endswith(".inv_freq"))
        return checkpoint


class DFlash(Decoder):
    """A model that drafts for a target, which is None while it is checked. It uses the target's embedding and output
    matrix, unless its configuration has a head."""

    def __init__(self, config: DFlashCheckpoint, max_model_len: int, target: Decoder | None) -> None:
        super().__init__(config.decoder, max_model_len)
        of = self if self.has_head else target
        self._embed = None if of is None else of.embed_tokens.embed
        self._head_logits = None if of is None else of.head.logits
        if not self.has_head:
            del self.embed_tokens
        size, num_states = config.decoder.hidden_size, len(config.tapped_layers)
        self.fc = ColumnParallel(num_states * config.target_hidden_size, {"fc": size}, False, self.parallel)
        self.fc.activation_bits = STREAM_BITS
        self.hidden_norm = Weight(size)
        self.tapped_layers, self.mask_token_id = config.tapped_layers, config.mask_token_id
        self.max_drafts, self.block_embedding_scale = config.block_size - 1, config.embedding_scale
        self.logits_scale, self.soft_cap = config.logits_scale, config.logits_soft_cap

    def features(self, states_TE: torch.Tensor) -> torch.Tensor:
        """The target's hidden states of the tapped layers, side by side, -> [T, E], of which `write_caches` makes keys
        and values."""
        return rms_norm(self.fc(states_TE), self.hidden_norm.weight, self.eps)

    def write_caches(self, feature_TE: torch.Tensor, context: StepContext, kv_caches: KVCaches) -> None:
        """Write the keys and values of known positions."""
        for index, layer in enumerate(self.layers.values()):
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.self_attn, Attention)
            key_cache, value_cache = kv_caches[index]
            layer.self_attn.write_cache(
                layer.self_attn.qkv_proj(feature_TE), key_cache, value_cache, context.for_layer(index)
            )

    def run(self, token_ids_T: torch.Tensor, context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        """Blocks, [T] -> [T, E]; overwrites what the caches have in their places."""
        assert self._embed is not None
        hidden_TE = self._embed(token_ids_T)
        if self.block_embedding_scale != 1:
            hidden_TE *= self.block_embedding_scale
        return self.final_norm(*self.run_layers(hidden_TE, None, context, kv_caches), context)

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """Results of `run` at places of drafts, [S, E] -> [S, V] float32."""
        assert self._head_logits is not None
        logits_SV = self._head_logits(out_SE)
        assert logits_SV is not None
        if self.logits_scale != 1:
            logits_SV *= self.logits_scale
        return logits_SV if self.soft_cap is None else soft_cap(logits_SV, self.soft_cap)


def _with_causality(fields: Fields, inner: Fields, layers: tuple[LayerOptions, ...]) -> tuple[LayerOptions, ...]:
    """Layers whose rows see later ones of the block, or not."""
    given = fields if fields.values.get("is_causal") is not None else inner
    name = "is_causal" if given is fields else "causal"
    found = []
    for layer in layers:
        assert isinstance(layer.attention, AttentionOptions)
        is_causal = given.boolean(name, layer.attention.window is not None)
        found.append(replace(layer, attention=replace(layer.attention, is_causal=is_causal)))
    return tuple(found)


def _tapped_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Of layers by whose outputs they are numbered, those that have them at their inputs."""
    numbers = fields.target_layers("target_layer_ids", fields.values.get("target_layer_ids"), num_layers)
    return tuple(OUTPUT if number == num_layers - 1 else number + 1 for number in numbers)


def load_dflash(
    folder: Path,
    target_folder: Path,
    target_config: CheckpointConfig,
    target: Decoder,
    max_model_len: int,
    quantization: str | None = None,
    device: torch.device = CPU,
) -> DFlash:
    """Load the drafting model of a folder, on a rank of its target. Raises CheckpointError if a folder or a weight is
    wrong.

    Args:
        folder: of the drafting model.
        target_folder: the target's checkpoint.
        target_config: its configuration.
        target: this rank's part of it.
        max_model_len: of the target.
        quantization: the setting; None: the matrices are not quantised.
        device: of the target.
    """
    config = DFlashCheckpoint.from_folder(folder, target_config)
    tensors = dict(config.tensors)
    if target.parallel.tensor_parallel_size > 1:
        is_tied = target_config.tie_word_embeddings
        options = replace(config.decoder.options, has_head=True, head_bias=target_config.options.head_bias)
        config = replace(config, decoder=replace(config.decoder, tie_word_embeddings=is_tied, options=options))
        for name in ("embed_tokens", *(() if is_tied else ("lm_head",))):
            tensors |= vocabulary_tensor(target_folder, target_config, f"{name}.weight")
    return load_draft_model(
        lambda: DFlash(config, max_model_len, target), target, target_config, tensors, quantization, device
    )
