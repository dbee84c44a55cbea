"""Tensors in requests: base64 of a file with one tensor, as `torch.save` or safetensors writes it → its values.

`torch.save` writes a zip archive. `NAME/data.pkl` describes the tensor, and `NAME/data/0` holds its values::

    PROTO  GLOBAL torch._utils._rebuild_tensor_v2  MARK  (storage)  offset  (size)  (stride)  requires_grad  …  REDUCE

The pickle is never unpickled. Its opcodes are read one by one, and only those that describe a plain tensor are known:
names stay names, and a call stays a pair of a name and arguments.
"""

import base64
import binascii
import io
import math
import pickletools
import zipfile
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_MAX_ENTRIES = 64
"""Of an archive. `torch.save` writes six or so for a tensor."""
_MAX_DIMENSIONS, _MAX_SIZE = 3, 2**40
_MAX_DESCRIPTION_BYTES = 64 << 10
_BFLOAT16 = np.dtype("<u2")
_STORAGES: dict[str, np.dtype[Any]] = {
    "torch FloatStorage": np.dtype("<f4"), "torch DoubleStorage": np.dtype("<f8"),
    "torch HalfStorage": np.dtype("<f2"), "torch BFloat16Storage": _BFLOAT16, "torch LongStorage": np.dtype("<i8"),
}  # fmt: skip
_SAFETENSORS_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": _BFLOAT16, "I64": np.dtype("<i8"),
}  # fmt: skip
_REBUILD = "torch._utils _rebuild_tensor_v2"
_IGNORED = ("PROTO", "STOP", "FRAME")
_VALUES = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_CONSTANTS = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class _UnknownFormatError(ValueError):
    """It is no file with a plain tensor; the message says what is wrong."""


def read_tensor(text: str) -> npt.NDArray[np.float32] | npt.NDArray[np.int64]:
    """The tensor of a file in base64.

    Args:
        text: of a file of torch.save or safetensors, with one tensor of floats or of int64.

    Raises:
        ValueError: it is not base64, or no such file; the message says what is wrong.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is not base64: {error}") from None
    values, shape = _torch_tensor(data) if data[:2] == b"PK" else _safetensor(data)
    if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) > _MAX_SIZE:
        raise ValueError(f"the tensor has shape {_cut(shape)}; at most {_MAX_DIMENSIONS} dimensions are taken")
    if values.dtype == _BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if values.dtype.kind == "i":
        return values.reshape(shape)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).reshape(shape)


# -- torch.save -------------------------------------------------------------------------------------------------------


def _torch_tensor(data: bytes) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """The flat values of a tensor, and its shape."""
    if data.count(b"PK\1\2") > _MAX_ENTRIES:
        raise _UnknownFormatError(f"the archive has more than {_MAX_ENTRIES} entries")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            described = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(described) != 1:
                raise _UnknownFormatError("the archive is none of torch.save: it has no single data.pkl")
            folder = described[0].removesuffix("data.pkl")
            dtype, key, offset, shape, stride = _description(_stored(archive, described[0], _MAX_DESCRIPTION_BYTES))
            if f"{folder}byteorder" in archive.namelist() and _stored(archive, f"{folder}byteorder", 16) != b"little":
                raise _UnknownFormatError("the tensor is not in little-endian byte order")
            content = _stored(archive, f"{folder}data/{key}", len(data))
    except _UnknownFormatError:
        raise
    except Exception as error:  # a malformed archive raises errors of many classes
        raise _UnknownFormatError(f"the archive cannot be read: {str(error)[:200]}") from None
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(own != expected for own, expected, size in zip(stride, strides, shape, strict=True) if size > 1):
        raise _UnknownFormatError("the tensor is not contiguous: save tensor.contiguous()")
    return _flat(content, dtype, offset, shape), shape


def _stored(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """An entry of an archive, which must not be compressed."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > max_bytes:
        raise _UnknownFormatError(f"the archive's {name[-100:]!r} is compressed, or larger than {max_bytes} bytes")
    return archive.read(entry)


def _description(pickled: bytes) -> tuple[np.dtype[Any], str, int, tuple[int, ...], tuple[int, ...]]:
    """The dtype, the entry's key, the offset, the size and the stride of the tensor that a pickle describes."""
    match _symbols(pickled):
        case (
            str(function),
            (("storage", str(storage), str(key), _, int()), int(offset), tuple(shape), tuple(stride), bool(), _),
        ) if function == _REBUILD and len(shape) == len(stride) <= _MAX_DIMENSIONS:
            if storage not in _STORAGES:
                raise _UnknownFormatError(f"the tensor is of {storage[:100]!r}; it must be of floats, or of int64")
            if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
                raise _UnknownFormatError("the tensor has a size that is no natural number")
            return _STORAGES[storage], key, offset, shape, stride
    raise _UnknownFormatError("data.pkl describes something else than one plain tensor")


def _symbols(pickled: bytes) -> Any:
    """What a pickle would make, with names in the place of what it imports: a call is `(name, arguments)`."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _VALUES or name == "GLOBAL":
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _TUPLES or name == "TUPLE":
            number = _TUPLES[name] if name in _TUPLES else stack[::-1].index(_MARK)
            items = tuple(stack[len(stack) - number :])
            del stack[len(stack) - number - (name == "TUPLE") :]
            stack.append(items)
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append((function, arguments))
        elif name not in ("BINPERSID", *_IGNORED):  # a persistent id is the tuple that names the storage
            raise _UnknownFormatError(f"data.pkl has the opcode {name}, which no plain tensor has")
    return stack.pop()


# -- safetensors ------------------------------------------------------------------------------------------------------


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _safetensor(data: bytes) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """The same of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(len(data), _MAX_DESCRIPTION_BYTES):
        raise _UnknownFormatError("it is neither a file of torch.save nor of safetensors")
    try:
        header = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = [msgspec.json.decode(entry, type=_Entry) for entry in header.values()]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _UnknownFormatError(f"the safetensors header cannot be read: {error}") from None
    if len(entries) != 1:
        raise _UnknownFormatError(f"the safetensors file holds {len(entries)} tensors; it must hold one")
    entry = entries[0]
    if entry.dtype not in _SAFETENSORS_TYPES:
        known = ", ".join(_SAFETENSORS_TYPES)
        raise _UnknownFormatError(f"the tensor has dtype {entry.dtype[:100]!r}; it must be one of {known}")
    start, stop = entry.data_offsets
    if not 0 <= start <= stop <= len(data) - end or min(entry.shape, default=0) < 0:
        raise _UnknownFormatError("the safetensors header names bytes that are not there")
    return _flat(data[end + start : end + stop], _SAFETENSORS_TYPES[entry.dtype], 0, entry.shape), entry.shape


def _flat(content: bytes, dtype: np.dtype[Any], offset: int, shape: Sequence[int]) -> npt.NDArray[Any]:
    number = math.prod(shape)
    if (offset + number) * dtype.itemsize > len(content):
        raise _UnknownFormatError(f"the file has fewer values than a tensor of shape {_cut(shape)} needs")
    return np.frombuffer(content, dtype, number, offset * dtype.itemsize)


def _cut(shape: Sequence[int]) -> str:
    return str([*shape])[:100]
