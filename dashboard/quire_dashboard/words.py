"""Formats numbers and names for people, and escapes text that comes from clients or servers.

Streamlit renders most text as Markdown: a visitor's browser would fetch an image in a request's id.
"""

import re
import unicodedata

_MARKDOWN = re.compile(r"([\\`*_~\[\]<>$:&])")
"""Characters that begin markup in the middle of a line."""

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
    """None is shown as a dash."""
    return "—" if value is None else seconds(value)


def count(value: float | None) -> str:
    """12345 → `12,345`."""
    return "—" if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """2.345 → `2.35`."""
    return "—" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """0.9876 → `98.8%`."""
    return "—" if value is None else f"{100 * value:.1f}%" if value < 1 else "100%"


def per_second(value: float | None) -> str:
    """1234.5 → `1,234/s`."""
    return "—" if value is None else f"{value:,.0f}/s" if value >= 10 else f"{value:.2g}/s"


def bytes_per_second(value: float) -> str:
    """2500000 → `2.5 MB/s`."""
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}/s"
        value /= 1000
    return f"{value:,.3g} GB/s"


def phase_name(phase: str) -> str:
    """A request's phase as the snapshot names it, in words."""
    return _PHASES.get(phase, phase)


def printable(text: str, most: int) -> str:
    """A client's text on one line, cut to a length, without invisible characters or ones that change direction."""
    shown = "".join(
        "\ufffd" if unicodedata.category(one)[0] in "CZ" and one != " " else one for one in text[: most + 1]
    )
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def as_code(text: str) -> str:
    """Markdown that shows a line of text literally, as a code span."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def as_text(text: str) -> str:
    """Markdown that shows a sentence literally, such as a server's error."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
