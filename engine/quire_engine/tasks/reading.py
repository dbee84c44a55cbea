"""What a checkpoint offers besides generation, by its configuration and by what sentence-transformers stores beside it:
its `PoolingInfo`, and the layers that follow the pooling. Does not use torch.

::

    modules.json                        Transformer ─► Pooling ─► Dense … ─► Normalize
    1_Pooling/config.json               which hidden states become one
    2_Dense/config.json, model.safetensors
    sentence_bert_config.json           longest text, lower case
    config_sentence_transformers.json   prompts, similarity
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.config import CheckpointConfig, ServedCheckpoint
from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields, read_config
from quire_engine.models.checkpoints.files import brief, read_json, read_json_value
from quire_engine.models.options import HeadStep
from quire_engine.pooling import PoolingInfo, Similarity

MODES = {
    "cls": "CLS", "lasttoken": "LAST", "mean": "MEAN", "max": "MAX", "mean_sqrt_len": "MEAN_SQRT_LEN",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN", "weightedmean": "WEIGHTED_MEAN", "cls_token": "CLS", "mean_tokens": "MEAN",
    "max_tokens": "MAX", "weightedmean_tokens": "WEIGHTED_MEAN",
}  # fmt: skip
"""sentence-transformers' `pooling_mode`, and the endings of its older `pooling_mode_…` → pooling types."""
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid"}
"""Classes of torch → activations of `HeadStep`."""
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta", "albert")
)
TEXT_LIMIT = 1 << 16
"""Characters of a prompt, at most."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after the pooling."""

    folder: Path
    in_features: int
    step: HeadStep


@dataclass(slots=True)
class Modules:
    """What `modules.json` lists."""

    pooling_type: str | None = None
    """None: there is no pooling, and a row for each token."""
    dense: list[DenseModule] = field(default_factory=list)
    normalize: bool = False


def read_pooling_info(folder: Path, checkpoint: ServedCheckpoint) -> PoolingInfo:
    """Read what a checkpoint's folder says of pooling.

    Args:
        folder: the checkpoint, or its GGUF file.
        checkpoint: its configuration.

    Raises:
        CheckpointError: a file is malformed, or says what cannot be done.
    """
    if not folder.is_dir():
        return PoolingInfo(embedding_size=checkpoint.hidden_size)
    max_length, lower_case = _read_limits(folder)
    prompts, default_prompt_name, similarity = _read_prompts(folder)
    common = PoolingInfo(
        can_generate=checkpoint.can_generate, prompts=prompts, default_prompt_name=default_prompt_name,
        similarity=similarity, max_length=max_length, lower_case=lower_case,
        has_segments=_has_segments(checkpoint),
    )  # fmt: skip
    head = checkpoint.head
    if head is not None:
        tasks: tuple[str, ...] = ("classify",)
        if head.pooling_type in ("ALL", "STEP"):
            tasks = ("token_classify",)
        elif checkpoint.architecture.endswith("RewardModel"):
            tasks = ("token_classify", "classify")
        elif len(head.labels) == 1:
            tasks = ("score", "classify")
        return replace(
            common, tasks=tasks, pooling_type=head.pooling_type, normalize=False, labels=head.labels,
            activation=head.activation,
        )  # fmt: skip
    modules = read_modules(folder, checkpoint.hidden_size)
    if modules is None:
        modules = Modules("LAST" if checkpoint.is_causal else "MEAN", normalize=True)
    tasks = ("embed", "token_embed") if modules.pooling_type is not None else ("token_embed",)
    return replace(
        common, tasks=tasks, pooling_type=modules.pooling_type or "ALL", normalize=modules.normalize,
        embedding_size=modules.dense[-1].step.size if modules.dense else checkpoint.hidden_size,
        dimensions=_read_dimensions(folder),
    )  # fmt: skip


def _has_segments(checkpoint: ServedCheckpoint) -> bool:
    encoder = checkpoint.options.encoder if isinstance(checkpoint, CheckpointConfig) else None
    return encoder is not None and encoder.num_token_types > 1


