"""Reads adapters in PEFT's format (https://huggingface.co/docs/peft/developer_guides/checkpoint): a folder with
`adapter_config.json` and `adapter_model.safetensors`.

The folder is not trusted. Everything is checked before anything is computed with it, and what is not supported is
rejected by name: a part of an adapter is another adapter. Does not use torch: the frontend reads adapters, too.

A matrix W [N, K] of the model has two in the file, of rank r; their product is added to it::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     A  [r, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     B  [N, r]         W + scaling · B · A

    scaling    lora_alpha / r, or lora_alpha / √r with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732)

Those of an embedding, V tokens of E features, are `lora_embedding_A`, [r, V], and `lora_embedding_B`, [E, r].

An embedding and a head may be in the file as a whole (`modules_to_save`); they replace the model's, of which they have
all tokens, or the first ones::

    base_model.model.model.embed_tokens.weight                         [V, E]
    base_model.model.lm_head.weight                                    [V, E]
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from quire_engine.errors import CheckpointError
from quire_engine.lora import AdaptableModules
from quire_engine.models.checkpoints.files import MAX_JSON_BYTES, brief, open_regular, parse_object

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_RANK = 256
TABLES = frozenset(("embed_tokens", "lm_head"))
"""The model's names of the embedding and of the head."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PATTERN_SECONDS = 0.05
"""Timeout of one match of a configuration's regular expression: the match of a hostile one never ends."""
_DIGEST_BYTES = 1 << 20
_CHECKED_BYTES = 4 << 20
_PIECE = 32
"""Layers or matrices."""
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:lora_([AB])(?:\.default)?\.weight|lora_embedding_([AB])(?:\.default)?)"
)
_OF_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
"""PEFT writes the base's embedding or head beside LoRA of it."""
_TABLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save)?(?:\.default)?\.weight")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "fan_in_fan_out": (False,), "lora_bias": (False,),
    "trainable_token_indices": (), "layer_replication": ([],), "target_parameters": ([],),
    "use_qalora": (False,), "alora_invocation_tokens": ([],), "use_bdlora": (), "arrow_config": (),
    "is_prompt_learning": (False,), "monteclora_config": (), "lora_ga_config": (), "kasa_config": (),
}  # fmt: skip
"""Fields whose other values change what is computed in ways that are not supported; null is neutral for all but the
first."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_OTHERS = {
    "lora_magnitude_vector": "the magnitudes of DoRA", "bias": "a bias",
    "modules_to_save": "a whole module (modules_to_save) that is neither the embedding nor the head",
    "original_module": "a whole module (modules_to_save) of the base",
}  # fmt: skip
"""Parts of tensors' names, and what they are."""


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """A matrix of the file, of type F32, F16 or BF16."""

    dtype: str
    shape: tuple[int, int]
    content: memoryview


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What an adapter adds to one layer: `scaling` · B · A."""

    scaling: float
    a: AdapterMatrix
    """[r, K]"""
    b: AdapterMatrix
    """[N, r]; of a fused layer those of all parts, of which this one's begin at `first_row`."""
    first_row: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """An adapter whose files are read and checked."""

    digest: str
    modules: Mapping[str, AdapterModule]
    """By the model's name of the layer, of the embedding or of the head."""
    tables: Mapping[str, AdapterMatrix]
    """By the model's name, the embedding and the head that replace the model's."""
    num_bytes: int
    target_modules: list[str]

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules.values())

    @property
    def changes_tables(self) -> bool:
        """Whether it changes the embedding or the head, or replaces one."""
        return bool(self.tables) or not TABLES.isdisjoint(self.modules)

    @classmethod
    def read(cls, folder: Path, modules: AdaptableModules, max_rank: int) -> "AdapterCheckpoint":
        """Read a folder and check everything in it.

        Args:
            folder: the adapter's.
            modules: of the model.
            max_rank: the setting `max_lora_rank`.

        Raises:
            CheckpointError: a file is missing or broken, does not fit the model, or asks for what is not supported.
        """
        config, weights = read_files(folder, modules)
        return cls.parse(folder, config, weights, digest_of(config, weights), modules, max_rank)

    @classmethod
    def parse(
        cls,
        folder: Path,
        config_file: bytes,
        weights_file: memoryview,
        digest: str,
        modules: AdaptableModules,
        max_rank: int,
        pause: Callable[[], None] = lambda: None,
    ) -> "AdapterCheckpoint":
        """The same of files that were read, to whose content the result refers; the folder is for messages. `pause` is
        called between pieces of about a millisecond."""
        path = folder / CONFIG
        config = _Config(path, parse_object(path, config_file))
        tensors = dict(_parse_tensors(folder / WEIGHTS, weights_file))
        sorted_by_layer = _Modules(folder / WEIGHTS, config, modules, max_rank)
        found, tables = sorted_by_layer.of(tensors, pause), sorted_by_layer.tables
        for number, (name, matrix) in enumerate(tensors.items()):
            if number % _PIECE == 0:
                pause()
            _check_finite(f"{folder / WEIGHTS}: tensor {name}", matrix, pause)
        return cls(
            digest=digest,
            modules=found,
            tables=tables,
            num_bytes=sum(len(matrix.content) for matrix in tensors.values()),
            target_modules=sorted({name.rpartition(".")[2] for name in (*found, *tables)}),
        )


