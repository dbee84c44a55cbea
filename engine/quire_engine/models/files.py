"""The files of a checkpoint folder. They are not trusted: they were downloaded, and others may own the folder.

Only regular files are opened, as anything else may block forever (a FIFO) or have no end (a device). Links to regular
files are followed, as Hugging Face's cache consists of links. Only files in the folder itself are read, and at most
`MAX_JSON_BYTES` of JSON.
"""

import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quire_engine.errors import CheckpointError, cut

__all__ = [
    "TOKENIZER_FILES",
    "StoredTensor",
    "brief",
    "check_files",
    "check_tokenizer",
    "gguf_mend",
    "read_header",
    "read_json",
    "weight_files",
]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
READ_NAMES = (
    "config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", "processor_config.json",
)  # fmt: skip
"""Files that are read from a folder, here or by the tokenizer's library, besides the weights."""
PICKLES = (".bin", ".pt", ".pth")
"""Suffixes of weights that torch has pickled. They are not read, as unpickling runs any code that a file names."""
MAX_JSON_BYTES = 16 << 20
"""Upper bound on a configuration, an index or a header; those of the largest models take a tenth of it."""
POINTER_START = b"version https://git-lfs.github.com/spec/"
"""First bytes of a git-LFS pointer, which stands in for a file that was not fetched."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in a safetensors header."""

    name: str
    """Its name in the file."""
    dtype: str
    """Its name there: `F32`, `BF16`, `I8`, …"""
    shape: tuple[int, ...]
    num_bytes: int
    path: Path
    """The file that holds it."""
    first_row: int = 0
    """Where it begins in the file's tensor of that name, if it is a part of it."""
    row_step: int = 1
    """How far apart its rows are there."""
    matrix: int | None = None
    """Which of the matrices it is a part of, if the file's tensor is a stack of them."""
    is_transposed: bool = False
    """The file has its rows as columns."""
    scales: "StoredTensor | None" = None
    """What its numbers are multiplied by, if it is quantised: of the file's whole tensor."""
    block_size: tuple[int, int] = (1, 1)
    """Rows and columns that share a scale."""


def check_files(folder: Path) -> None:
    """Check that all files that may be read from a folder, except the weights, are regular and fetched.

    Raises:
        CheckpointError: one is a FIFO, a device, a dangling link, or a git-LFS pointer.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.name in READ_NAMES)
    except FileNotFoundError:
        raise CheckpointError(
            f"model: there is no folder {folder}; give the path of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    for path in paths:
        _open(path).close()


def check_tokenizer(folder: Path) -> None:
    """Check that a folder holds a tokenizer.

    Raises:
        CheckpointError: it does not, or one of its files cannot be read.
    """
    check_files(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: there is no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy its files there, or name another "
            "folder with the setting tokenizer"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or it holds something else.
    """
    with _open(path) as file:
        return _parse_object(path, file.read(MAX_JSON_BYTES + 1))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, whole or sharded.

    Raises:
        CheckpointError: there are none, or the index names a shard that is missing or not in the folder.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not os.path.lexists(index):
        if not os.path.lexists(whole):
            pickled = [path.name for path in folder.glob("*") if path.suffix in PICKLES]
            mend = f": convert {brief(min(pickled))} with safetensors.torch.save_file" if pickled else gguf_mend(folder)
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


def gguf_mend(folder: Path) -> str:
    """How to convert the GGUF file in a folder, for a message; empty if there is none."""
    name = min((path.name for path in folder.glob("*.gguf")), default=None)
    if name is None:
        return ""
    return (
        f": convert model and tokenizer with transformers' from_pretrained(folder, gguf_file={brief(name)}) and "
        "save_pretrained"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read a safetensors file's header, and check that the file has the length that the header implies.

    ::

        | 8 bytes: header length, little endian | header, JSON | tensors, at offsets that the header gives |

    Returns:
        The file's tensors, by name.

    Raises:
        CheckpointError: the file is truncated or has no valid header.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: truncated; it has {size} bytes")
        (header_size,) = struct.unpack("<Q", start)
        if header_size > size - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file; it ends within its header")
        if header_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: its header has {header_size} bytes; it must have at most {MAX_JSON_BYTES}")
        header = _parse_object(path, file.read(header_size))
    header.pop("__metadata__", None)
    tensors = {name: _stored_tensor(path, name, entry) for name, entry in header.items()}
    data_size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = 8 + header_size + data_size
    if size != expected:
        raise CheckpointError(f"{path}: truncated; it has {size} bytes and its header speaks of {expected}")
    return tensors


def brief(value: object) -> str:
    """A value as a message shows it: on one line, and cut if it is long."""
    return cut(repr(value))


def _stored_tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(size) is int and size >= 0 for size in shape) and 0 <= begin <= end
        ):
            return StoredTensor(name, dtype, tuple(shape), end - begin, path)
    raise CheckpointError(f"{path}: not a safetensors file; its header has {brief(entry)} for {brief(name)}")


def _open(path: Path) -> IO[bytes]:
    """Open a regular file.

    Raises:
        CheckpointError: it is not a regular file, or it is a git-LFS pointer.
    """
    try:
        # Neither call blocks on a FIFO or a device.
        if stat.S_ISREG(os.stat(path).st_mode):
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return _not_a_pointer(path, file)
            file.close()  # it was replaced between the two calls
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which is not there") from None
        raise CheckpointError(f"{path.parent}: there is no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    raise CheckpointError(f"{path} is {_kind(path)}; it must be a regular file, or a link to one")


def _not_a_pointer(path: Path, file: IO[bytes]) -> IO[bytes]:
    start = file.read(len(POINTER_START))
    if start == POINTER_START:
        file.close()
        raise CheckpointError(
            f"{path} is a git-LFS pointer, not the file itself; fetch it with: git lfs pull (in {path.parent})"
        )
    file.seek(0)
    return file


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def _parse_object(path: Path, content: bytes) -> dict[str, Any]:
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_JSON_BYTES} bytes of JSON; that is the most that is read")
    try:
        parsed = json.loads(content)
    except RecursionError:
        raise CheckpointError(f"{path}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return parsed