def read_modules(folder: Path, hidden_size: int) -> Modules | None:
    """The modules of a sentence-transformers checkpoint; None if it has no `modules.json`.

    Args:
        folder: the checkpoint.
        hidden_size: of its model.

    Raises:
        CheckpointError: a module is not known, malformed, or out of place.
    """
    path = folder / "modules.json"
    if not os.path.lexists(path):
        return None
    modules, size = Modules(), hidden_size
    for number, (kind, place) in enumerate(_listed(path)):
        where = folder / place
        if (kind == "Transformer") != (number == 0):
            raise CheckpointError(f"{path}: module {number} is a {brief(kind)}; the first must be the only Transformer")
        if kind == "Pooling":
            if modules.pooling_type is not None or modules.dense:
                raise CheckpointError(
                    f"{path}: module {number} is a Pooling; it must be the only one, and before Dense"
                )
            modules.pooling_type = _read_mode(Fields(where / "config.json", read_json(where / "config.json")))
        elif kind == "Dense":
            dense = _read_dense(where, size)
            modules.dense.append(dense)
            size = dense.step.size
        elif kind == "Normalize":
            modules.normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise CheckpointError(
                f"{path}: module {number} is a {brief(kind)}; known are Transformer, Pooling, Dense and Normalize"
            )
    return modules


def _listed(path: Path) -> list[tuple[str, str]]:
    """The class and the folder of each module."""
    listed, found = read_json_value(path), []
    for one in listed if isinstance(listed, list) else [None]:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        is_inside = isinstance(place, str) and {"/", "\0"}.isdisjoint(place) and place not in (".", "..")
        if not isinstance(kind, str) or not isinstance(place, str) or not is_inside:
            raise CheckpointError(f"{path} must be a list of objects with a type, and with a path in the same folder")
        found.append((kind.rpartition(".")[2], place))
    return found


def _read_mode(fields: Fields) -> str:
    mode = fields.values.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else [
        name.removeprefix("pooling_mode_") for name, is_on in fields.values.items()
        if name.startswith("pooling_mode_") and is_on is True
    ]  # fmt: skip
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in MODES:
        raise CheckpointError(
            f"{fields.path}: its pooling modes are {brief(modes)}; there must be one, of {', '.join(MODES)}"
        )
    if not fields.boolean("include_prompt", True):
        raise fields.error("include_prompt", "true")
    return MODES[modes[0]]


def _read_dense(folder: Path, size: int) -> DenseModule:
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    if fields.integer("in_features", 1, MAX_SIZE) != size:
        raise fields.error("in_features", f"{size}, the size of what comes before")
    function = str(fields.values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = ACTIVATIONS.get(function.rpartition(".")[2].partition("(")[0])
    if activation is None:
        raise fields.error("activation_function", f"a class of torch.nn: {', '.join(ACTIVATIONS)}")
    step = HeadStep(
        name="linear", size=fields.integer("out_features", 1, MAX_SIZE), bias=fields.boolean("bias", True),
        activation=activation,
    )  # fmt: skip
    return DenseModule(folder, size, step)


def _read_limits(folder: Path) -> tuple[int | None, bool]:
    """Tokens of the longest text, if it is limited; and whether texts are lower-cased."""
    for name in TRANSFORMER_FILES:
        if os.path.lexists(folder / name):
            fields = Fields(folder / name, read_json(folder / name))
            is_lower = fields.boolean("do_lower_case", False)
            if fields.values.get("max_seq_length") is None:
                return _read_tokenizers_limit(folder), is_lower
            return fields.integer("max_seq_length", 1, MAX_POSITIONS), is_lower
    return None, False


def _read_tokenizers_limit(folder: Path) -> int | None:
    """The tokenizer's `model_max_length`, where sentence-transformers 6 stores the length of the longest text."""
    path = folder / "tokenizer_config.json"
    limit = read_json(path).get("model_max_length") if os.path.lexists(path) else None
    return limit if type(limit) is int and 0 < limit <= MAX_POSITIONS else None  # others stand for no limit


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None, str]:
    path = folder / "config_sentence_transformers.json"
    if not os.path.lexists(path):
        return {}, None, "cosine"
    fields = Fields(path, read_json(path))
    prompts = fields.inner("prompts").values
    if not all(isinstance(text, str) and len(text) <= TEXT_LIMIT for text in prompts.values()):
        raise fields.error("prompts", f"an object of texts of at most {TEXT_LIMIT} characters")
    default = fields.values.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise fields.error("default_prompt_name", "one of the names in prompts")
    return dict(prompts), default, fields.choice("similarity_fn_name", get_args(Similarity), "cosine")


def _read_dimensions(folder: Path) -> tuple[int, ...]:
    fields = read_config(folder)
    sizes = fields.values.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise fields.error("matryoshka_dimensions", "a list of sizes")
    return tuple(sorted(sizes))
