"""Which tiles an image is cut into by LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/) and
LLaVA-OneVision (https://arxiv.org/abs/2408.03326, section 3.2)."""

import math
from collections.abc import Sequence


def best_resolution(height: int, width: int, points: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The height and width of those given that keep most of an image's pixels, and of these the smallest."""

    def merit(point: Sequence[int]) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - point[0] * point[1]

    rows, columns = max(points, key=merit)  # the first of equal ones
    return rows, columns


def unpadded(
    size: Sequence[int], points: Sequence[Sequence[int]], tile_size: int, side: int
) -> tuple[tuple[int, int], slice, slice]:
    """Rows and columns of an image's tiles; and which rows and columns of their states are not padding.

    Args:
        size: height and width of the image.
        points: heights and widths that images are resized to, with padding.
        tile_size: pixels of a tile's side.
        side: states of the same.
    """
    height, width = size
    tiles = tuple(number // tile_size for number in best_resolution(height, width, points))
    rows, columns = tiles[0] * side, tiles[1] * side
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return (tiles[0], tiles[1]), slice(padding, rows - padding), slice(0, columns)
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return (tiles[0], tiles[1]), slice(0, rows), slice(padding, columns - padding)


def shrunken(rows: int, columns: int, max_tiles: int, side: int) -> tuple[int, int]:
    """Rows and columns of states that an image's tiles are resized to, if they have many more than `max_tiles` tiles of
    `side`² states; else those given."""
    ratio = math.sqrt(rows * columns / (max_tiles * side**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
