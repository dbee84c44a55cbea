"""Checks of settings. What they raise names the setting, its value and what is allowed."""


def check(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise `ValueError` unless a setting is as it must be."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise `ValueError` unless a setting is an integer within its bounds."""
    ok = is_int(value, low, high)
    check(ok, name, value, f"an integer from {low} to {high}" if high else f"an integer of at least {low}")


def check_bool(name: str, value: object) -> None:
    """Raise `ValueError` unless a setting is a boolean."""
    check(isinstance(value, bool), name, value, "true or false")


def is_int(value: object, low: int, high: int | None = None) -> bool:
    """Whether it is an integer within these bounds; booleans are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)


def is_number(value: object) -> bool:
    """Whether it is an integer or a float; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
