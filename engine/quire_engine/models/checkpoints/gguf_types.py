"""Types of numbers and values in GGUF files, and how their metadata are read. Does not use torch."""

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import StoredTensor
from quire_engine.models.checkpoints.files import brief, open_regular

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""By number in a file: name, numbers of a block, and its bytes."""
BLOCKS = {name: (numbers, size) for name, numbers, size in TYPES.values() if numbers > 1}
"""Those of quantised types: numbers and bytes of a block."""
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values with a fixed size, as `struct` names them."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, which is decoded when it is read."""

    path: Path
    changed_at: int
    """When the file was changed last."""
    kind: int
    count: int
    begin: int
    end: int

    def __repr__(self) -> str:
        return f"an array of {self.count}"

    def read(self) -> list[Any]:
        """Its elements. Raises CheckpointError if a string is no UTF-8."""
        with open_regular(self.path) as file:
            file.seek(self.begin)
            data = file.read(self.end - self.begin)
        if len(data) < self.end - self.begin:
            raise CheckpointError(f"{self.path}: truncated while it was read")
        if self.kind != STRING:
            return list(struct.unpack(f"<{self.count}{FORMATS[self.kind]}", data))
        found, at = [], 0
        try:
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(data[at : at + 8], "little")
                found.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: one of the {self.count} strings of an array is no UTF-8") from None
        return found


class ModelValues:
    """What a file says of its model. Methods raise CheckpointError if a value is missing or wrong.

    Args:
        path: the first file, for messages.
        values: the metadata.
        stored: the tensors of all files, by their names there.
        kind: llama.cpp's name of the architecture.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], stored: Mapping[str, StoredTensor], kind: str) -> None:
        self.path, self.values, self.stored, self.kind = path, values, stored, kind

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the architecture, as it is in the file."""
        return self.values.get(f"{self.kind}.{name}", default)

    def size(self, name: str) -> int:
        """The same, which must be a size."""
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= 1 << 24:
            raise CheckpointError(f"{self.path}: {self.kind}.{name} is {brief(value)}; it must be from 1 to {1 << 24}")
        return value

    @property
    def num_layers(self) -> Any:
        """How many layers the model has, without those of multi-token prediction, if the file says so."""
        number, extra = self.get("block_count"), self.get("nextn_predict_layers", 0)
        return number - extra if type(number) is type(extra) is int else number

    def per_layer(self, name: str) -> list[int]:
        """A number for each layer."""
        value = self.get(name)
        numbers = value.read() if isinstance(value, Array) and value.kind in FORMATS and value.count < 1 << 16 else []
        is_whole = len(numbers) == self.get("block_count") and all(isinstance(one, int) for one in numbers)
        if not is_whole or not numbers[: self.num_layers]:
            raise CheckpointError(
                f"{self.path}: {self.kind}.{name} is {brief(value)}; it must be a number for each layer"
            )
        return numbers[: self.num_layers]

    @functools.cached_property
    def kv_heads(self) -> list[int]:
        """Those of each layer: none where it is no attention."""
        return self.per_layer("attention.head_count_kv")

    def has_any(self, end: str) -> bool:
        """Whether the name of a tensor ends so."""
        return any(name.endswith(end) for name in self.stored)
