"""Reads adapters in PEFT's format (https://huggingface.co/docs/peft/developer_guides/checkpoint): a folder with
`adapter_config.json` and `adapter_model.safetensors`.

The folder is not trusted. Everything is checked before anything is computed with it, and what is not supported is
rejected by name: a part of an adapter is another adapter. Does not use torch: the frontend reads adapters, too.

A matrix W [N, K] of the model has two in the file, of rank r; their product is added to it::

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight     A  [r, K]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight     B  [N, r]         W + scaling · B · A

    scaling    lora_alpha / r, or lora_alpha / √r with rank-stabilised LoRA (https://arxiv.org/abs/2312.03732)

With DoRA (https://arxiv.org/abs/2402.09353) the rows of this sum have other norms, a factor for each::

    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector     [N]

Those of an embedding, V tokens of E features, are `lora_embedding_A`, [r, V], and `lora_embedding_B`, [E, r].

Experts are in the file one by one, as above; or all X of a layer together, where `target_parameters` names stacks of
transformers. Their names are those of the module; inside of the last stack, those before it are `base_layer`::

    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight    [X · r, K], by expert      gate_up_proj
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight    [N, r · X], by rank
    base_model.model.model.layers.0.mlp.experts.lora_A.weight               …                          down_proj

An embedding and a head may be in the file as a whole (`modules_to_save`); they replace the model's, of which they have
all tokens, or the first ones::

    base_model.model.model.embed_tokens.weight                         [V, E]
    base_model.model.lm_head.weight                                    [V, E]
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from quire_engine.adapters.config import CONFIG, AdapterConfig
from quire_engine.adapters.files import (
    PIECE,
    WEIGHTS,
    AdapterMatrix,
    check_finite,
    digest_of,
    parse_tensors,
    pause,
    read_files,
)
from quire_engine.errors import CheckpointError
from quire_engine.lora import AdaptableModules
from quire_engine.models.checkpoints.files import brief, parse_object

TABLES = frozenset(("embed_tokens", "lm_head"))
"""The model's names of the embedding and of the head."""
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""By transformers' name of a stack of all experts, in the order in which a module has them, its projections."""
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(?:lora_([AB])(?:\.default)?\.weight|lora_embedding_([AB])(?:\.default)?)"
)
_OF_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
"""PEFT writes the base's embedding or head beside LoRA of it."""
_TABLE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save)?(?:\.default)?\.weight")
_MAGNITUDE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_OTHERS = {
    "bias": "a bias",
    "modules_to_save": "a whole module (modules_to_save) that is neither the embedding nor the head",
    "original_module": "a whole module (modules_to_save) of the base",
}  # fmt: skip
"""Parts of tensors' names, and what they are."""


_T = TypeVar("_T")


class Runner(Protocol):
    """Calls a function, perhaps in another thread, and waits for its result."""

    def __call__(self, function: Callable[[], _T], /) -> _T: ...


def run_here(function: Callable[[], _T]) -> _T:
    """The `Runner` that calls it in its own thread."""
    return function()


def _all() -> slice:
    return slice(None)


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What an adapter adds to one layer: `scaling` · B · A."""

    scaling: float
    a: AdapterMatrix
    """[r, K]; of experts, one after the other, those of all, of which `a_rows` are this one's."""
    b: AdapterMatrix
    """[N, r]; of a fused layer or of experts those of all parts, of which `b_rows` and `b_columns` are this one's."""
    a_rows: slice = field(default_factory=_all)
    b_rows: slice = field(default_factory=_all)
    b_columns: slice = field(default_factory=_all)
    magnitude: AdapterMatrix | None = None
    """[N, 1], of which `b_rows` are this one's: with DoRA, the norms of the rows of W + `scaling` · B · A."""

    @property
    def rank(self) -> int:
        return len(range(*self.a_rows.indices(self.a.shape[0])))


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
    def read(
        cls, folder: Path, modules: AdaptableModules, max_rank: int, run_large: Runner = run_here
    ) -> "AdapterCheckpoint":
        """Read a folder and check everything in it. Pauses often, for other threads.

        Args:
            folder: the adapter's.
            modules: of the model.
            max_rank: the setting `max_lora_rank`.
            run_large: calls what takes as long as the file is large, nearly all of it without the interpreter's lock. A
                thread of low priority may do that. It should not do the rest: if it loses its core while it has the
                lock, all threads of the interpreter wait until it has a core again.

        Raises:
            CheckpointError: a file is missing or broken, does not fit the model, or asks for what is not supported.
        """
        config, weights = run_large(partial(read_files, folder, modules))
        digest = run_large(partial(digest_of, config, weights))
        tensors = dict(parse_tensors(folder / WEIGHTS, weights))
        found = cls.of(folder, config, tensors, digest, modules, max_rank)
        run_large(partial(check_finite, folder / WEIGHTS, weights, tensors))
        return found

    @classmethod
    def of(
        cls,
        folder: Path,
        config_file: bytes,
        tensors: Mapping[str, AdapterMatrix],
        digest: str,
        modules: AdaptableModules,
        max_rank: int,
    ) -> "AdapterCheckpoint":
        """The same of files that were read, whose numbers are not looked at; the folder is for messages."""
        path = folder / CONFIG
        config = AdapterConfig(path, parse_object(path, config_file))
        sorted_by_layer = _Modules(folder / WEIGHTS, config, modules, max_rank)
        found, tables = sorted_by_layer.of(tensors), sorted_by_layer.tables
        return cls(
            digest=digest,
            modules=found,
            tables=tables,
            num_bytes=sum(len(matrix.content) for matrix in tensors.values()),
            target_modules=sorted({name.rpartition(".")[2] for name in (*found, *tables)}),
        )


