"""Packed weights as values of msgpack, with their tensors apart: `Encoder` takes them to pieces, `Restorer` puts them
together again, in memory that holds the tensors."""

import ctypes
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from quire_kernels.cpu import Call

from quire_engine.models.mapped import aligned

PACKERS = ("quire_kernels.", "quire_engine.models.")
"""Modules whose dataclasses a packed weight may be made of."""


class Encoder:
    """Values as msgpack can hold them, and the tensors in them, one after another.

    ::

        ["tensor", offset, dtype, shape]    ["dtype", name]    ["tuple", values…]    ["dict", {name: value}]
        ["object", module, name, {field: value}]
        ["call", name, bytes, {field: offset}]        a kernel's call; fields that point into its object's tensors
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.size = 0
        self._offsets: dict[tuple[int, int], int] = {}

    def encode_all(self, values: Mapping[str, Any], owner: object = None) -> dict[str, Any]:
        """Encode each value; `owner` is the object whose fields they are."""
        return {name: self._encode(value, owner) for name, value in values.items()}

    def _encode(self, value: Any, owner: object) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case torch.dtype():
                return ["dtype", str(value).removeprefix("torch.")]
            case torch.Tensor():
                return ["tensor", self._place(value), str(value.dtype).removeprefix("torch."), list(value.shape)]
            case tuple() | list():
                return ["tuple", *(self._encode(one, owner) for one in value)]
            case dict():
                return ["dict", self.encode_all(value, owner)]
            case Call():
                return self._encode_call(value, owner)
        kind = type(value)
        if not is_dataclass(kind) or not kind.__module__.startswith(PACKERS):
            raise TypeError(f"a packed weight holds a {kind.__module__}.{kind.__qualname__}")
        values = {field.name: getattr(value, field.name) for field in fields(kind)}
        return ["object", kind.__module__, kind.__name__, self.encode_all(values, value)]

    def _encode_call(self, call: Call, owner: object) -> list[Any]:
        """Only pointers into the owner's tensors are kept: the others are those of the last call."""
        copy, pointers = type(call).from_buffer_copy(call), {}
        for name, kind, *_ in call._fields_:
            address = getattr(copy, name) if kind is ctypes.c_void_p else None
            if address is None:
                continue
            setattr(copy, name, None)
            for tensor in tensors_of(owner):
                if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                    pointers[name] = self._place(tensor) + address - tensor.data_ptr()
        return ["call", type(call).__name__, bytes(copy), pointers]

    def _place(self, tensor: torch.Tensor) -> int:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise TypeError(f"a packed weight has strides {tensor.stride()} on {tensor.device}")
        key = tensor.data_ptr(), tensor.nbytes
        if key not in self._offsets:
            self._offsets[key] = self.size
            self.tensors.append((self.size, tensor))
            self.size = aligned(self.size + tensor.nbytes)
        return self._offsets[key]


class Restorer:
    """Decodes what an `Encoder` has encoded, in memory that holds its tensors."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.address = memory, memory.data_ptr()

    def decode_all(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._decode(value) for name, value in values.items()}

    def _decode(self, value: Any) -> Any:
        match value:
            case ["tensor", offset, dtype, shape]:
                kind = getattr(torch, dtype)
                size = math.prod(shape) * kind.itemsize
                return self._memory[offset : offset + size].view(kind).view(shape)
            case ["dtype", name]:
                return getattr(torch, name)
            case ["tuple", *values]:
                return tuple(map(self._decode, values))
            case ["dict", values]:
                return self.decode_all(values)
            case ["object", module, name, values]:
                return getattr(importlib.import_module(module), name)(**self.decode_all(values))
            case ["call", name, content, pointers]:
                kinds = {kind.__name__: kind for kind in Call.__subclasses__()}
                call = kinds[name].from_buffer_copy(content)
                for field, offset in pointers.items():
                    setattr(call, field, self.address + offset)
                return call
        return value


def moved(values: Mapping[str, Any], place: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    """The same values, their tensors in memory that `place` returns for a number of bytes. Raises TypeError if they
    hold what an `Encoder` does not take."""
    encoder = Encoder()
    encoded = encoder.encode_all(values)
    memory = place(encoder.size)
    for offset, tensor in encoder.tensors:
        memory[offset : offset + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
    return Restorer(memory).decode_all(encoded)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors of a packed weight."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
