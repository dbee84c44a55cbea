"""Checks of settings. What they raise names the setting, its value and what is allowed.

A field says in its type what it may be, `block_size: Annotated[int, between(1, 1024)]`, and `check_fields` checks all
fields of a group. A `bool` needs no annotation, and `| None` allows the setting to be unset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a setting may be."""

    holds: Callable[[Any], bool]
    text: str
    """Completes "it must be"."""


def between(low: int, high: int | None = None) -> Allowed:
    """An integer within these bounds."""
    text = f"an integer from {low} to {high}" if high else f"an integer of at least {low}"
    return Allowed(lambda value: is_int(value, low, high), text)


def one_of(*values: str) -> Allowed:
    """One of these words."""
    return Allowed(lambda value: value in values, f"one of {', '.join(values)}")


def within(low: float, high: float) -> Allowed:
    """A number within these bounds."""
    return Allowed(lambda value: is_number(value) and low <= value <= high, f"from {low} to {high}")


def positive(text: str, most: float = float("inf")) -> Allowed:
    """A number above 0, up to a finite one."""
    return Allowed(lambda value: is_number(value) and 0 < value <= most and value != float("inf"), text)


def filled(text: str) -> Allowed:
    """A string that is not empty."""
    return Allowed(lambda value: isinstance(value, str) and value != "", text)


POSITIVE_SECONDS = positive("a number of seconds above 0")
SHARE = within(0, 1)
_BOOL = Allowed(lambda value: isinstance(value, bool), "true or false")


def check(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise `ValueError` unless a setting is as it must be."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass of settings by their types.

    Args:
        config: an instance.
        prefix: comes before each name in messages.

    Raises:
        ValueError: a value is not allowed.
    """
    for name, (allowed, is_optional) in _rules(config.__class__).items():
        value = getattr(config, name)
        if value is not None or not is_optional:
            text = f"unset or {allowed.text}" if is_optional and allowed.text.startswith("one of") else allowed.text
            check(allowed.holds(value), prefix + name, value, text)


@cache
def _rules(kind: type) -> dict[str, tuple[Allowed, bool]]:
    """For each field what it may be, and whether it may be unset."""
    rules = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        options = (hint,) if get_origin(hint) is Annotated else get_args(hint)
        is_optional = NoneType in options
        inner = next((one for one in options if one is not NoneType), hint) if is_optional else hint
        allowed = _BOOL if inner is bool else next(
            (one for one in getattr(inner, "__metadata__", ()) if isinstance(one, Allowed)), None
        )  # fmt: skip
        if allowed is not None:
            rules[name] = allowed, is_optional
    return rules


def is_int(value: object, low: int, high: int | None = None) -> bool:
    """Whether it is an integer within these bounds; booleans are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)


def is_number(value: object) -> bool:
    """Whether it is an integer or a float; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