class _Modules:
    """Sorts an adapter's matrices by the model's layers; `tables` are those of the embedding and of the head."""

    def __init__(self, path: Path, config: AdapterConfig, modules: AdaptableModules, max_rank: int) -> None:
        self._path, self._config, self._modules, self._max_rank = path, config, modules, max_rank
        self.tables: dict[str, AdapterMatrix] = {}
        self._parameters: list[str] = []
        """Of `target_parameters`, by transformers' names, those that the adapter has matrices of."""
        self._magnitudes: dict[str, tuple[str, AdapterMatrix]] = {}
        """By transformers' name of a layer, those that no layer has taken."""

    def of(self, tensors: Mapping[str, AdapterMatrix]) -> dict[str, AdapterModule]:
        pairs: dict[str, dict[str, tuple[str, AdapterMatrix]]] = {}
        whole: list[str] = []
        bases = {}
        if self._config.is_dora and self._modules.why_not_dora:
            raise self._config.error("use_dora", f"must be false {self._modules.why_not_dora}")
        for tensor, matrix in tensors.items():
            if (match := _MAGNITUDE.fullmatch(tensor)) is not None:
                if not self._config.is_dora:
                    raise self._error(tensor, f"that is a magnitude of DoRA, and use_dora in {CONFIG} is not true")
                self._magnitudes[match[1]] = tensor, matrix
                continue
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
            if number % PIECE == 0:
                pause()
            for name, module in self._of_layer(layer, halves):
                if name in found or name in self.tables:
                    raise self._error(halves["A"][0], "another tensor changes the same layer")
                found[name] = module
        for tensor, _ in self._magnitudes.values():
            raise self._error(tensor, "that is a magnitude of DoRA, and there are no matrices beside it")
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
        for target in config.parameters:
            if not any(parameter == target or parameter.endswith(f".{target}") for parameter in self._parameters):
                raise CheckpointError(
                    f"{self._path}: it has no matrices of {brief(target)}, which target_parameters in {CONFIG} names"
                )
        return found

    def _of_layer(
        self, layer: str, halves: Mapping[str, tuple[str, AdapterMatrix]]
    ) -> Iterator[tuple[str, AdapterModule]]:
        config, modules = self._config, self._modules
        tensor = next(iter(halves.values()))[0]
        if len(halves) < 2:
            raise self._error(tensor, f"there is no lora_{'B' if 'A' in halves else 'A'} beside it")
        is_embedding = ".lora_embedding_" in tensor
        if not is_embedding and (stack := self._stack(layer, tensor)) is not None:
            yield from self._of_stack(*stack, halves)
            return
        parts, shapes = modules.parts(modules.named(layer)), modules.shapes
        if parts[0] in modules.tables and is_embedding == (parts[0] == "embed_tokens"):
            tokens, features = modules.tables[parts[0]]
            shapes = {parts[0]: (features, tokens) if is_embedding else (tokens, features)}
        missing = next((part for part in parts if part not in shapes or is_embedding != (part == "embed_tokens")), None)
        if missing is not None:
            if ".experts." in missing and modules.why_not_experts:
                raise self._error(tensor, f"LoRA of experts is not supported {modules.why_not_experts}")
            raise self._error(tensor, "this model has no such linear layer that an adapter can change")
        if config.is_dora and parts[0] in TABLES:
            raise self._error(tensor, "DoRA of the embedding or of the head is not supported")
        whole_rows = sum(shapes[part][0] for part in parts)
        magnitude = self._magnitude(layer, tensor, whole_rows)
        if not config.targets_layer(layer):
            if not config.targets_parameter(f"{layer}.weight"):
                raise self._error(tensor, f"target_modules and layers_to_transform in {CONFIG} leave that layer out")
            layer = f"{layer}.weight"
            self._parameters.append(layer)
        a, b = self._matrices(halves, layer, whole_rows, shapes[parts[0]][1])
        first, scaling = 0, config.scaling(layer)
        for part in parts:
            end = first + shapes[part][0]
            yield part, AdapterModule(scaling, a, b, b_rows=slice(first, end), magnitude=magnitude)
            first = end

    def _magnitude(self, layer: str, tensor: str, rows: int) -> AdapterMatrix | None:
        if not self._config.is_dora:
            return None
        if layer not in self._magnitudes:
            raise self._error(tensor, "there is no lora_magnitude_vector beside it, as use_dora asks for")
        name, matrix = self._magnitudes.pop(layer)
        if matrix.shape != (rows, 1):
            raise self._error(name, f"it has {matrix.shape[0] * matrix.shape[1]} numbers; the model asks for {rows}")
        return matrix

    def _stack(self, layer: str, tensor: str) -> tuple[str, str] | None:
        """Of a layer that is a stack of experts: transformers' name of the parameter, and the model's of the stack."""
        config, module, depth = self._config, layer, 0
        while module.endswith(".base_layer"):
            module, depth = module.removesuffix(".base_layer"), depth + 1
        name = self._modules.named(module)
        parent, _, last = name.rpartition(".")
        if parent.endswith(".experts") and last in STACKS:  # a module of its own
            own = [(f"{module}.weight", name)]
        elif last == "experts":
            own = [(f"{module}.{stack}", f"{name}.{stack}") for stack in STACKS]
        else:
            return None
        own = [one for one in own if config.targets_parameter(one[0])]
        if len(own) <= depth:
            raise self._error(tensor, f"target_parameters in {CONFIG} leaves that layer out")
        return own[-1 - depth]  # the first one is the innermost

    def _of_stack(
        self, parameter: str, stack: str, halves: Mapping[str, tuple[str, AdapterMatrix]]
    ) -> Iterator[tuple[str, AdapterModule]]:
        config, modules, (experts, _, last) = self._config, self._modules, stack.rpartition(".")
        parts, shapes = STACKS[last], modules.shapes
        tensor = halves["A"][0]
        if config.is_dora:
            raise self._error(tensor, "DoRA of stacks of experts is not supported")
        if f"{experts}.0.{parts[0]}" not in shapes:
            why = modules.why_not_experts
            why = f"LoRA of experts is not supported {why}" if why else "this model has no such stack of experts"
            raise self._error(tensor, why)
        number = next(i for i in itertools.count() if f"{experts}.{i}.{parts[0]}" not in shapes)
        each, columns = shapes[f"{experts}.0.{parts[0]}"]
        a, b = self._matrices(halves, parameter, each * len(parts), columns, number)
        self._parameters.append(parameter)
        rank, scaling = config.rank_of(parameter), config.scaling(parameter)
        for expert in range(number):
            for i, part in enumerate(parts):
                rows = slice(i * each, (i + 1) * each)
                if modules.are_experts_interleaved:
                    rows = slice(i, None, len(parts))
                yield (
                    f"{experts}.{expert}.{part}",
                    AdapterModule(
                        scaling, a, b, slice(expert * rank, (expert + 1) * rank), rows, slice(expert, None, number)
                    ),
                )

    def _matrices(
        self,
        halves: Mapping[str, tuple[str, AdapterMatrix]],
        name: str,
        rows: int,
        columns: int,
        number: int = 1,
    ) -> tuple[AdapterMatrix, AdapterMatrix]:
        """A and B of a layer, or of a number of experts, whose rank and shapes are checked."""
        rank = self._config.rank_of(name)
        if rank > self._max_rank:
            raise self._error(halves["A"][0], f"it has rank {rank}; max_lora_rank is {self._max_rank}")
        for half, shape in (("A", (number * rank, columns)), ("B", (rows, number * rank))):
            tensor, matrix = halves[half]
            if matrix.shape != shape:
                raise self._error(
                    tensor, f"it has shape {list(matrix.shape)}; the model and {CONFIG} ask for {list(shape)}"
                )
        return halves["A"][1], halves["B"][1]

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
