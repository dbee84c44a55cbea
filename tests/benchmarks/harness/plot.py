"""Bars of output tokens per second as a PNG, drawn with Pillow: one panel for each model and workload."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .results import Row

__all__ = ["draw_rates"]

SCALE = 2
"""Pixels per unit below: sharp on screens of high density."""
PANEL_WIDTH, LABEL_WIDTH, VALUE_WIDTH = 470, 196, 52
BAR, GAP, MARGIN, TITLE, HEAD = 17, 7, 24, 34, 64
WHITE, INK, GREY, LINE = "#ffffff", "#1a1d21", "#6a737d", "#d8dde3"
COLOURS = {
    "bf16": ("#0f766e", "#94a3b8"),
    "int8": ("#5eb5a8", "#cbd5e1"),
    "int4": ("#a7d8d0", "#e2e8f0"),
}
"""Ours and the peers', by precision."""


def draw_rates(tables: Mapping[str, Sequence[Row]], title: str, subtitle: str, out: Path) -> None:
    """Write the picture.

    Args:
        tables: for each model its rows.
        subtitle: what it was measured on.
    """
    workloads = list(dict.fromkeys(name for rows in tables.values() for row in rows for name in row.rates))
    heights = {model: TITLE + len(rows) * (BAR + GAP) for model, rows in tables.items() if rows}
    width = 2 * MARGIN + len(workloads) * PANEL_WIDTH
    height = HEAD + sum(heights.values()) + MARGIN * len(heights) + MARGIN // 2
    image = Image.new("RGB", (width * SCALE, height * SCALE), WHITE)
    draw = ImageDraw.Draw(image)
    _text(draw, MARGIN, 26, title, 17, INK)
    _text(draw, MARGIN, 48, f"{subtitle}; longer is faster", 11, GREY)
    top = HEAD
    for model, panel_height in heights.items():
        for column, workload in enumerate(workloads):
            _draw_panel(draw, MARGIN + column * PANEL_WIDTH, top, tables[model], workload, model)
        top += panel_height + MARGIN
    image.save(out, optimize=True)


def _draw_panel(draw: ImageDraw.ImageDraw, left: int, top: int, rows: Sequence[Row], workload: str, model: str) -> None:
    longest = max((row.rates[workload].median for row in rows if workload in row.rates), default=1.0)
    start, room = left + LABEL_WIDTH, PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH - MARGIN
    _text(draw, left, top + 14, f"{model} · {workload}", 13, INK)
    for i, row in enumerate(rows):
        y = top + TITLE + i * (BAR + GAP)
        middle = y + BAR / 2
        _text(draw, start - 8, middle, row.label, 11, INK if row.is_ours else GREY, anchor="rm")
        if workload not in row.rates:
            _text(draw, start + 6, middle, "-", 11, GREY)
            continue
        rate = row.rates[workload]
        end = start + room * rate.median / longest
        colour = COLOURS[row.precision][not row.is_ours]
        draw.rectangle([start * SCALE, y * SCALE, end * SCALE, (y + BAR) * SCALE], fill=colour)
        _text(draw, end + 6, middle, f"{rate.median:,.0f}", 11, INK)
    bottom = top + TITLE + len(rows) * (BAR + GAP) - GAP
    draw.line([start * SCALE, (top + TITLE - 4) * SCALE, start * SCALE, (bottom + 4) * SCALE], LINE, SCALE)


def _text(draw: ImageDraw.ImageDraw, x: float, y: float, text: str, size: int, colour: str, anchor: str = "lm") -> None:
    draw.text((x * SCALE, y * SCALE), text, colour, ImageFont.load_default(size * SCALE), anchor=anchor)
