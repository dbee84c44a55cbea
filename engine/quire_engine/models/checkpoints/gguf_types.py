"""Types of numbers and values in GGUF files, and the arrays of their metadata. Does not use torch."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.files import open_regular

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
