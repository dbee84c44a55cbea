"""Gemma 4's assistant: a small decoder that drafts from its target's keys and values, which it reads in the target's
cache (https://huggingface.co/docs/transformers/model_doc/gemma4_assistant).

Each of its layers reads those of the target's last layer of the same kind, with a window or without, that makes its
own. So it keeps nothing, and has nothing to compute of a prompt. All drafts of a step are computed at the position of
the last known token, over the keys before it::

    token ── target's embedding ─┐                                               ┌─ lm_head
                                 ├─ pre_projection ─ decoder layers ─ norm ──────┤
    hidden state ────────────────┘                                               └─ post_projection ─ next hidden state

The first hidden state is the target's after its last norm. In small assistants `lm_head` is computed of some tokens
only: those of the likeliest of many clusters (`centroids`). It is not cut into slices: one rank has all of it, and
computes alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire_engine.device.transfer import CPU
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import StoredTensor, open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig, read_architecture
from quire_engine.models.checkpoints.fields import Fields, read_config
from quire_engine.models.decoder import STREAM_BITS, Decoder
from quire_engine.models.families import gemma
from quire_engine.models.layers.parallel import ColumnParallel, Weight, load_targets
from quire_engine.models.loader import META, bounded_config, build, check_tensors, load_draft_model
from quire_engine.models.options import AttentionOptions
from quire_engine.models.registry import ASSISTANT_ARCHITECTURES
from quire_engine.models.step_context import KVCaches, StepContext

ORDERING = "masked_embedding.token_ordering"


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantCheckpoint:
    """What `config.json` and the headers of the weight files say about an assistant."""

    decoder: CheckpointConfig
    target_hidden_size: int
    num_centroids: int
    """Clusters of tokens, all of one size; 0: logits are of all tokens."""
    top_k: int
    """How many of the clusters have logits."""
    tensors: Mapping[str, StoredTensor]
    """By the names of `Gemma4Assistant`."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "AssistantCheckpoint":
        """Read and check everything but the weights themselves. Raises CheckpointError if something is missing,
        truncated or of the wrong shape, or does not fit the target."""
        outer = read_config(folder, "speculative_config: model")
        architecture, text = read_architecture(outer, ASSISTANT_ARCHITECTURES), outer.text()
        family = text.choice("model_type", ("gemma4_text", "gemma4_unified_text"), "gemma4_text").removesuffix("_text")
        given = {name: value for name, value in text.values.items() if value is not None}
        fields = text.with_values({**gemma.DEFAULTS[family], **given})
        options = gemma.gemma4_assistant(fields)
        decoder = CheckpointConfig.from_fields(folder, fields, architecture, options)
        if decoder.weight_format.method != "unquantised":
            raise fields.error("quantization_config", "unset: it is quantised as its target is, when it is loaded")
        outer.same_as_target("backbone_hidden_size", target.hidden_size)
        fields.same_as_target("vocab_size", target.vocab_size)
        _check_caches(fields, decoder, target)
        num_centroids = top_k = 0
        if outer.boolean("use_ordered_embeddings", False):
            num_centroids = outer.integer("num_centroids", 1, decoder.vocab_size, 2048)
            top_k = outer.integer("centroid_intermediate_top_k", 1, num_centroids, 32)
            if decoder.vocab_size % num_centroids:
                raise outer.error("num_centroids", f"a divisor of vocab_size={decoder.vocab_size}")
        assistant = cls(
            decoder=decoder,
            target_hidden_size=target.hidden_size,
            num_centroids=num_centroids,
            top_k=top_k,
            tensors={_our_name(name, decoder): one for name, one in open_checkpoint(folder).tensors.items()},
        )
        bounded = replace(assistant, decoder=bounded_config(decoder, len(assistant.tensors)))
        module = build(lambda: Gemma4Assistant(bounded, 1), torch.float32, META)
        unused = "lm_head.weight" if decoder.tie_word_embeddings else "embed_tokens.weight"
        check_tensors(folder, assistant.tensors, load_targets(module), lambda name: name == unused)
        return assistant


