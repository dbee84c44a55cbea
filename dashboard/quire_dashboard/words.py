"""Figures as people read them, and the names of things."""

__all__ = ["count", "per_second", "percent", "phase_name", "seconds", "seconds_or_dash"]

_PHASES = {
    "held": "held back", "waiting": "waiting", "grammar": "waiting for its grammar", "prefill": "prefill",
    "decode": "decode", "preempted": "preempted",
}  # fmt: skip


def seconds(value: float) -> str:
    """0.0123 → `12 ms`, 83 → `1 min 23 s`."""
    if value < 0:
        return f"-{seconds(-value)}"
    if 0 < value < 0.000995:
        return f"{1e6 * value:.0f} µs"
    if value < 0.0095:
        return f"{1000 * value:.1f} ms"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def seconds_or_dash(value: float | None) -> str:
    """Nothing is a dash."""
    return "—" if value is None else seconds(value)


def count(value: float | None) -> str:
    """12345 → `12,345`."""
    return "—" if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """0.9876 → `98.8%`."""
    return "—" if value is None else f"{100 * value:.1f}%" if value < 1 else "100%"


def per_second(value: float | None) -> str:
    """1234.5 → `1,234/s`."""
    return "—" if value is None else f"{value:,.0f}/s" if value >= 10 else f"{value:.2g}/s"


def phase_name(phase: str) -> str:
    """A request's phase as the snapshot names it, in words."""
    return _PHASES.get(phase, phase)
