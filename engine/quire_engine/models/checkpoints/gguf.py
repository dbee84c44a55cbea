"""GGUF files, whole or split (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

::

    | GGUF, version, numbers of tensors and values | metadata | name, shape, type, offset of each tensor | … | tensors |

A header is not trusted. Each length in it is compared with the file's before anything of that size is read or made.
Does not use torch until a tensor is read.
"""

import functools
import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import CheckpointReader, StoredTensor, release_view
from quire_engine.models.checkpoints.files import brief, open_regular
from quire_engine.models.checkpoints.gguf_metadata import Metadata
from quire_engine.models.checkpoints.gguf_states import mixed_heads, restored
from quire_engine.models.checkpoints.gguf_types import ARRAY, BLOCKS, FORMATS, STRING, TYPES, Array

if TYPE_CHECKING:
    import torch

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Names of types that are not read, for messages."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_HEADER_BYTES = 64 << 20
"""Those of the largest vocabularies have a quarter of it."""
MAX_STRINGS = 2 << 20
"""Strings of all arrays of a header together; the largest real ones have a third of it."""
MAX_ENTRIES = 1 << 16
"""Values, or tensors, of a header; real ones have some thousands."""


class _Entry(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    """The last dimension of quantised ones is in bytes."""
    offset: int
    """From the file's start."""
    num_bytes: int


class _Header(NamedTuple):
    metadata: dict[str, Any]
    """Scalars, strings and `Array`s."""
    tensors: dict[str, _Entry]
    num_bytes: int
    """Where the tensors begin."""


class GgufReader(AbstractContextManager[CheckpointReader]):
    """A `CheckpointReader` of a GGUF file, or of the files that a model is split into, of which the path names one."""

    format_name = "GGUF"
    config_name = "its metadata"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: dict[Path, torch.Tensor] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mapped.clear()

    @cached_property
    def _headers(self) -> dict[Path, _Header]:
        first = _read_header(self.path)
        count = first.metadata.get("split.count", 0)
        if count in (0, 1):
            return {self.path: first}
        named = SPLIT.fullmatch(self.path.name)
        if named is None or int(named[3]) != count:
            raise CheckpointError(
                f"{self.path}: it is one of {brief(count)} files of a model, whose names must end in "
                f"-00001-of-{count:05}.gguf and so on"
            )
        paths = [self.path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in range(1, count + 1)]
        headers = {}
        for number, path in enumerate(paths):
            header = headers[path] = _read_header(path)
            if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number, count):
                raise CheckpointError(f"{path}: its metadata does not say that it is file {number + 1} of {count}")
        return headers

    def weight_files(self) -> dict[Path, int]:
        return {path: header.num_bytes for path, header in self._headers.items()}

    @cached_property
    def _entries(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for path, header in self._headers.items():
            if twice := entries.keys() & header.tensors.keys():
                raise CheckpointError(f"{path}: tensor {brief(min(twice))} is in another of its files as well")
            entries |= header.tensors
        return entries

    @cached_property
    def _metadata(self) -> Metadata:
        path, header = next(iter(self._headers.items()))
        stored = {
            name: StoredTensor(name, one.dtype, one.shape, one.num_bytes, one.path, self)
            for name, one in self._entries.items()
        }
        return Metadata(path, header.metadata, stored, self._read_floats)

    def config(self) -> tuple[Path, dict[str, Any]]:
        quantised = {
            name.removesuffix(".weight"): tensor for name, tensor in self.tensors.items() if tensor.dtype in BLOCKS
        }
        types = {name: tensor.dtype for name, tensor in quantised.items()}
        heads = {name: mixed_heads(self._metadata, tensor) for name, tensor in quantised.items()}
        fields = self._metadata.config()
        if fields["tie_word_embeddings"] and "embed_tokens" in types:
            types["lm_head"] = types["embed_tokens"]
        quantization = {"types": types, "mixed_heads": {name: own for name, own in heads.items() if own is not None}}
        return self.path, {**fields, "quantization_config": {"quant_method": "gguf", **quantization}}

    def tokenizer(self) -> Mapping[str, Any]:
        return self._metadata.tokenizer()

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._metadata.tensors()

    def read(self, tensor: StoredTensor, inside: tuple[slice | int, ...], matrix: int | None = None) -> "torch.Tensor":
        if tensor.companions:
            return self._joined_heads(tensor)[inside]
        matrix = tensor.matrix if matrix is None else matrix
        whole = self._whole(tensor.name)
        if matrix is not None:
            whole = whole[matrix]
        elif whole.dim() != len(tensor.shape):
            whole = whole.reshape(-1, *tensor.shape[1:])
        heads = self._metadata.interleaved_heads(tensor.name)
        if heads is None:
            return restored(self._metadata, tensor, whole)[inside]
        # llama.cpp has the rows that are rotated together side by side; here one is in each half of a head.
        halves = whole.view(heads, -1, 2, *whole.shape[1:]).transpose(1, 2)
        piece: torch.Tensor = halves.reshape(whole.shape)[inside]
        self.release(whole)
        return piece

    def release(self, piece: "torch.Tensor") -> None:
        addresses = [(whole.data_ptr(), whole.data_ptr() + whole.numel()) for whole in self._mapped.values()]
        if any(begin <= piece.data_ptr() < end for begin, end in addresses):
            release_view(piece)

    def _whole(self, name: str) -> "torch.Tensor":
        import torch

        entry = self._entries[name]
        if entry.path not in self._mapped:
            size = entry.path.stat().st_size
            self._mapped[entry.path] = torch.from_file(os.fspath(entry.path), size=size, dtype=torch.uint8)
        flat = self._mapped[entry.path][entry.offset : entry.offset + entry.num_bytes]
        if len(flat) < entry.num_bytes:
            raise CheckpointError(f"{entry.path}: truncated while it was read")
        names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
        return flat.view(names.get(entry.dtype, torch.uint8)).view(entry.shape)

    def _joined_heads(self, joined: StoredTensor) -> "torch.Tensor":
        """`kv_b_proj` of latent attention, [H * (N + V), C], of each head's keys, [H, C, N], and values, [H, V, C]."""
        import torch

        from quire_engine.models.checkpoints.gguf_blocks import dequantize

        keys_HCN, values_HVC = (
            dequantize(self._whole(one.name).flatten(0, 1), one.dtype).view(*one.shape[:2], -1)
            for one in (joined.companions[name] for name in ("keys", "values"))
        )
        parts = (keys_HCN.transpose(1, 2), values_HVC)
        if len({(part.shape[0], part.shape[2]) for part in parts}) > 1:
            raise CheckpointError(f"{joined.path}: tensor {joined.name} does not fit attn_v_b beside it")
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _read_floats(self, tensor: StoredTensor) -> list[float]:
        if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ENTRIES:
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} of shape {tensor.shape}; it must be a short "
                "vector of F32"
            )
        with open_regular(tensor.path) as file:
            file.seek(self._entries[tensor.name].offset)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))


