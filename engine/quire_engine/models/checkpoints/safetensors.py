"""Safetensors files, whole or sharded (https://github.com/huggingface/safetensors). Headers are read without torch."""

import contextlib
import os
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import CheckpointReader, StoredTensor, release_view
from quire_engine.models.checkpoints.files import (
    MAX_JSON_BYTES,
    brief,
    check_tokenizer,
    open_regular,
    parse_object,
    read_json,
)

if TYPE_CHECKING:
    import torch

PICKLES = (".bin", ".pt", ".pth")
"""Suffixes of weights that torch has pickled. They are not read, as unpickling runs any code that a file names."""


class SafetensorsReader(contextlib.AbstractContextManager[CheckpointReader]):
    """A `CheckpointReader` of a folder, which opens each file once."""

    format_name = "safetensors"
    config_name = "config.json"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def config(self) -> tuple[Path, dict[str, Any]]:
        path = self.folder / "config.json"
        return path, read_json(path)

    def tokenizer(self) -> Path:
        check_tokenizer(self.folder)
        return self.folder

    def weight_files(self) -> Mapping[Path, int]:
        sizes = {}
        for path in weight_files(self.folder):
            with open_regular(path) as file:
                sizes[path] = 8 + int.from_bytes(file.read(8), "little")
        return sizes

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {name: tensor for path in weight_files(self.folder) for name, tensor in read_header(path, self).items()}

    def read(self, tensor: StoredTensor, inside: tuple[slice | int, ...], matrix: int | None = None) -> "torch.Tensor":
        matrix = tensor.matrix if matrix is None else matrix
        try:
            if tensor.path not in self._files:
                self._files[tensor.path] = self._stack.enter_context(safe_open(tensor.path, framework="pt"))
            whole = self._files[tensor.path].get_slice(tensor.name)
            piece: torch.Tensor = whole[inside if matrix is None else (matrix, *inside)]
        except SafetensorError as error:
            raise CheckpointError(f"{tensor.path}: {error}") from None
        return piece

    def release(self, piece: "torch.Tensor") -> None:
        release_view(piece)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, whole or sharded. Raises CheckpointError if there are none, or the index
    names a shard that is missing or not in the folder."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not os.path.lexists(index):
        if not os.path.lexists(whole):
            pickled = [path.name for path in folder.glob("*") if path.suffix in PICKLES]
            mend = f": convert {brief(min(pickled))} with safetensors.torch.save_file" if pickled else ""
            if gguf := min((path.name for path in folder.glob("*.gguf")), default=None):
                mend = f"; to serve {brief(gguf)}, give the path of that file"
            raise CheckpointError(
                f"{folder}: there is no model.safetensors and no {index.name}; only safetensors are read{mend}"
            )
        return [whole]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {brief(weight_map)}; it must map each tensor's name to its file")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or os.path.basename(name) != name:
            raise CheckpointError(
                f"{index}: weight_map has {brief(name)} for {brief(tensor)}; it must be the name of a .safetensors "
                "file in this folder"
            )
    names = sorted(set(weight_map.values()))
    for name in names:
        if not os.path.lexists(folder / name):
            raise CheckpointError(f"{folder / name}: this shard is missing, though {index.name} names it")
    return [folder / name for name in names]


def read_header(path: Path, reader: CheckpointReader) -> dict[str, StoredTensor]:
    """Read a safetensors file's header, and check that the file has the length that the header implies; else raise
    CheckpointError. ::

        | 8 bytes: header length, little endian | header, JSON | tensors, at offsets that the header gives |

    Returns:
        The file's tensors, by name, for the reader.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: truncated; it has {size} bytes")
        (header_size,) = struct.unpack("<Q", start)
        if header_size > size - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file; it ends within its header")
        if header_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: its header has {header_size} bytes; it must have at most {MAX_JSON_BYTES}")
        header = parse_object(path, file.read(header_size))
    header.pop("__metadata__", None)
    tensors = {name: _stored_tensor(path, name, entry, reader) for name, entry in header.items()}
    data_size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = 8 + header_size + data_size
    if size != expected:
        raise CheckpointError(f"{path}: truncated; it has {size} bytes and its header speaks of {expected}")
    return tensors


def _stored_tensor(path: Path, name: str, entry: Any, reader: CheckpointReader) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(size) is int and size >= 0 for size in shape) and 0 <= begin <= end
        ):
            return StoredTensor(name, dtype, tuple(shape), end - begin, path, reader)
    raise CheckpointError(f"{path}: not a safetensors file; its header has {brief(entry)} for {brief(name)}")