class Gemma4Assistant(Decoder):
    """An assistant, whose `embed` is not used."""

    def __init__(self, config: AssistantCheckpoint, max_model_len: int) -> None:
        decoder = config.decoder
        super().__init__(decoder, max_model_len)
        if self.lm_head is not None:
            del self.embed_tokens
        size, other, self.top_k = decoder.hidden_size, config.target_hidden_size, config.top_k
        self.pre_projection = ColumnParallel(2 * other, {"pre_projection": size}, False, self.parallel)
        self.pre_projection.activation_bits = STREAM_BITS
        self.post_projection = ColumnParallel(size, {"post_projection": other}, False, self.parallel)
        self.centroids = None
        if config.num_centroids:
            parts = {"masked_embedding.centroids": config.num_centroids}
            self.centroids = ColumnParallel(size, parts, False, self.parallel)
            self.token_ordering = Weight(decoder.vocab_size, dtype=torch.int64)

    def run(
        self, embedded_SE: torch.Tensor, hidden_SE: torch.Tensor, context: StepContext, kv_caches: KVCaches
    ) -> torch.Tensor:
        """The target's embeddings and hidden states, [S, E] each -> [S, E'], what `logits` and `next_hidden` take."""
        inputs_SE = self.pre_projection(torch.cat((embedded_SE, hidden_SE), 1))
        return self.final_norm(*self.run_layers(inputs_SE, None, context, kv_caches), context)

    def next_hidden(self, out_SE: torch.Tensor) -> torch.Tensor:
        """Results of `run`, [S, E'] -> [S, E], in place of the target's hidden states at the next drafts."""
        hidden_SE: torch.Tensor = self.post_projection(out_SE)
        return hidden_SE

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """Results of `run`, [S, E'] -> [S, V] float32; -inf of tokens in other clusters."""
        if self.centroids is None:
            logits_SV = self.compute_logits(out_SE)
            assert logits_SV is not None
            return logits_SV
        ordering_V = self.token_ordering.weight
        clusters_SK = self.centroids(out_SE).topk(self.top_k).indices
        tokens_SC = ordering_V.view(self.centroids.sizes[0], -1)[clusters_SK].flatten(1)
        rows_SCE = self.head.embed(tokens_SC.flatten()).view(*tokens_SC.shape, -1)
        some_SC = (rows_SCE @ out_SE[:, :, None]).squeeze(2).float()
        logits_SV = some_SC.new_full((len(out_SE), len(ordering_V)), -torch.inf)
        return logits_SV.scatter_(1, tokens_SC, some_SC)


def _our_name(name: str, decoder: CheckpointConfig) -> str:
    for theirs, ours in decoder.options.renamed:
        name = name.replace(theirs, ours)
    return "token_ordering.weight" if name == ORDERING else name.removeprefix("model.")


def _check_caches(fields: Fields, decoder: CheckpointConfig, target: CheckpointConfig) -> None:
    """Check that the target makes the keys and values that each layer reads. Raises CheckpointError."""
    made = {
        layer.attention.window: (
            layer.attention.num_kv_heads or target.num_kv_heads,
            layer.attention.head_size or target.head_size,
        )
        for layer in target.options.layers
        if isinstance(layer.attention, AttentionOptions) and layer.attention.cache_of is None
    }
    for number, layer in enumerate(decoder.options.layers):
        own = layer.attention
        assert isinstance(own, AttentionOptions)
        sizes = own.num_kv_heads or decoder.num_kv_heads, own.head_size or decoder.head_size
        if made.get(own.window) != sizes:
            kind = "without a window" if own.window is None else f"with a window of {own.window}"
            there = "none" if own.window not in made else "{} of size {}".format(*made[own.window])
            raise CheckpointError(
                f"{fields.path}: layer {number} reads {sizes[0]} heads of keys of size {sizes[1]} of the target's last "
                f"layer {kind}, which has {there}; give the assistant of this very model"
            )


def load_assistant(
    folder: Path,
    target_config: CheckpointConfig,
    target: Decoder,
    max_model_len: int,
    quantization: str | None = None,
    device: torch.device = CPU,
) -> Gemma4Assistant:
    """Load the assistant of a folder, on the only rank of its target. Raises CheckpointError if the folder or a weight
    is wrong.

    Args:
        folder: of the assistant.
        target_config: the target's configuration.
        target: that it drafts for.
        max_model_len: of the target.
        quantization: the setting; None: the matrices are not quantised.
        device: of the target.
    """
    config = AssistantCheckpoint.from_folder(folder, target_config)
    assistant = load_draft_model(
        lambda: Gemma4Assistant(config, max_model_len), target, target_config, config.tensors, quantization, device
    )
    if assistant.centroids is not None:
        low, high = (int(bound) for bound in assistant.token_ordering.weight.aminmax())
        if low < 0 or high >= target_config.vocab_size:
            raise CheckpointError(
                f"{folder}: tensor {ORDERING} has token {low if low < 0 else high}; it must be from 0 to "
                f"{target_config.vocab_size - 1}"
            )
    return assistant
