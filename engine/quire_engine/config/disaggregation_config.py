"""DisaggregationConfig: how many replicas compute prompts, and how many go on from there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_engine.config.checks import check, check_int

_ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregationConfig:
    """Replicas by their role."""

    prefill: int
    """Replicas that compute prompts, and the first token of each request. They come first."""
    decode: int
    """Replicas that compute all further tokens."""

    def __post_init__(self) -> None:
        check_int("disaggregation: prefill", self.prefill, 1)
        check_int("disaggregation: decode", self.decode, 1)

    @property
    def num_replicas(self) -> int:
        """Of both roles."""
        return self.prefill + self.decode

    @classmethod
    def from_value(cls, value: Any) -> "DisaggregationConfig":
        """The setting as it stands in `model.json`.

        Raises:
            ValueError: it is no object, or a key or value is wrong.
        """
        check(isinstance(value, Mapping), "disaggregation", value, 'an object, such as {"prefill": 1, "decode": 1}')
        check(set(value) == set(_ROLES), "disaggregation", dict(value), "of prefill and decode, both of them")
        return cls(**value)