def read_files(folder: Path, modules: AdaptableModules) -> tuple[bytes, memoryview]:
    """The content of an adapter's two files. Raises CheckpointError if one is missing or too large for the model."""
    if not os.path.isdir(folder):  # also false where the system rejects the name, or access
        raise CheckpointError(f"{folder}: there is no such folder; lora_path must name the folder of an adapter")
    with open_regular(folder / CONFIG) as file:
        config = file.read(MAX_JSON_BYTES + 1)
    if not os.path.lexists(folder / WEIGHTS) and os.path.lexists(folder / PICKLE):
        raise CheckpointError(
            f"{folder}: there is no {WEIGHTS}; {PICKLE} is a pickle, which is not read: save the adapter with "
            "save_pretrained(…, safe_serialization=True)"
        )
    most = 8 + MAX_JSON_BYTES + sum(4 * MAX_RANK * (rows + columns) for rows, columns in modules.shapes.values())
    for tokens, features in modules.tables.values():
        most += 4 * tokens * features + 4 * MAX_RANK * (tokens + features)
    with open_regular(folder / WEIGHTS) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(
                f"{folder / WEIGHTS}: it has {size} bytes; LoRA of rank {MAX_RANK} of all layers has less than {most}"
            )
        content = np.empty(size, dtype=np.uint8).data  # filled without the interpreter's lock
        number: int = file.readinto(content)  # type: ignore[attr-defined]  # it may have become shorter meanwhile
        return config, content[:number]


