"""The KV cache as a picture: one small square per block, in the colour of the request that holds it.

No two requests share a colour unless there are more of them than colours. An SVG image with one path per colour; the
two greys are translucent, so it fits a light page and a dark one. A cache of more than `MOST_CELLS` blocks is drawn
with several blocks to a square, which shows the most common of them.
"""

import base64
import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire_dashboard.snapshot_answer import Blocks, RequestState

MOST_CELLS = 4096
MOST_COLUMNS = 64
_ASPECT = 4
"""How many times wider than high a small picture is."""
_CELL = 10
BLOCK_COLOURS = (
    "#3b82d6", "#cc7a1e", "#2fa37c", "#a05bd6", "#d64545", "#2a93b5", "#a67c3d", "#d65ba7", "#6f9a2a", "#6673e0",
    "#8a7466", "#b0478f",
)  # fmt: skip
"""Of requests. Each is seen on a light page and on a dark one."""
_GREYS = {"cached": "rgba(128,128,128,0.55)", "free": "rgba(128,128,128,0.16)"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One square."""

    owner: int
    """Index into the requests, or -1."""
    state: str
    """`used`, `cached` or `free`."""
    shared: bool = False
    """Held by more than one request."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The squares in order of the block ids."""

    cells: Sequence[Cell]
    blocks_per_cell: int

    @property
    def columns(self) -> int:
        """Squares in a row."""
        return max(1, min(MOST_COLUMNS, math.ceil(math.sqrt(_ASPECT * len(self.cells)))))


def _cells(blocks: Blocks) -> list[Cell]:
    cells = []
    for block, owner in enumerate(blocks.owner):
        references = blocks.ref_count[block] if block < len(blocks.ref_count) else 0
        cached = blocks.cached[block] if block < len(blocks.cached) else 0
        state = "used" if owner >= 0 or references > 0 else "cached" if cached else "free"
        cells.append(Cell(owner, state, references > 1))
    return cells


def blocks_by_state(blocks: Blocks) -> Counter[str]:
    """How many blocks are `used`, `cached` and `free`, and how many of the used are `shared`."""
    cells = _cells(blocks)
    found = Counter(cell.state for cell in cells)
    found["shared"] = sum(cell.shared for cell in cells)
    return found


def lay_out(blocks: Blocks) -> BlockMap:
    """Decide what each square shows."""
    cells = _cells(blocks)
    size = max(1, -(-len(cells) // MOST_CELLS))
    if size > 1:
        groups = (cells[start : start + size] for start in range(0, len(cells), size))
        cells = [Counter(group).most_common(1)[0][0] for group in groups]
    return BlockMap(cells, size)


def colours_of(ids: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """A colour for each request: it keeps the one that it has, and a new one gets what the fewest have.

    Args:
        ids: of the requests that hold blocks.
        before: what the last call gave.
    """
    ids = list(ids)
    found = {id_: before[id_] for id_ in ids if id_ in before}
    taken = Counter(found.values())
    for id_ in ids:
        if id_ not in found:
            found[id_] = min(BLOCK_COLOURS, key=lambda colour: taken[colour])
            taken[found[id_]] += 1
    return found


def draw(
    blocks: Blocks, requests: Sequence[RequestState], names: Sequence[str], colours: Mapping[str, str]
) -> str:  # fmt: skip
    """The picture as HTML, with a legend of the requests that hold most.

    Args:
        blocks: the cache.
        requests: of the same snapshot.
        names: of the requests, in the same order; they may come from clients, and are escaped here.
        colours: by id, of the requests that hold blocks.
    """
    picture = lay_out(blocks)
    paths: dict[tuple[str, str], list[str]] = {}
    dots: list[str] = []
    columns = picture.columns
    for (first, last), cell in _runs(picture.cells, columns):
        x, y = first % columns * _CELL, first // columns * _CELL
        square = f"M{x} {y}h{(last - first) * _CELL - 1}v{_CELL - 1}H{x}z"
        if 0 <= cell.owner < len(requests):
            key = (colours[requests[cell.owner].id], names[cell.owner])
        else:
            key = (_GREYS["cached" if cell.state == "used" else cell.state], cell.state)
        paths.setdefault(key, []).append(square)
        if cell.shared:
            dots.extend(f"M{x + _CELL * i + 3} {y + 3}h3v3h-3z" for i in range(last - first))
    rows = -(-len(picture.cells) // columns)
    width = columns * _CELL
    drawn = "".join(
        f'<path fill="{colour}" d="{"".join(squares)}"><title>{html.escape(name)}</title></path>'
        for (colour, name), squares in paths.items()
    )
    drawn += f'<path fill="#fff" d="{"".join(dots)}"></path>' if dots else ""
    states = blocks_by_state(blocks)
    label = f"{blocks.num_blocks} blocks: {states['used']} used, {states['cached']} cached, {states['free']} free"
    # As an image: Streamlit's frontend removes SVG from a page's HTML.
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {rows * _CELL}" '
        f'width="{2 * width}" height="{2 * rows * _CELL}" shape-rendering="crispEdges">{drawn}</svg>'
    )
    note = f"Each square is {picture.blocks_per_cell} blocks. " if picture.blocks_per_cell > 1 else ""
    return (
        f'<div class="quire-block-map"><img decoding="sync" alt="{label}" style="width:100%;max-width:{2 * width}px" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'
        f"<p>{note}{_legend(blocks, requests, names, colours)}</p></div>"
    )


def _runs(cells: Sequence[Cell], columns: int) -> list[tuple[tuple[int, int], Cell]]:
    """Equal neighbours in one row of the picture: ((first, one behind the last), what they show)."""
    runs: list[tuple[tuple[int, int], Cell]] = []
    for position, cell in enumerate(cells):
        if runs and runs[-1][1] == cell and position % columns:
            runs[-1] = ((runs[-1][0][0], position + 1), cell)
        else:
            runs.append(((position, position + 1), cell))
    return runs


def _legend(
    blocks: Blocks, requests: Sequence[RequestState], names: Sequence[str], colours: Mapping[str, str]
) -> str:  # fmt: skip
    held = Counter(owner for owner in blocks.owner if 0 <= owner < len(requests))
    chips = [_chip(colours[requests[owner].id], f"{names[owner]}: {number}") for owner, number in held.most_common(12)]
    chips.append(_chip(_GREYS["cached"], "free, kept for an equal prefix"))
    chips.append(_chip(_GREYS["free"], "free"))
    if any(number > 1 for number in blocks.ref_count):
        chips.append("▫ shared by several requests")
    return " &nbsp; ".join(chips)


def _chip(colour: str, text: str) -> str:
    style = f"display:inline-block;width:0.8em;height:0.8em;background:{colour};border-radius:2px"
    return f'<span style="white-space:nowrap"><span style="{style}"></span> {html.escape(text)}</span>'
