"""LinearMethod: how the weight of a linear layer is stored, packed and applied. This one does not quantise.

A method says which tensors a layer keeps from loading to packing (`tensors`), how a rank's slice of each is read
(`read`), what the layer computes with (`pack`), and how (`apply`). It knows neither files nor modules: `Packable`
(`models/parallel.py`) slices, a `CheckpointReader` reads.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from quire_kernels import GroupedCodes, LinearWeight, linear, pack_grouped, pack_linear

from quire_engine.models.checkpoints import BAND, FLOATING, StoredTensor

Tensors = Mapping[str, StoredTensor]
"""A checkpoint's tensors, by the model's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFormat:
    """One of the tensors of a weight with N output and K input features: a matrix of blocks, each of some rows and
    columns of the weight, and of `width` elements::

        weight          row_block 1    column_block 1      width 1      [N, K]
        scales          row_block 1    column_block None   width 1      [N, 1]
        nibbles         row_block 1    column_block 2      width 1      [N, K / 2]
        their scales    row_block 1    column_block 128    width 1      [N, ⌈K / 128⌉]    cut_columns 16
        GGUF's q4_K     row_block 1    column_block 256    width 144    [N, K / 256 * 144] bytes
    """

    dtype: torch.dtype | None = None
    """Kept until packing; None: the model's."""
    stored: tuple[str, ...] = FLOATING
    """The types that it may have in the checkpoint."""
    row_block: int | None = 1
    """None: one block has all rows."""
    column_block: int | None = 1
    """None: one block has all columns."""
    width: int = 1
    cut_columns: int | None = None
    """A block may be cut at multiples of so many columns, and both slices have it then; None: it cannot be cut."""

    def index(self, shape: tuple[int, int], rows: slice, columns: slice) -> tuple[slice, slice]:
        """Where rows and columns of a weight of a shape, [N, K], are in this tensor. Raises ValueError if the slice
        cuts a block."""
        return (
            _blocks(shape[0], rows, self.row_block, self.row_block, 1, "output"),
            _blocks(shape[1], columns, self.column_block, self.cut_columns or self.column_block, self.width, "input"),
        )


