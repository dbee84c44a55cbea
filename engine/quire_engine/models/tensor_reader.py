"""Reads a rank's slice of a stored tensor, which may be a part of a stack or of a fused one, and dequantises it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from quire_engine.models.files import StoredTensor
from quire_engine.models.weight_format import MXFP4_BLOCK
from quire_engine.system.memory import release_pages

__all__ = ["TensorReader", "dequantize_mxfp4"]

BAND = 1 << 22
"""Numbers that are dequantised at a time, so that temporaries are small beside a matrix."""
FP4 = torch.tensor([sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""The numbers of four bits: a sign, two bits of exponent and one of mantissa."""
PAIRS = torch.stack((FP4.repeat(16), FP4.repeat_interleave(16)), dim=1).view(torch.int64).flatten()
"""By byte, the two numbers in it, in float32, as one: 4 million bytes are looked up in 2 ms so, and in 48 as pairs."""
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""By byte, the power of 2 that it is as a scale."""


def dequantize_mxfp4(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits times the powers of 2 of their blocks (OCP Microscaling Formats 1.0, section 6.3).

    Args:
        blocks_NGB: uint8, two numbers a byte, the lower bits first.
        scales_NG: uint8.

    Returns:
        [N, G * 2 * B] float32, exact. A scale of 255 is no number there; here, too, none of its block is finite.
    """
    pairs = PAIRS.index_select(0, blocks_NGB.flatten().int())
    numbers = pairs.view(torch.float32).view(*scales_NG.shape, -1)
    return numbers.mul_(POWERS[scales_NG.int()].unsqueeze(-1)).flatten(1)


class TensorReader(contextlib.AbstractContextManager["TensorReader"]):
    """Opens each file once, and closes all when it is left. Pages that have been read are released."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def bands(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        """A slice of a tensor, cut into bands of rows; each may be used until the next one is asked for.

        Args:
            tensor: of one of the files.
            index: one slice per dimension.

        Raises:
            SafetensorError: the file is damaged.
        """
        if tensor.scales is not None:
            yield from self._mxfp4_bands(tensor, tensor.scales, *index)
            return
        rows, *others = index
        inside: tuple[slice | int, ...] = (_rows_in_file(tensor, rows.start, rows.stop), *others)
        piece = self._slice(tensor, inside[::-1] if tensor.is_transposed else inside)
        yield piece.t() if tensor.is_transposed else piece
        _release(piece)

    def _mxfp4_bands(
        self, tensor: StoredTensor, scales: StoredTensor, rows: slice, columns: slice
    ) -> Iterator[torch.Tensor]:
        groups = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        inside = slice(columns.start - groups.start * MXFP4_BLOCK, columns.stop - groups.start * MXFP4_BLOCK)
        height = max(1, BAND // (columns.stop - columns.start))
        for first in range(rows.start, rows.stop, height):
            band = _rows_in_file(tensor, first, min(rows.stop, first + height))
            blocks_NGB = self._slice(tensor, (band, groups, slice(0, MXFP4_BLOCK // 2)))
            scales_NG = self._slice(scales, (band, groups), tensor.matrix)
            yield dequantize_mxfp4(blocks_NGB, scales_NG)[:, inside]
            _release(blocks_NGB)
            _release(scales_NG)

    def _slice(self, tensor: StoredTensor, inside: tuple[slice | int, ...], matrix: int | None = None) -> torch.Tensor:
        """A view of the file's tensor.

        Args:
            tensor: names it.
            inside: where in it, or in one of its matrices.
            matrix: which, if it is not the tensor's own.
        """
        if tensor.path not in self._files:
            self._files[tensor.path] = self._stack.enter_context(safe_open(tensor.path, framework="pt"))
        matrix = tensor.matrix if matrix is None else matrix
        piece: torch.Tensor = self._files[tensor.path].get_slice(tensor.name)[
            inside if matrix is None else (matrix, *inside)
        ]
        return piece


def _rows_in_file(tensor: StoredTensor, start: int, stop: int) -> slice:
    begin, end = (tensor.first_row + tensor.row_step * row for row in (start, stop))
    return slice(begin, end, tensor.row_step)


def _release(tensor: torch.Tensor) -> None:
    """Release the file's pages that a tensor is a view of."""
    if tensor.numel():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        release_pages(tensor.data_ptr(), elements * tensor.itemsize)