def digest_of(config: bytes, weights: memoryview) -> str:
    """SHA-256 of an adapter's two files, in hexadecimal. Other threads run meanwhile."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    view = memoryview(weights)
    for start in range(0, len(view), _DIGEST_BYTES):  # a signal, or a shutdown, need not wait for all of it
        digest.update(view[start : start + _DIGEST_BYTES])
    return digest.hexdigest()


class _Config:
    """The fields of `adapter_config.json` that count."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self._values = path, values
        for name, allowed in _NEUTRAL.items():
            value = values.get(name)
            if value not in allowed and not (value is None and name != "peft_type") and value not in ([], {}):
                wanted = " or ".join(repr(one) for one in allowed) or "unset"
                raise self.error(name, f"must be {wanted}: other adapters are not supported")
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            raise self.error(
                "init_lora_weights",
                "changes the base's weights, too: save the adapter with path_initial_model_for_weight_conversion",
            )
        self.rank = self._integer("r", values.get("r"))
        self.alpha = self._number("lora_alpha", values.get("lora_alpha", 8))
        self.is_stabilized = values.get("use_rslora") or False
        if not isinstance(self.is_stabilized, bool):
            raise self.error("use_rslora", "must be true or false")
        self.ranks = {key: self._integer("rank_pattern", one) for key, one in self._patterns("rank_pattern")}
        self.alphas = {key: self._number("alpha_pattern", one) for key, one in self._patterns("alpha_pattern")}
        self.targets = values.get("target_modules")
        is_list = isinstance(self.targets, list) and all(isinstance(one, str) and one for one in self.targets)
        if not self.targets or not (isinstance(self.targets, str) or is_list):
            raise self.error("target_modules", "must be a list of names, a regular expression, or 'all-linear'")
        self.saved = values.get("modules_to_save") or []
        if not isinstance(self.saved, list) or not all(isinstance(one, str) and one for one in self.saved):
            raise self.error("modules_to_save", "must be a list of names")
        self.ties_tables = values.get("ensure_weight_tying") is True
        layers = values.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
        if layers is not None and not (isinstance(layers, list) and all(type(one) is int for one in layers)):
            raise self.error("layers_to_transform", "must be a list of layers' numbers")
        self.layers: list[int] | None = layers or None
        if self.layers is not None and isinstance(self.targets, str):
            raise self.error("layers_to_transform", "must be unset where target_modules is no list, as in PEFT")

    def scaling(self, name: str) -> float:
        """The scale of a layer, by transformers' name."""
        alpha, rank = self._of_pattern(self.alphas, name, self.alpha), self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)

    def rank_of(self, name: str) -> int:
        return int(self._of_pattern(self.ranks, name, self.rank))

    def targets_layer(self, name: str) -> bool:
        """Whether `target_modules` means a layer."""
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return self._matches(self.targets, name, "target_modules")
        if not any(name == one or name.endswith(f".{one}") for one in self.targets or ()):
            return False
        if self.layers is None:
            return True
        number = re.search(r"\.(?:layers|layer|h|blocks)\.(\d+)\.", f".{name}")
        return number is not None and int(number[1]) in self.layers

    def error(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {brief(self._values.get(name))}; it {rule}")

    def _of_pattern(self, patterns: Mapping[str, float], name: str, default: float) -> float:
        """As PEFT finds it: the first pattern that the end of the name matches."""
        for pattern, value in patterns.items():
            if self._matches(rf"(.*\.)?({pattern})", name, "rank_pattern or alpha_pattern"):
                return value
        return default

    def _matches(self, pattern: str, name: str, field: str) -> bool:
        try:
            return regex.fullmatch(pattern, name, timeout=PATTERN_SECONDS) is not None
        except TimeoutError:
            raise CheckpointError(f"{self.path}: {field} has {brief(pattern)}, which takes too long to match") from None
        except (regex.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{self.path}: {field} has {brief(pattern)}: {error}") from None

    def _patterns(self, name: str) -> list[tuple[str, Any]]:
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return list(value.items())

    def _integer(self, name: str, value: Any) -> int:
        if type(value) is not int or not value >= 1:
            raise self.error(name, "must have integers of at least 1" if "pattern" in name else "must be 1 or more")
        return value

    def _number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e9:
            raise self.error(name, f"must {'have numbers' if 'pattern' in name else 'be a number'} below 1e9")
        return float(value)


class _Modules:
    """Sorts an adapter's matrices by the model's layers; `tables` are those of the embedding and of the head."""

    def __init__(self, path: Path, config: _Config, modules: AdaptableModules, max_rank: int) -> None:
        self._path, self._config, self._modules, self._max_rank = path, config, modules, max_rank
        self.tables: dict[str, AdapterMatrix] = {}

    def of(self, tensors: Mapping[str, AdapterMatrix], pause: Callable[[], None]) -> dict[str, AdapterModule]:
        pairs: dict[str, dict[str, tuple[str, AdapterMatrix]]] = {}
        whole: list[str] = []
        bases = {}
        for tensor, matrix in tensors.items():
            if (match := _OF_BASE.fullmatch(tensor)) is not None:
                bases[match[1]] = tensor
                continue
            match = _TENSOR.fullmatch(tensor)
            if match is None:
                whole.append(self._add_table(tensor, matrix))
                continue
            layer, half = match[1], match[2] or match[3]
            if half in pairs.setdefault(layer, {}):
                raise self._error(tensor, f"there is another lora_{half} of the same layer")
            pairs[layer][half] = tensor, matrix
        if not pairs:
            raise CheckpointError(f"{self._path}: it holds no LoRA matrices")
        found: dict[str, AdapterModule] = {}
        for number, (layer, halves) in enumerate(pairs.items()):
            if number % _PIECE == 0:
                pause()
            for name, module in self._of_layer(layer, halves):
                if name in found or name in self.tables:
                    raise self._error(halves["A"][0], "another tensor changes the same layer")
                found[name] = module
        for layer, tensor in bases.items():
            if layer not in pairs or self._modules.named(layer) not in TABLES:
                raise self._error(tensor, self._what(tensor))
        config = self._config
        if config.ties_tables and self._modules.are_tied and not TABLES.isdisjoint(found):
            raise config.error("ensure_weight_tying", "must be false with LoRA of the embedding or of the head")
        for name in config.saved:
            if not any(layer == name or layer.endswith(f".{name}") for layer in whole):
                raise config.error(
                    "modules_to_save", f"names {brief(name)}, which is not in {WEIGHTS}; it may name "
                    f"{' and '.join(self._modules.tables) or 'no module of this model'}"
                )  # fmt: skip
        if config.ties_tables and self._modules.are_tied and self.tables:
            own = next(iter(self.tables.values()))
            self.tables = {name: self.tables.get(name, own) for name in self._modules.tables}
        for target in config.targets if isinstance(config.targets, list) else ():
            if not any(layer == target or layer.endswith(f".{target}") for layer in pairs):
                raise CheckpointError(
                    f"{self._path}: it has no matrices of {brief(target)}, which target_modules in {CONFIG} names"
                )
        return found

    def _of_layer(
        self, layer: str, halves: Mapping[str, tuple[str, AdapterMatrix]]
    ) -> Iterator[tuple[str, AdapterModule]]:
        config, modules = self._config, self._modules
        tensor = next(iter(halves.values()))[0]
        if len(halves) < 2:
            raise self._error(tensor, f"there is no lora_{'B' if 'A' in halves else 'A'} beside it")
        parts, shapes = modules.parts(modules.named(layer)), modules.shapes
        is_embedding = ".lora_embedding_" in tensor
        if parts[0] in modules.tables and is_embedding == (parts[0] == "embed_tokens"):
            tokens, features = modules.tables[parts[0]]
            shapes = {parts[0]: (features, tokens) if is_embedding else (tokens, features)}
        missing = next((part for part in parts if part not in shapes or is_embedding != (part == "embed_tokens")), None)
        if missing is not None:
            if ".experts." in missing:
                raise self._error(tensor, "LoRA of experts is not supported; leave them out of target_modules")
            raise self._error(tensor, "this model has no such linear layer that an adapter can change")
        if not config.targets_layer(layer):
            raise self._error(tensor, f"target_modules and layers_to_transform in {CONFIG} leave that layer out")
        (_, a), (tensor_b, b) = halves["A"], halves["B"]
        rows, columns = sum(shapes[part][0] for part in parts), shapes[parts[0]][1]
        rank = config.rank_of(layer)
        if rank > self._max_rank:
            raise self._error(tensor, f"it has rank {rank}; max_lora_rank is {self._max_rank}")
        for name, matrix, shape in ((halves["A"][0], a, (rank, columns)), (tensor_b, b, (rows, rank))):
            if matrix.shape != shape:
                raise self._error(
                    name, f"it has shape {list(matrix.shape)}; the model and {CONFIG} ask for {list(shape)}"
                )
        first, scaling = 0, config.scaling(layer)
        for part in parts:
            yield part, AdapterModule(scaling, a, b, first)
            first += shapes[part][0]

    def _add_table(self, tensor: str, matrix: AdapterMatrix) -> str:
        """Returns transformers' name of the module."""
        match, tables = _TABLE.fullmatch(tensor), self._modules.tables
        name = "" if match is None else self._modules.named(match[1])
        if match is None or name not in tables:
            raise self._error(tensor, self._what(tensor))
        if name in self.tables:
            raise self._error(tensor, f"another tensor replaces {name}, too")
        (num_tokens, size), shape = tables[name], matrix.shape
        if shape[1] != size:
            raise self._error(tensor, f"it has shape {list(shape)}; the model asks for {size} columns")
        if shape[0] > num_tokens:
            raise self._error(
                tensor, f"it has {shape[0]} tokens, and the model's vocabulary {num_tokens}: tokens that an adapter "
                "adds must fit into the base's vocabulary"
            )  # fmt: skip
        self.tables[name] = matrix
        return match[1]

    def _what(self, tensor: str) -> str:
        for part, what in _OTHERS.items():
            if part in tensor.split("."):
                return f"that is {what}, which is not supported"
        return "that is no matrix of LoRA (lora_A or lora_B)"

    def _error(self, tensor: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {brief(tensor)}: {why}")


def _parse_tensors(path: Path, content: memoryview) -> Iterator[tuple[str, AdapterMatrix]]:
    """The matrices of a safetensors file (drawn in `models/checkpoints/safetensors.py`). Tensors cover the data without
    gaps and do not overlap."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise CheckpointError(f"{path}: truncated or not a safetensors file; it ends within its header")
    header = parse_object(path, bytes(content[8 : 8 + size]))
    header.pop("__metadata__", None)
    data, end = memoryview(content)[8 + size :], 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if dtype not in ITEM_BYTES:
                kinds = ", ".join(ITEM_BYTES)
                raise CheckpointError(f"{path}: tensor {brief(name)} is {brief(dtype)}; it must be one of {kinds}")
            if len(shape) != 2 or not all(type(one) is int and one > 0 for one in shape):
                what = "which must have two sizes above 0"
                raise CheckpointError(f"{path}: tensor {brief(name)} has shape {brief(shape)}, {what}")
            if first != end or last - first != shape[0] * shape[1] * ITEM_BYTES[dtype] or last > len(data):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file; tensor {brief(name)} is at {first} to {last} of "
                    f"{len(data)} bytes"
                )
            yield name, AdapterMatrix(dtype, (shape[0], shape[1]), data[first:last])
            end = last
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a safetensors file; its header has an entry that cannot be read") from None
    if end != len(data):
        raise CheckpointError(f"{path}: not a safetensors file; its header speaks of {end} of {len(data)} bytes")


def _check_finite(where: str, matrix: AdapterMatrix, pause: Callable[[], None]) -> None:
    for start in range(0, len(matrix.content), _CHECKED_BYTES):
        if start:
            pause()
        values: npt.NDArray[Any]
        content = matrix.content[start : start + _CHECKED_BYTES]
        if matrix.dtype == "BF16":  # numpy has no such type: all bits of the exponent are set
            values = np.frombuffer(content, dtype=np.uint16)
            is_finite = not ((values & 0x7F80) == 0x7F80).any()
        else:
            values = np.frombuffer(content, dtype=np.float32 if matrix.dtype == "F32" else np.float16)
            is_finite = bool(np.isfinite(values).all())
        if not is_finite:
            raise CheckpointError(f"{where}: it holds a value that is not finite; weights must be finite numbers")
