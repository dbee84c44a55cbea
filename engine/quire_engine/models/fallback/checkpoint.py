"""Reads the `config.json` of a decoder that runs with transformers' own modelling code, or says why it cannot.

What is read of the installed transformers is its source: importing it takes seconds and torch.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.config import ServedCheckpoint, read_architecture, read_eos_token_ids
from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.checkpoints.files import brief
from quire_engine.models.checkpoints.weight_format import modelopt_config, reject_mlx
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.system.extras import package_folder

SERVED = (
    "with transformers' own code decoders are served whose layers keep keys and values alone, and whose attention is "
    "called through transformers' attention interface"
)
"""The end of every rejection."""
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
"""Values of `layer_types`; others keep something else than keys and values, or are no causal attention."""
OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "text_config")
"""Fields of models that take more than text."""
CHANGING_ROPE_TYPES = ("dynamic", "longrope")
"""transformers turns these by the longest sequence of a batch."""
CAUSAL_LM = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Two files of transformers: a model's code, and its configuration's."""

    modeling: str
    """The text of the first."""
    attribute_map: Mapping[str, str]
    """The usual name of a field of `config.json` → the name that it has in this model's."""
    defaults: Mapping[str, Any]
    """By the name in this model's `config.json`; fields without a plain default are left out."""

    def names_of(self, name: str) -> list[str]:
        """The names that a field of `config.json` may have in this model's, its own first."""
        own = self.attribute_map.get(name, name)
        return [own, name, *(alias for alias, field in self.attribute_map.items() if field == own)]

    def has(self, pattern: str) -> bool:
        """Whether the code has this regular expression somewhere."""
        return re.search(pattern, self.modeling) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersCheckpoint(ServedCheckpoint):
    """A checkpoint of an architecture that transformers has the code of. Its code routes tokens to experts and does not
    say where to."""

    num_layers: int

    @classmethod
    def from_fields(cls, folder: Path, fields: Fields) -> "TransformersCheckpoint":
        """Check that transformers has the model, and that our attention can take the place of its own; else raise
        CheckpointError. The folder is for `generation_config.json`."""
        architecture, source = _find(fields)
        _reject_others(architecture, source, fields)

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
    def windows(self) -> tuple[int | None, ...]:
        """The cache keeps all keys: which layers have a window is only known when the model is loaded."""
        return (None,) * self.num_layers

    def check_parallel(
        self, tensor_parallel_size: int, pipeline_parallel_size: int = 1, enable_expert_parallel: bool = False
    ) -> None:
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
                raise _rejection(fields, architecture, what)
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


def _reject_others(architecture: str, source: ModelSource, fields: Fields) -> None:
    """Reject what would be computed wrong, or could not be computed."""
    values = fields.values
    if values.get("is_encoder_decoder") or values.get("add_cross_attention"):
        raise _rejection(fields, architecture, "an encoder-decoder")
    other = next((name for name in OTHER_PARTS if values.get(name)), None)
    if other is not None:
        raise _rejection(fields, architecture, f"a model with {other}, which takes more than text")
    layer_types = next((values[name] for name in source.names_of("layer_types") if values.get(name)), None)
    kinds = layer_types if isinstance(layer_types, list) else []
    other_kind = next((kind for kind in kinds if kind not in LAYER_TYPES), None)
    # Some models have layers of both kinds, or only of one.
    if source.has(r"\b_is_stateful = True") and (not kinds or other_kind is not None):
        raise _rejection(fields, architecture, "a model with layers of recurrent state (state space, linear attention)")
    if other_kind is not None:
        raise _rejection(fields, architecture, f"a model with layers of type {brief(other_kind)}")
    if values.get("kv_lora_rank"):
        raise _rejection(fields, architecture, "a model with latent attention (kv_lora_rank)")
    if not source.has(r"\bALL_ATTENTION_FUNCTIONS\b"):
        raise _rejection(fields, architecture, "a model whose attention cannot be replaced")
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


def _rejection(fields: Fields, architecture: str, what: str) -> CheckpointError:
    return CheckpointError(f"{fields.path}: {architecture} is {what}; {SERVED}")


def _integer(fields: Fields, name: str, own_default: object, high: int, default: int | None) -> int:
    """A positive integer; its default is the model's, then the one given."""
    fallback = own_default if type(own_default) is int else default
    return fields.integer(name, 1, high) if fallback is None else fields.integer(name, 1, high, fallback)


def class_of(model_type: str) -> str | None:
    """The class that computes transformers' causal language model of a `model_type`; None if it has none."""
    return dict(_mapping(CAUSAL_LM)).get(model_type)


def find_model(architecture: str, model_type: str) -> ModelSource | None:
    """The source of a class that transformers calls a causal language model of this type; None if it has none such."""
    types = [one for one, name in _mapping(CAUSAL_LM) if name == architecture]
    if model_type not in types:
        return None
    # A few types are one model's in the folder of another: of its text part, or with nothing but a new name.
    names = [name.replace("-", "_") for name in (model_type, model_type.removesuffix("_text"), *types)]
    modelings, configurations = (
        [path for name in names if (path := _models() / name / f"{kind}_{name}.py").is_file()]
        for kind in ("modeling", "configuration")
    )
    if not modelings or not configurations:
        return None
    return ModelSource(modelings[0].read_text("utf-8"), *_config_class(configurations[0], model_type))


def is_listed(architecture: str, kind: str) -> bool:
    """Whether transformers has a model among those of a kind of `models/auto/modeling_auto.py`, such as
    `SEQ_TO_SEQ_CAUSAL_LM`."""
    return any(name == architecture for _, name in _mapping(f"MODEL_FOR_{kind}_MAPPING_NAMES"))


def _models() -> Path:
    folder = package_folder("transformers")
    assert folder is not None
    return folder / "models"


def _mapping(name: str) -> list[tuple[str, str]]:
    """Model types and classes of a mapping of `models/auto/modeling_auto.py`."""
    source = (_models() / "auto" / "modeling_auto.py").read_text("utf-8")
    found = re.search(rf"^{name} = OrderedDict\((.*?)^\)", source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"transformers has no {name}"
    pairs: list[tuple[str, str | tuple[str, ...]]] = ast.literal_eval(found[1].strip())
    return [(kind, one) for kind, names in pairs for one in ([names] if isinstance(names, str) else names)]


def _config_class(path: Path, model_type: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The attribute map and the plain defaults of the class for a model type, or of the file's first."""
    classes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    values = [_class_values(node) for node in classes]
    chosen = next((one for one in values if one.get("model_type") == model_type), values[0] if values else {})
    return chosen.get("attribute_map") or {}, chosen


def _class_values(node: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                continue
        try:
            values[name] = ast.literal_eval(value)
        except ValueError:  # an expression
            continue
    return values
