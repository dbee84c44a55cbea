"""Reads the `config.json` of a decoder that runs with transformers' own modelling code, or says why it cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import read_architecture, read_eos_token_ids
from quire_engine.models.fields import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.files import brief
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.models.transformers_source import ModelSource, class_of, find_model, is_listed
from quire_engine.models.weight_format import modelopt_config, reject_mlx

SERVED = (
    "with transformers' own code decoders are served whose layers keep keys and values alone, and whose attention is "
    "called through transformers' attention interface"
)
"""The end of every rejection."""
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
"""Of `layer_types` in `config.json`; others keep something else than keys and values, or are no causal attention."""
OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "text_config")
"""Fields of models that take more than text."""
CHANGING_ROPE_TYPES = ("dynamic", "longrope")
"""transformers turns these by the longest sequence of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersCheckpoint:
    """A `ServedCheckpoint` of an architecture that transformers has the code of."""

    architecture: str
    dtype: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    head_size: int
    """Of most such models; each layer says its own when the model is loaded."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_fields(cls, folder: Path, fields: Fields) -> "TransformersCheckpoint":
        """Check that transformers has the model, and that our attention can take the place of its own.

        Args:
            folder: for `generation_config.json`.
            fields: of `config.json`.

        Raises:
            CheckpointError: it has none such, or the model keeps more than keys and values.
        """
        architecture, source = _find(fields)
        _refuse_others(architecture, source, fields)

        def name_of(name: str) -> tuple[str, Any]:
            """The name in this model's `config.json`, and its default."""
            usual = source.attribute_map.get(name, name)
            given = next((one for one in source.names_of(name) if fields.values.get(one) is not None), usual)
            return given, source.defaults.get(usual)

        read: Callable[..., int] = lambda name, high=MAX_SIZE, default=None: _integer(  # noqa: E731
            fields, *name_of(name), high, default
        )
        hidden_size, num_heads = read("hidden_size"), read("num_attention_heads")
        return cls(
            architecture=architecture,
            dtype=fields.dtype(),
            vocab_size=read("vocab_size"),
            num_layers=read("num_hidden_layers", MAX_LAYERS),
            hidden_size=hidden_size,
            head_size=read("head_dim", default=max(hidden_size // num_heads, 1)),
            max_position_embeddings=read("max_position_embeddings", MAX_POSITIONS, 2048),
            eos_token_ids=read_eos_token_ids(folder, fields),
        )

    @property
    def longest_model_len(self) -> int:
        """The longest sequence that it can be served with."""
        return self.max_position_embeddings

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The cache keeps all keys: which layers have a window is only known when the model is loaded."""
        return (None,) * self.num_layers

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """None: transformers' own code routes tokens, and does not say where to."""
        return None

    @property
    def expert_bytes(self) -> int:
        return 0

    def check_parallel(
        self, tensor_parallel_size: int, pipeline_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> None:
        """Check that one rank computes it.

        Raises:
            ValueError: there are several, or its experts are to be divided.
        """
        if enable_expert_parallel:
            raise ValueError(
                f"enable_expert_parallel is True; it must be false, as {self.architecture} runs with transformers' own "
                "code, which is not divided among ranks"
            )
        sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
        for name, size in sizes.items():
            if size > 1:
                raise ValueError(
                    f"{name} is {size}; it must be 1, as {self.architecture} runs with transformers' own code, which "
                    "is not divided among ranks"
                )


def _find(fields: Fields) -> tuple[str, ModelSource]:
    """The architecture that `config.json` names, and transformers' source of it.

    Raises:
        CheckpointError: transformers has no such decoder.
    """
    named = fields.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    model_type = fields.values.get("model_type")
    if isinstance(model_type, str):
        # Not named, or as in the checkpoint's own code, where transformers has none: an ExaoneForCausalLM is a Llama.
        own_name = f"{model_type}forcausallm"
        if named in (None, []) or (isinstance(architecture, str) and architecture.lower() == own_name):
            architecture = class_of(model_type) or architecture
    if isinstance(architecture, str) and isinstance(model_type, str):
        for kind, what in (
            ("SEQ_TO_SEQ_CAUSAL_LM", "an encoder-decoder"),
            ("SPEECH_SEQ_2_SEQ", "an encoder-decoder"),
            ("IMAGE_TEXT_TO_TEXT", "a multi-modal model"),
        ):
            if is_listed(architecture, kind):
                raise _refusal(fields, architecture, what)
        source = find_model(architecture, model_type)
        if source is not None:
            return architecture, source
    try:
        known = read_architecture(fields, tuple(ARCHITECTURES))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; and transformers has no decoder of that name and model_type") from None
    raise CheckpointError(
        f"{fields.path}: model_type is {brief(model_type)}; transformers, which model_impl asks for, has no {known} of "
        "that type"
    )


def _refuse_others(architecture: str, source: ModelSource, fields: Fields) -> None:
    """Reject what would be computed wrong, or could not be computed.

    Raises:
        CheckpointError: the model is such.
    """
    values = fields.values
    if values.get("is_encoder_decoder") or values.get("add_cross_attention"):
        raise _refusal(fields, architecture, "an encoder-decoder")
    other = next((name for name in OTHER_PARTS if values.get(name)), None)
    if other is not None:
        raise _refusal(fields, architecture, f"a model with {other}, which takes more than text")
    layer_types = next((values[name] for name in source.names_of("layer_types") if values.get(name)), None)
    kinds = layer_types if isinstance(layer_types, list) else []
    other_kind = next((kind for kind in kinds if kind not in LAYER_TYPES), None)
    # Some models have layers of both kinds, or only of one.
    if source.has(r"\b_is_stateful = True") and (not kinds or other_kind is not None):
        raise _refusal(fields, architecture, "a model with layers of recurrent state (state space, linear attention)")
    if other_kind is not None:
        raise _refusal(fields, architecture, f"a model with layers of type {brief(other_kind)}")
    if values.get("kv_lora_rank"):
        raise _refusal(fields, architecture, "a model with latent attention (kv_lora_rank)")
    if not source.has(r"\bALL_ATTENTION_FUNCTIONS\b"):
        raise _refusal(fields, architecture, "a model whose attention cannot be replaced")
    reject_mlx(fields)
    mend = f"that is served only with families of our own, and {architecture} runs with transformers' code"
    modelopt = modelopt_config(fields)
    if algorithm := modelopt.values.get("quant_algo"):
        raise CheckpointError(f"{modelopt.path}: modelopt has quantised the weights ({brief(algorithm)}); {mend}")
    for name in ("quantization_config", "compression_config"):
        if values.get(name):
            raise CheckpointError(f"{fields.path}: {name} says that the weights are quantised; {mend}")
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.inner(name)
        kind = rope.values.get("rope_type", rope.values.get("type"))
        if kind in CHANGING_ROPE_TYPES:
            raise rope.error("rope_type" if "rope_type" in rope.values else "type", "one that does not change with the "
                             "longest sequence of a batch, as transformers computes it")  # fmt: skip


def _refusal(fields: Fields, architecture: str, what: str) -> CheckpointError:
    return CheckpointError(f"{fields.path}: {architecture} is {what}; {SERVED}")


def _integer(fields: Fields, name: str, own_default: object, high: int, default: int | None) -> int:
    """A positive integer; its default is the model's, then the one given."""
    fallback = own_default if type(own_default) is int else default
    return fields.integer(name, 1, high) if fallback is None else fields.integer(name, 1, high, fallback)
