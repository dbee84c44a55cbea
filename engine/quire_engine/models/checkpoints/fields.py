"""Typed reading of the fields of `config.json`; errors state a field's name, value and bounds."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, open_checkpoint
from quire_engine.models.checkpoints.files import brief

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
COMMON = (
    "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization", "quantization_config",
    "compression_config",
)  # fmt: skip
"""Fields beside `text_config` that hold for the text model too, and take precedence."""
MAX_SIZE = 1 << 24
"""Upper bound on each dimension of a weight; the largest vocabularies have 2^18 tokens."""
MAX_LAYERS = 10_000
MAX_EXPERTS = 1 << 16
MAX_POSITIONS = 2**31 - 1
_UNSET: Any = object()


class Fields:
    """One JSON object of a file. A field that is null counts as missing. Each reader raises CheckpointError if the
    field has another value, or is missing and has no default.

    Args:
        path: the file, for messages.
        values: the object.
        prefix: of the fields' names in messages, for a nested object.
        unprefixed: names of fields that have no prefix.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], prefix: str = "", unprefixed: Collection[str] = ()
    ) -> None:
        self.path = path
        self.values = values
        self._prefix, self._unprefixed = prefix, unprefixed

    def integer(self, name: str, low: int, high: int, default: int = _UNSET) -> int:
        """An integer within bounds."""
        value = self._get(name, default)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise self.error(name, f"an integer from {low} to {high}")
        return int(value)

    def positive(self, name: str, default: float = _UNSET) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not 0 < number < math.inf:
            raise self.error(name, "a finite number above 0")
        return number

    def positive_or_null(self, name: str, default: float | None) -> float | None:
        """A finite number above 0; or None if the field is null, which is not the same as missing here."""
        value = self.values.get(name, default)
        return None if value is None else self.positive(name, value)

    def positive_numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers above 0."""
        numbers = self._get(name, _UNSET)
        if (
            not isinstance(numbers, list)
            or len(numbers) != count
            or not all(type(number) in (int, float) and 0 < number < math.inf for number in numbers)
        ):
            raise self.error(name, f"a list of {count} finite numbers above 0")
        return tuple(map(float, numbers))

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """One of several words."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}")
        return value

    def dtype(self) -> str:
        """The dtype to serve in, from `dtype` or, in older files, `torch_dtype`; else that of most weights, as in vLLM.
        float64 is served in float32."""
        name = "torch_dtype" if self.values.get("dtype") is None else "dtype"
        if self.values.get(name) is None:
            return _stored_dtype(self.path.parent)
        dtype = self.choice(name, (*DTYPES, "float64"), "float32")
        if dtype == "float64":
            logger.info("%s: %s is float64; it is served in float32", self.path, name)
            return "float32"
        return dtype

    def inner(self, name: str) -> "Fields":
        """The object in a field; empty if the field is missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.path, value, f"{self._full(name)}.")

    def with_values(self, values: Mapping[str, Any]) -> "Fields":
        """The same object with other values."""
        return Fields(self.path, values, self._prefix, self._unprefixed)

    def text(self) -> "Fields":
        """The fields of the text model of a checkpoint that has other parts too: those in `text_config`, and those that
        hold for all parts. Older files have the former among the latter."""
        if self.values.get("text_config") is None:
            return self
        common = {name: self.values[name] for name in COMMON if self.values.get(name) is not None}
        return Fields(self.path, {**self.inner("text_config").values, **common}, "text_config.", common)

    def same_as_target(self, name: str, value: int) -> None:
        """Check a size of a drafting model that must be its target's, if it is given."""
        if self._get(name, value) != value:
            raise self.error(name, f"{value}, as in the model that is drafted for")

    def target_layers(self, name: str, numbers: Any, num_layers: int) -> list[int]:
        """Numbers of layers of a drafting model's target, given by the field or what stands for it."""
        are_layers = isinstance(numbers, list) and all(type(one) is int and 0 <= one < num_layers for one in numbers)
        if not numbers or not are_layers:
            raise self.error(name, f"a list of integers from 0 to {num_layers - 1}, layers of the target")
        return list(numbers)

    def error(self, name: str, allowed: str) -> CheckpointError:
        """The exception to raise for a field with a wrong value."""
        value = self.values.get(name)
        return CheckpointError(f"{self.path}: {self._full(name)} is {brief(value)}; it must be {allowed}")

    def _full(self, name: str) -> str:
        return name if name in self._unprefixed else f"{self._prefix}{name}"

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _UNSET:
            raise CheckpointError(f"{self.path}: {self._full(name)} is missing")
        return default


def _stored_dtype(folder: Path) -> str:
    """The dtype that most bytes of the weights have, of those that can be served in; float32 without weights."""
    names, sizes = {"BF16": "bfloat16", "F16": "float16"}, Counter[str]()
    with contextlib.suppress(CheckpointError):  # which is raised where the weights are needed
        for tensor in open_checkpoint(folder).tensors.values():
            if tensor.dtype in FLOATING:
                sizes[names.get(tensor.dtype, "float32")] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def read_config(folder: Path, setting: str = "model") -> Fields:
    """The fields of a checkpoint's `config.json`, or the equivalent metadata of a GGUF file. For messages, `setting`
    names the folder. Raises CheckpointError if there is no such folder, file or JSON object."""
    return Fields(*open_checkpoint(folder, setting).config())
