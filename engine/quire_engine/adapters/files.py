"""The two files of an adapter in PEFT's format, and the matrices of the safetensors file. Does not use torch."""

import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.adapters.config import CONFIG
from quire_engine.errors import CheckpointError
from quire_engine.lora import AdaptableModules
from quire_engine.models.checkpoints.files import MAX_JSON_BYTES, brief, open_regular, parse_object

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
MAX_RANK = 256
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PIECE_BYTES = 1 << 20
"""Of a file between two pauses: half a millisecond to hash them. On a core that computes steps, a thread of low
priority that does not pause keeps the core until the next tick, 4 ms with a kernel of 250 Hz."""
NICENESS = 8
"""Of threads that load. A core that also computes steps gives them a seventh of its time: a step of 40 ms takes 6 ms
longer."""
PAUSE_SECONDS = 0.0002
PIECE = 32
"""Layers or matrices between two pauses: less than a millisecond."""


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """A matrix of the file, of type F32, F16 or BF16."""

    dtype: str
    shape: tuple[int, int]
    content: memoryview


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
        content, end = np.empty(size, dtype=np.uint8).data, 0  # filled without the interpreter's lock
        while end < size:
            number: int = file.readinto(content[end : end + _PIECE_BYTES])  # type: ignore[attr-defined]
            if not number:  # it has become shorter meanwhile
                break
            end += number
            pause()
        return config, content[:end]


def digest_of(config: bytes, weights: memoryview) -> str:
    """SHA-256 of an adapter's two files, in hexadecimal. Other threads run meanwhile."""
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    for start in range(0, len(weights), _PIECE_BYTES):  # a signal, or a shutdown, need not wait for all of it
        digest.update(weights[start : start + _PIECE_BYTES])
        pause()
    return digest.hexdigest()


def parse_tensors(path: Path, content: memoryview) -> Iterator[tuple[str, AdapterMatrix]]:
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
            if len(shape) == 1 and ".lora_magnitude_vector" in name:
                shape = [*shape, 1]
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


def pause() -> None:
    """Let another thread have the interpreter's lock, for which it would wait up to 5 ms."""
    time.sleep(PAUSE_SECONDS)


def check_finite(path: Path, content: memoryview, tensors: Mapping[str, AdapterMatrix]) -> None:
    """Raises CheckpointError if a number of a file is not finite. Checks neighbours of one dtype together, so that
    little of the time is spent in the interpreter, with its lock.

    Args:
        path: for messages.
        content: of the file.
        tensors: all of it, of `parse_tensors`.
    """
    start = len(content) - sum(len(matrix.content) for matrix in tensors.values())
    for dtype, neighbours in itertools.groupby(tensors.items(), key=lambda item: item[1].dtype):
        group = list(neighbours)
        end = start + sum(len(matrix.content) for _, matrix in group)
        for first in range(start, end, _PIECE_BYTES):
            if not _are_finite(dtype, content[first : min(first + _PIECE_BYTES, end)]):
                name = next(name for name, matrix in group if not _are_finite(dtype, matrix.content))
                what = "it holds a value that is not finite; weights must be finite numbers"
                raise CheckpointError(f"{path}: tensor {name}: {what}")
            pause()
        start = end


def _are_finite(dtype: str, content: memoryview) -> bool:
    values: npt.NDArray[Any]
    if dtype == "BF16":  # numpy has no such type: all bits of the exponent are set
        values = np.frombuffer(content, dtype=np.uint16)
        return not ((values & 0x7F80) == 0x7F80).any()
    values = np.frombuffer(content, dtype=np.float32 if dtype == "F32" else np.float16)
    return bool(np.isfinite(values).all())
