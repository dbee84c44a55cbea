"""Reads a checkpoint's `config.json` and checks it field by field. Does not use torch."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.kv_cache import KVCacheGroups
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields, read_config
from quire_engine.models.checkpoints.files import brief, read_json
from quire_engine.models.checkpoints.weight_format import MXFP4_BLOCK, WeightFormat, read_weight_format
from quire_engine.models.families.heads import read_head
from quire_engine.models.families.reading import read_head_size, read_max_position_embeddings
from quire_engine.models.options import AttentionOptions, ExpertsOptions, HeadOptions, MLPOptions, ModelOptions
from quire_engine.models.registry import (
    ARCHITECTURES,
    ENCODERS,
    OTHER_NAMES,
    POOLING_ARCHITECTURES,
    TEXT_TYPES,
    read_family,
    unlisted_family,
)

LEAST_STATE_TOKENS = 256
"""Least `ServedCheckpoint.state_tokens`: states of a short convolution are as large as keys and values of 20 tokens, so
that snapshots would take half of the memory; so far apart they take a twelfth."""
STATE_TOKENS_ALONE = 1024
"""`ServedCheckpoint.state_tokens` of a model that has no keys and values to compare its states with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCheckpoint(ABC):
    """What the engine needs to know of any checkpoint, from its `config.json` and `generation_config.json`."""

    architecture: str
    """The first of `architectures`."""
    dtype: str
    """The dtype of the weights."""
    vocab_size: int
    hidden_size: int
    head_size: int
    """The size of queries and keys; each layer of transformers' code has its own when the model is loaded."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    head: HeadOptions | None = None
    """What scores classes, if it does."""

    @property
    def can_generate(self) -> bool:
        """Whether it computes logits."""
        return True

    @property
    def longest_model_len(self) -> int:
        """The longest sequence that it can be served with."""
        return self.max_position_embeddings

    @property
    @abstractmethod
    def windows(self) -> tuple[int | None, ...]:
        """By layer that keeps something, how many of its last keys each row sees at most, if the cache may evict the
        others; None: all. A layer with attention and a recurrence has two."""

    @property
    def state_tokens(self) -> int:
        """From how many tokens on a snapshot of a request's states follows the last one: about as many as have keys and
        values of the same size, if these are not few; 0 without states."""
        return 0

    def kv_cache_groups(self, max_model_len: int, block_size: int, is_hybrid: bool) -> KVCacheGroups:
        """How its layers share the KV cache; see `KVCacheGroups.of`."""
        return KVCacheGroups.of(self.windows, max_model_len, is_hybrid, max(self.state_tokens // block_size, 1))

    @property
    def is_causal(self) -> bool:
        """Whether no token depends on those after it. Else prompts are computed whole, and nothing is generated."""
        return True

    @property
    def num_deepstack_layers(self) -> int:
        """How many layers take features of images, which follow their hidden states."""
        return 0

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Layers, and experts of a layer, if some layers have experts whose tokens are counted; else None."""
        return None

    @property
    def expert_bytes(self) -> int:
        """About the size of one such expert's weights; 0 without experts."""
        return 0

    @abstractmethod
    def check_parallel(
        self, tensor_parallel_size: int, pipeline_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> None:
        """Check that the model can be divided among this many ranks.

        Raises:
            ValueError: it cannot; names the setting, the size that prevents it, and the allowed values.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(ServedCheckpoint):
    """A checkpoint of one of our own families."""

    num_heads: int
    num_kv_heads: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    options: ModelOptions
    """What the family makes of the other fields."""
    weight_format: WeightFormat
    """How the weights of its linear layers are stored."""

    @classmethod
    def from_folder(cls, folder: Path) -> "CheckpointConfig":
        """Read and check a folder's configuration. Raises CheckpointError if its model cannot be served."""
        fields = read_config(folder)
        named = architecture_named(fields)
        unlisted = () if unlisted_family(named, fields) is None else (named,)
        architecture = read_architecture(fields, (*ARCHITECTURES, *POOLING_ARCHITECTURES, *unlisted))
        fields, options = read_family(architecture, fields)
        checkpoint = cls.from_fields(folder, fields, architecture, options)
        return replace(checkpoint, head=read_head(architecture, fields, checkpoint.hidden_size))

    @classmethod
    def from_fields(cls, folder: Path, fields: Fields, architecture: str, options: ModelOptions) -> "CheckpointConfig":
        """The same of fields of `config.json` whose family was read already; the folder is for
        `generation_config.json`."""
        num_heads, weight_format = fields.integer("num_attention_heads", 1, MAX_SIZE), read_weight_format(fields)
        first = 0 if options.encoder is None else options.encoder.first_position
        num_positions = read_max_position_embeddings(fields) - first
        if weight_format.method == "gguf":  # llama.cpp adds the offset when it converts a checkpoint
            options = replace(options, norms=replace(options.norms, offset=0.0))
        checkpoint = cls(
            architecture=architecture,
            dtype=fields.dtype(),
            vocab_size=fields.integer("vocab_size", 1, MAX_SIZE),
            hidden_size=fields.integer("hidden_size", 1, MAX_SIZE),
            num_heads=num_heads,
            num_kv_heads=options.num_kv_heads or fields.integer("num_key_value_heads", 1, num_heads, num_heads),
            head_size=read_head_size(fields),
            rms_norm_eps=options.norms.eps or fields.positive("rms_norm_eps", 1e-6),
            max_position_embeddings=min(num_positions, options.max_model_len or num_positions),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            options=options,
            weight_format=weight_format,
            eos_token_ids=read_eos_token_ids(folder, fields),
        )
        checkpoint._check(fields.path)
        return checkpoint

    @property
    def has_other_parts(self) -> bool:
        """Whether the text model is a part of the checkpoint, under a name of its own."""
        return self.architecture.endswith("ForConditionalGeneration")

    @property
    def is_listed(self) -> bool:
        """Whether its architecture is known, and not only that of its text model."""
        return self.architecture in ARCHITECTURES or self.architecture in POOLING_ARCHITECTURES

    @property
    def can_generate(self) -> bool:
        return self.options.has_head

    @property
    def num_layers(self) -> int:
        """The number of layers of the whole model."""
        return len(self.options.layers)

    @property
    def experts(self) -> ExpertsOptions | None:
        """The experts of the layers that have any, which all have the same; None if none has."""
        return next((one.mixture for one in self.options.layers if one.mixture is not None), None)

    @property
    def _dense_sizes(self) -> list[int]:
        """The sizes of the feed-forwards of the layers without experts."""
        return sorted({one.mlp.intermediate_size for one in self.options.layers if isinstance(one.mlp, MLPOptions)})

    @property
    def _kv_heads(self) -> list[int]:
        """The numbers of key and value heads of a layer."""
        attention = [one.attention for one in self.options.layers if isinstance(one.attention, AttentionOptions)]
        return sorted({self.num_kv_heads, *(one.num_kv_heads or self.num_kv_heads for one in attention)})

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(window for layer in self.options.layers for window in layer.windows)

    @property
    def state_tokens(self) -> int:
        states = [layer.state.num_numbers for layer in self.options.layers if layer.state is not None]
        if not states:
            return 0
        num_attentions = sum(layer.attention is not None for layer in self.options.layers)
        token_bytes = num_attentions * 2 * 2 * self.num_kv_heads * self.head_size
        return max(-(-4 * sum(states) // token_bytes), LEAST_STATE_TOKENS) if token_bytes else STATE_TOKENS_ALONE

    @property
    def is_causal(self) -> bool:
        return all(layer.attention is None or layer.attention.is_causal for layer in self.options.layers)

    @property
    def num_deepstack_layers(self) -> int:
        return self.options.num_deepstack_layers

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        return None if self.experts is None else (self.num_layers, self.experts.num_experts)

    @property
    def expert_bytes(self) -> int:
        experts = self.experts
        if experts is None:
            return 0
        num_matrices = 3 if experts.expert.is_gated else 2
        size = num_matrices * (experts.latent_size or self.hidden_size) * experts.expert.intermediate_size
        return size * (4 if self.dtype == "float32" else 2) * self.weight_format.bits // 16

    @property
    def longest_model_len(self) -> int:
        """`max_position_embeddings`, unless the RoPE of its layers extends it, or there is no attention; and no more
        than the model computes."""
        if all(layer.attention is None for layer in self.options.layers):
            return MAX_POSITIONS
        if self.options.max_model_len is not None:
            return self.max_position_embeddings
        ropes = {layer.attention.rope for layer in self.options.layers if layer.attention is not None}
        return max([self.max_position_embeddings, *(rope.extended_length for rope in ropes if rope is not None)])

    def check_parallel(
        self, tensor_parallel_size: int, pipeline_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> None:
        if enable_expert_parallel and self.experts is None:
            raise ValueError(
                f"enable_expert_parallel is True; a {self.architecture} has no experts to divide: leave it out"
            )
        reason = self._indivisible(tensor_parallel_size, enable_expert_parallel)
        if reason is not None:
            sizes = range(1, max(self.num_heads, tensor_parallel_size) + 1)
            right = [size for size in sizes if self._indivisible(size, enable_expert_parallel) is None]
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size}; {reason}; for this model it must be "
                f"{' or '.join(map(str, right))}"
            )
        if pipeline_parallel_size > 1 and self.options.encoder is not None:
            raise ValueError(
                f"pipeline_parallel_size is {pipeline_parallel_size}; an encoder such as {self.architecture} has no "
                "stages: use tensor_parallel_size"
            )
        joined = max(self.options.num_joined_layers, 1)
        if pipeline_parallel_size > self.num_layers - joined + 1:
            if joined > 1:
                reason = (
                    f"{self.num_layers - joined + 1}, as the last {joined} layers, which share caches, are one stage"
                )
            else:
                reason = f"num_hidden_layers={self.num_layers}, as each stage has at least one layer"
            raise ValueError(f"pipeline_parallel_size is {pipeline_parallel_size}; it must be at most {reason}")

    def _indivisible(self, ranks: int, enable_expert_parallel: bool) -> str | None:
        """Why the layers cannot be cut into this many slices; None if they can."""
        experts, has_attention = self.experts, any(layer.attention is not None for layer in self.options.layers)
        sizes = {"num_attention_heads": self.num_heads} if has_attention else {}
        if dense := self._dense_sizes:
            sizes["intermediate_size"] = next((size for size in dense if size % ranks), dense[0])
        if experts is not None:
            sizes["shared_expert_intermediate_size"] = experts.shared.intermediate_size if experts.shared else 0
            if not enable_expert_parallel:
                sizes["moe_intermediate_size"] = experts.expert.intermediate_size
            elif experts.num_experts < ranks:
                return f"num_experts={experts.num_experts} is less"
        for name, size in sizes.items():
            if size % ranks:
                return f"{name}={size} is no multiple of it"
        attention = self.options.layers[0].attention
        if isinstance(attention, AttentionOptions) and attention.fused_name is not None and self.num_kv_heads % ranks:
            return f"the number of KV heads, whose groups {attention.fused_name} has, is {self.num_kv_heads}"
        for state in {layer.state for layer in self.options.layers if layer.state is not None}:
            if reason := state.indivisible(ranks):
                return reason
        for number in self._kv_heads if has_attention else ():
            if number % ranks and ranks % number:
                return f"num_key_value_heads={number} is neither a multiple nor a divisor of it"
        return None if ranks <= self.vocab_size else f"vocab_size={self.vocab_size} is less"

    def _check(self, path: Path) -> None:
        for number in self._kv_heads:
            if self.num_heads % number:
                raise CheckpointError(
                    f"{path}: num_attention_heads is {self.num_heads}; it must be a multiple of "
                    f"num_key_value_heads={number}"
                )
        method, experts = self.weight_format.method, self.experts
        is_interleaved = experts is not None and experts.stack == "interleaved"
        if method not in ("unquantised", "gguf") and is_interleaved != (method == "mxfp4"):
            raise CheckpointError(
                f"{path}: quantization_config says {method}; a {self.architecture} is served from checkpoints that are "
                f"unquantised or {'in mxfp4' if is_interleaved else 'quantised otherwise'}"
            )
        size = experts.expert.intermediate_size if experts is not None else 0
        if method == "mxfp4" and (self.hidden_size % MXFP4_BLOCK or size % MXFP4_BLOCK):
            raise CheckpointError(
                f"{path}: hidden_size is {self.hidden_size} and intermediate_size {size}; they must be multiples of "
                f"{MXFP4_BLOCK}, as quantization_config says mxfp4"
            )


def architecture_named(fields: Fields) -> Any:
    """The first architecture that `config.json` names, or else the one of ours that is called like its `model_type`;
    None where there is none."""
    named, model_type = fields.values.get("architectures"), fields.values.get("model_type")
    if named is not None and named != []:
        first = named[0] if isinstance(named, list) else "(none named)"
        return OTHER_NAMES.get(first, first) if isinstance(first, str) else first
    if "text_config" in fields.values and isinstance(model_type, str):
        own_name = f"{model_type.replace('_', '')}forconditionalgeneration"
        return next((name for name in TEXT_TYPES if name.lower() == own_name), None)
    found = [name for name, family in ARCHITECTURES.items() if model_type in (family, f"{family}_text")]
    return min(found, key=TEXT_TYPES.__contains__, default=None)  # text models first


def read_architecture(fields: Fields, known: tuple[str, ...]) -> str:
    """The first architecture that `config.json` names. Raises CheckpointError if it is not a known one."""
    architecture = architecture_named(fields)
    if architecture is None:
        raise CheckpointError(
            f"{fields.path}: architectures is missing, and model_type is {brief(fields.values.get('model_type'))}; one "
            "of the two must say which decoder it is"
        )
    if architecture not in known:
        ending, names = "ForCausalLM", list(known)
        usual = [name.removesuffix(ending) for name in known if name.endswith(ending)]
        if len(usual) > 1:
            others = [name for name in known if not name.endswith(ending) and name not in POOLING_ARCHITECTURES]
            encoders = [name.removesuffix("Model") for name in ENCODERS if name.endswith("Model")]
            names = [*usual, f"each with {ending}", *others, f"and the encoders {encoders[0]}", *encoders[1:]]
        raise CheckpointError(
            f"{fields.path}: unknown architecture {brief(architecture)}; known are {', '.join(names)}"
        )
    return str(architecture)


def read_eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """The tokens that end an answer. `generation_config.json` takes precedence over the fields of `config.json`, as it
    may name several. Raises CheckpointError if they are not tokens."""
    path = folder / "generation_config.json"
    if os.path.lexists(path):
        generation = Fields(path, read_json(path))
        if "eos_token_id" in generation.values:
            fields = generation
    eos = fields.values.get("eos_token_id")
    token_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token_id) is int and 0 <= token_id < MAX_SIZE for token_id in token_ids):
        raise fields.error("eos_token_id", f"an integer from 0 to {MAX_SIZE - 1}, or a list of such")
    return tuple(token_ids)