def _read_header(path: Path) -> _Header:
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
    return _cached_header(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _cached_header(path: Path, identity: tuple[int, ...]) -> _Header:
    """The header is read several times on the way to a model; a large vocabulary takes some 100 ms."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise CheckpointError(f"{path}: truncated; it has {size} bytes")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, size, identity[-1]).header()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap, size: int, changed_at: int) -> None:
        self.path, self.data, self.size, self.changed_at = path, data, size, changed_at
        self.limit, self.at = min(size, MAX_HEADER_BYTES), 0
        self.num_strings = 0

    def header(self) -> _Header:
        if self.take(4) != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file; it does not begin with GGUF")
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            is_big = version > 0 and version & 0xFFFF == 0
            reason = "it is big-endian" if is_big else f"it has version {version}"
            raise CheckpointError(f"{self.path}: {reason}; versions 2 and 3, little-endian, are read")
        for name, number in (("tensors", num_tensors), ("values", num_values)):
            if number > MAX_ENTRIES:
                raise self.error(f"speaks of {number} {name}; at most {MAX_ENTRIES} are read")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.string()
            if key in metadata:
                raise self.error(f"has {brief(key)} twice")
            metadata[key] = self.value(self.number("I"))
        infos = [self.info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ENTRIES or alignment & (alignment - 1):
            raise self.error(f"has the alignment {brief(alignment)}; it must be a power of 2 from 8 to {MAX_ENTRIES}")
        start = -(-self.at // alignment) * alignment
        return _Header(metadata, self.entries(infos, start, alignment), start)

    def entries(self, infos: list[tuple[str, _Entry]], start: int, alignment: int) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for name, entry in infos:
            if name in entries:
                raise self.error(f"has the tensor {brief(name)} twice")
            if entry.offset % alignment:
                raise self.error(f"has the tensor {brief(name)} at {entry.offset}, no multiple of {alignment}")
            entries[name] = entry._replace(offset=start + entry.offset)
        end, before = start, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            if entry.offset < end:
                raise self.error(f"has the tensor {brief(name)} begin within {before}")
            end, before = entry.offset + entry.num_bytes, f"tensor {brief(name)}"
            if end > self.size:
                raise CheckpointError(
                    f"{self.path}: truncated; it has {self.size} bytes, and the tensor {brief(name)} ends at {end}"
                )
        return entries

    def info(self) -> tuple[str, _Entry]:
        name, num_dimensions = self.string(), self.number("I")
        if not 1 <= num_dimensions <= 4:
            raise self.error(f"has the tensor {brief(name)} of {num_dimensions} dimensions; from 1 to 4 are read")
        sizes = [self.number("Q") for _ in range(num_dimensions)]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TYPES:
            known = ", ".join(one for one, *_ in TYPES.values())
            raise self.error(f"has the tensor {brief(name)} of type {OTHER_TYPES.get(kind, kind)}; {known} are read")
        dtype, numbers, size = TYPES[kind]
        if 0 in sizes or math.prod(sizes) * size > self.size * numbers:
            raise self.error(f"has the tensor {brief(name)} of shape {sizes}, which the file is too short for")
        if sizes[0] % numbers:
            raise self.error(f"has the tensor {brief(name)} with rows of {sizes[0]}; {dtype} has blocks of {numbers}")
        if numbers > 1:
            sizes[0] = sizes[0] // numbers * size
        num_bytes = math.prod(sizes) * (size if numbers == 1 else 1)
        return name, _Entry(self.path, dtype, tuple(sizes[::-1]), offset, num_bytes)

    def value(self, kind: int) -> Any:
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.error(f"has a value of type {kind}, which there is not")
        kind, count = self.number("I"), self.number("Q")
        begin = self.at
        if kind == STRING:
            self.num_strings += count
            if self.num_strings > MAX_STRINGS:
                raise self.error(f"speaks of {self.num_strings} strings; at most {MAX_STRINGS} are read")
            self.skip_strings(count)
        elif kind in FORMATS:
            self.skip(count * struct.calcsize(FORMATS[kind]))
        else:
            raise self.error(f"has an array of type {kind}, which is not read")
        return Array(self.path, self.changed_at, kind, count, begin, self.at)

    def skip_strings(self, count: int) -> None:
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, self.limit - 8
        for _ in range(count):
            if at > last:
                raise self.too_short()
            at += 8 + unpack(data, at)[0]
        self.skip(at - self.at)

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.error("has a string that is no UTF-8") from None

    def number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
        return _shortest(value) if code == "f" else value

    def take(self, num_bytes: int) -> bytes:
        begin = self.at
        self.skip(num_bytes)
        return self.data[begin : self.at]

    def skip(self, num_bytes: int) -> None:
        if num_bytes > self.limit - self.at:
            raise self.too_short()
        self.at += num_bytes

    def too_short(self) -> CheckpointError:
        if self.limit < self.size:
            return self.error(f"has more than {MAX_HEADER_BYTES >> 20} MiB; that is the most that is read")
        return CheckpointError(f"{self.path}: truncated or not a GGUF file; it ends within its header")

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: its header {reason}")


def _shortest(value: float) -> float:
    """The shortest decimal number that is this one in float32: what was meant, such as 1e-5 or 0.22."""
    if not math.isfinite(value):
        return value
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value
