"""The files of a checkpoint folder. They are not trusted: they were downloaded, and others may own the folder.

Only regular files are opened, as anything else may block forever (a FIFO) or have no end (a device). Links to regular
files are followed, as Hugging Face's cache consists of links. Only files in the folder itself are read, and at most
`MAX_JSON_BYTES` of JSON.
"""

import json
import os
import stat
from pathlib import Path
from typing import IO, Any

from quire_engine.errors import CheckpointError, cut

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
READ_NAMES = (
    "config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", "processor_config.json",
)  # fmt: skip
"""Files that are read from a folder, here or by the tokenizer's library, besides the weights."""
MAX_JSON_BYTES = 16 << 20
"""Upper bound on a configuration, an index or a header; those of the largest models take a tenth of it."""
POINTER_START = b"version https://git-lfs.github.com/spec/"
"""First bytes of a git-LFS pointer, which stands in for a file that was not fetched."""


def check_files(folder: Path) -> None:
    """Check that all files that may be read from a folder, except the weights, are regular and fetched; else raise
    CheckpointError. A GGUF file needs no such check."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name in READ_NAMES) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    for path in paths:
        open_regular(path).close()


def check_tokenizer(folder: Path) -> None:
    """Check that a folder holds a tokenizer whose files can be read; else raise CheckpointError."""
    check_files(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder}: there is no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy its files there, or name another "
            "folder with the setting tokenizer"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is no such file, or it holds something else."""
    with open_regular(path) as file:
        return parse_object(path, file.read(MAX_JSON_BYTES + 1))


def read_json_value(path: Path) -> Any:
    """The same of a file that may hold something else than an object."""
    with open_regular(path) as file:
        return _parse(path, file.read(MAX_JSON_BYTES + 1))


def brief(value: object) -> str:
    """A value as a message shows it: on one line, and cut if it is long."""
    return cut(repr(value))


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file. Raises CheckpointError for another kind of file, and for a git-LFS pointer."""
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


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    parsed = _parse(path, content)
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return parsed


def _parse(path: Path, content: bytes) -> Any:
    if len(content) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_JSON_BYTES} bytes of JSON; that is the most that is read")
    try:
        return json.loads(content)
    except RecursionError:
        raise CheckpointError(f"{path}: not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