def _blocks(size: int, part: slice, block: int | None, cut: int | None, width: int, kind: str) -> slice:
    if block is None or cut is None:
        return slice(0, width)
    if part.start % cut or (part.stop % cut and part.stop != size):
        raise ValueError(
            f"tensor_parallel_size: a rank has the {kind} features from {part.start} to {part.stop} of a linear layer; "
            f"its checkpoint stores them in blocks of {cut}, which cannot be cut"
        )
    return slice(part.start // block * width, -(-part.stop // block) * width)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedLinear:
    """A layer whose tensors are loaded: the input of `LinearMethod.pack`."""

    tensors: Mapping[str, torch.Tensor]
    """By name in `LinearMethod.tensors`: a rank's slices of all projections, one below the other."""
    sizes: Sequence[int]
    """Output features of each projection."""
    bias: torch.Tensor | None
    dtype: torch.dtype
    """The dtype of activations."""
    activation_bits: int
    """The fewest that activations may be quantised to: 8 as in most layers, 16 as in a head, 32 as in a router."""
    gated: bool
    activation: str
    activates: bool = False
    """The activation is applied to the result; else, if it is gated, to the gate."""
    asymmetric: bool = False
    """8 bits are enough where activations then have a zero point."""
    column_factors: torch.Tensor | None = None
    """As of `pack_linear`, for a layer that is asymmetric."""
    first_column: int = 0
    """The first column of the rank's slice of input features."""

    def by_row(self, rows: torch.Tensor) -> torch.Tensor:
        """A row for each output feature, of a tensor that has one for each projection."""
        repeats = [*self.sizes, *[1] * (len(rows) - len(self.sizes))]  # and those of padding
        return rows.repeat_interleave(torch.tensor(repeats, device=rows.device), 0)

    def pack(self, weight_NK: torch.Tensor, **options: Any) -> LinearWeight:
        """What `quire_kernels.linear` computes with; for the options see `pack_linear`."""
        return pack_linear(
            weight_NK, self.bias, dtype=self.dtype, gated=self.gated, activation=self.activation,
            activates=self.activates, **options,
        )  # fmt: skip

    def pack_codes(self, codes: GroupedCodes) -> LinearWeight:
        """The same of a weight of codes."""
        return pack_grouped(
            codes, self.bias, dtype=self.dtype, activation_bits=self.activation_bits, gated=self.gated,
            activation=self.activation, activates=self.activates,
        )  # fmt: skip


def bands(start: int, stop: int, columns: int) -> Iterator[slice]:
    """Rows, cut into bands of about `BAND` numbers."""
    height = max(1, BAND // max(columns, 1))
    return (slice(first, min(first + height, stop)) for first in range(start, stop, height))


class LinearMethod:
    """Weights in the model's dtype."""

    tensors: Mapping[str, TensorFormat] = {"weight": TensorFormat()}
    """What a layer keeps until it is packed, by the last part of its name in the checkpoint."""
    apply: ClassVar[Callable[..., torch.Tensor]] = staticmethod(linear)
    """(activations [T, K], what `pack` returned, dtype of the result or None) → [T, N]; as `quire_kernels.linear`."""
    is_joinable: ClassVar[bool] = False
    """Projections that are computed as one may have other methods beside this one: see `pack_joined`."""
    requantizes: ClassVar[bool] = False
    """Weights that a checkpoint has in codes of 4 or 8 bits are dequantised and packed by this method, where it is the
    setting's. (Else they keep their codes.)"""

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        """A slice of one of the tensors, cut into bands of rows; each may be used until the next one is read."""
        rows, *others = index
        inside: tuple[slice | int, ...] = (tensor.rows_in_file(rows.start, rows.stop), *others)
        piece = tensor.reader.read(tensor, inside[::-1] if tensor.is_transposed else inside)
        yield piece.t() if tensor.is_transposed else piece
        tensor.reader.release(piece)

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        """[N, K], the weight in the model's dtype."""
        return loaded.tensors["weight"]

    def packed_bits(self, activation_bits: int, weight: torch.Tensor) -> float | None:
        """About how many bits a weight has once it is packed, scales included; None: as many as before.

        Args:
            activation_bits: as in `LoadedLinear`.
            weight: any tensor on the device, of the model's dtype.
        """
        return None

    def pack(self, loaded: LoadedLinear) -> Any:
        """What `apply` computes with. The loaded tensors are freed afterwards. A layer of experts, an embedding and a
        head need a `quire_kernels.LinearWeight`."""
        return loaded.pack(self.dense(loaded))

    def pack_joined(self, parts: Sequence[tuple["LinearMethod", LoadedLinear]], whole: LoadedLinear) -> Any:
        """What `apply` computes with, of projections that have methods of their own: each one's method and tensors, and
        what they have in common."""
        raise NotImplementedError


class DequantizedMethod(LinearMethod):
    """Weights that are quantised in the checkpoint and become the model's dtype when they are read; `packing` packs
    them then."""

    def __init__(self, packing: LinearMethod) -> None:
        self.tensors = packing.tensors
        self.pack, self.packed_bits = packing.pack, packing.packed_bits  # type: ignore[method-assign]

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        """A weight without companions is not quantised."""
        if not tensor.companions:
            yield from super().read(tensor, index)
            return
        rows, columns = index
        for band in bands(rows.start, rows.stop, columns.stop - columns.start):
            yield self.dequantize(tensor, tensor.rows_in_file(band.start, band.stop), columns)

    @abstractmethod
    def dequantize(self, tensor: StoredTensor, rows: slice, columns: slice) -> torch.Tensor:
        """A band of a weight with companions: rows (which may have a step) and columns of the file's tensor."""
