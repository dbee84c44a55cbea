"""The KV cache as a picture: one small square per block, in the colour of the request that holds it.

No two requests share a colour unless there are more of them than colours. The picture is a PNG with a palette. Its two
greys are translucent, so that it fits a light page and a dark one. A cache of more than `MOST_CELLS` blocks is drawn
with several blocks to a square, which shows the one that is used the most.
"""

import base64
import html
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageColor
from quire_client.snapshot import Blocks, RequestState

MOST_CELLS = 32_768
_MOST_COLUMNS = 256
_ASPECT = 4
"""How many times wider than high a picture is."""
_MOST_WIDTH, _MOST_PIXELS = 1280, 20
"""Of the picture and of a square in it."""
BLOCK_COLOURS = (
    "#3b82d6", "#cc7a1e", "#2fa37c", "#a05bd6", "#d64545", "#2a93b5", "#a67c3d", "#d65ba7", "#6f9a2a", "#6673e0",
    "#8a7466", "#b0478f",
)  # fmt: skip
"""Of requests. Each is seen on a light page and on a dark one."""
_GREYS = {"cached": "rgba(128,128,128,0.55)", "free": "rgba(128,128,128,0.16)"}
_GAP, _FREE, _CACHED, _SHARED, _FIRST_OWNER = range(5)
"""Colours in the palette. From the last one on are those of the requests."""
_PALETTE = ("#000000", "#808080", "#808080", "#ffffff")
_ALPHAS = bytes((0, 41, 140))

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """What each square shows, in order of the block ids."""

    owner: _Column
    """Index into the requests, or -1."""
    state: _Column
    """0 free, 1 cached, 2 used, 3 shared: used by more than one request."""
    blocks_per_cell: int = 1

    @property
    def columns(self) -> int:
        """Squares in a row."""
        return max(1, min(_MOST_COLUMNS, math.ceil(math.sqrt(_ASPECT * len(self.owner)))))


def _map(blocks: Blocks) -> BlockMap:
    owner = np.asarray(blocks.owner, np.int64)
    references, cached = (np.zeros(len(owner), np.int64) for _ in range(2))
    references[: len(blocks.ref_count)] = blocks.ref_count[: len(owner)]
    cached[: len(blocks.cached)] = blocks.cached[: len(owner)]
    state = np.where((owner >= 0) | (references > 0), 2, np.minimum(cached, 1))
    return BlockMap(owner, np.where(references > 1, 3, state))


def blocks_by_state(blocks: Blocks) -> Counter[str]:
    """How many blocks are `used`, `cached` and `free`, and how many of the used are `shared`."""
    free, cached, used, shared = np.bincount(_map(blocks).state, minlength=4).tolist()
    return Counter(used=used + shared, cached=cached, free=free, shared=shared)


def lay_out(blocks: Blocks) -> BlockMap:
    """Decide what each square shows."""
    found = _map(blocks)
    size = max(1, -(-len(found.owner) // MOST_CELLS))
    if size == 1:
        return found
    starts = np.arange(0, len(found.owner), size)
    states = np.full(len(starts) * size, -1)
    states[: len(found.state)] = found.state
    shown = starts + states.reshape(-1, size).argmax(axis=1)
    return BlockMap(found.owner[shown], found.state[shown], size)


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
    shown = list(dict.fromkeys(colours[request.id] for request in requests if request.id in colours))
    places = [_FIRST_OWNER + shown.index(colours[one.id]) if one.id in colours else _CACHED for one in requests]
    image = _image(picture, places)
    image.putpalette([part for colour in (*_PALETTE, *shown) for part in ImageColor.getrgb(colour)])
    file = io.BytesIO()
    image.save(file, "PNG", transparency=_ALPHAS, compress_level=1)
    states = blocks_by_state(blocks)
    label = f"{blocks.num_blocks} blocks: {states['used']} used, {states['cached']} cached, {states['free']} free"
    note = f"Each square is {picture.blocks_per_cell} blocks. " if picture.blocks_per_cell > 1 else ""
    return (
        f'<div class="quire-block-map"><img decoding="sync" alt="{label}" style="width:100%;max-width:{image.width}px" '
        f'src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
        f"<p>{note}{_legend(blocks, requests, names, colours)}</p></div>"
    )


def _image(picture: BlockMap, places: Sequence[int]) -> Image.Image:
    """The squares, without the palette.

    Args:
        picture: what they show.
        places: of each request's colour in the palette.
    """
    columns = picture.columns
    size = max(1, min(_MOST_PIXELS, _MOST_WIDTH // columns))
    # The last one is for blocks that no request of the snapshot holds.
    owners = np.array([*places, _CACHED], np.uint8)
    owner = np.where(picture.owner < len(places), picture.owner, -1)
    is_used = picture.state >= 2
    cells = np.where(is_used, owners[owner], np.where(picture.state == 1, _CACHED, _FREE)).astype(np.uint8)
    missing = -len(cells) % columns if len(cells) else columns
    cells, is_shared = (np.pad(one, (0, missing)).reshape(-1, columns) for one in (cells, picture.state == 3))
    pixels = cells.repeat(size, axis=0).repeat(size, axis=1)
    for row in range(size // 3, size // 3 + size // 4):
        for column in range(size // 3, size // 3 + size // 4):
            pixels[row::size, column::size][is_shared] = _SHARED
    pixels[size - 1 :: size] = pixels[:, size - 1 :: size] = _GAP
    return Image.fromarray(pixels)


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
