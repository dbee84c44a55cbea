"""Weights of 4 or 8 bits in groups of columns, as AWQ, GPTQ, AutoRound and compressed-tensors publish them, in words of
32 bits. Nothing is rounded on the way to `quire_kernels.GroupedCodes`. With 4 bits::

    here                AWQ                  GPTQ                 compressed-tensors
    weight              qweight [K, N / 8]   qweight [K / 8, N]   weight_packed     [N, K / 8]     8 codes a word
    weight_scale        scales  [G, N]       scales  [G, N]       weight_scale      [N, G]
    weight_zero_point   qzeros  [G, N / 8]   qzeros  [G, N / 8]   weight_zero_point [N / 8, G]     likewise
    weight_g_idx                             g_idx   [K]          weight_g_idx      [K]            the column's group

The first code of a word is in its lowest bits. AWQ has output features 0 2 4 6 1 3 5 7 of eight in this order.

Until a layer is packed, its codes are bytes, [N, K / 2] with the first of two in the lower bits. A rank's slice may
begin inside of a group, and then has its scale.

With act-order (GPTQ's `desc_act`) a group's columns are anywhere in the row. The packed weight has them side by side,
and activations are brought into the same order before each product.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from quire_kernels import GroupedCodes, LinearWeight, LoraRows, linear, stack_linear, store_columns
from quire_kernels.cpu import uses_triton
from quire_kernels.grouped import GROUP_SIZES, unpack_pairs

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, StoredTensor
from quire_engine.models.checkpoints.weight_format import UNIT, WeightFormat
from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat, Tensors, bands

AWQ_NAMES = {"qweight": "weight", "scales": "weight_scale", "qzeros": "weight_zero_point"}
NAMES = {
    "awq": AWQ_NAMES,
    "gptq": {**AWQ_NAMES, "g_idx": "weight_g_idx"},
    "pack-quantized": {
        name: name.replace("_packed", "")
        for name in ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    },
}
"""By method, what the tensors of a checkpoint are called here."""
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""By bytes."""


class Grouped(LinearMethod):
    """Codes, and a scale for some columns each.

    Args:
        packing: of the setting. It packs the dequantised weight if it `requantizes`, and where no kernel reads codes:
            with a number of columns that 16 does not divide, in a router, and on a GPU.
        bits: of a code.
        group_size: columns that share a scale; None: all of a row.
        zero: subtracted from each value.
        table: uint8 [16], the values of codes; None: the codes are the values.
    """

    is_joinable = True
    code_types: ClassVar[tuple[str, ...]] = ("U8",)
    """In the checkpoint; and those of scales."""
    scale_types: ClassVar[tuple[str, ...]] = FLOATING

    def __init__(
        self, packing: LinearMethod, bits: int, group_size: int | None, zero: int = 0, table: torch.Tensor | None = None
    ) -> None:
        self.packing, self.bits, self.group_size, self.zero, self.table = packing, bits, group_size, zero, table
        self.tensors: Mapping[str, TensorFormat] = {
            "weight": TensorFormat(dtype=torch.uint8, stored=self.code_types, column_block=8 // bits),
            "weight_scale": self.of_groups(torch.float32, self.scale_types),
        }

    def of_groups(self, dtype: torch.dtype, stored: tuple[str, ...]) -> TensorFormat:
        """The format of a tensor that has a number for each group."""
        return TensorFormat(dtype=dtype, stored=stored, column_block=self.group_size, cut_columns=UNIT)

    def codes(self, loaded: LoadedLinear) -> torch.Tensor:
        """uint8 [N, K]."""
        stored = loaded.tensors["weight"]
        return unpack_pairs(stored) if self.bits == 4 else stored

    def orders(self, loaded: LoadedLinear) -> list[torch.Tensor | None]:
        """For each projection its columns in the order of their groups; None: as they are."""
        return [None] * len(loaded.sizes)

    def kernel_group(self, columns: int, first_column: int) -> int | None:
        """Columns that share a scale in the packed weight; None: it cannot be packed."""
        common = columns if self.group_size is None else math.gcd(columns, self.group_size, first_column)
        return next((one for one in reversed(GROUP_SIZES) if common % one == 0), None)

    def _group_size(self, loaded: LoadedLinear, columns: int) -> int:
        return self.group_size or loaded.first_column + columns

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        codes_NK, scales_NG = self.codes(loaded), loaded.tensors["weight_scale"]
        zeros_NG, out_NK = loaded.tensors.get("weight_zero_point"), torch.zeros_like(codes_NK, dtype=loaded.dtype)
        places_K, first = torch.arange(codes_NK.shape[1], device=codes_NK.device), 0
        group = self._group_size(loaded, len(places_K))
        for size, order in zip(loaded.sizes, self.orders(loaded), strict=True):
            ordered_K = places_K + loaded.first_column % group if order is None else order.argsort()
            groups_K = ordered_K // group
            for band in bands(first, first + size, len(groups_K)):
                values = codes_NK[band] if self.table is None else self.table.to(codes_NK.device)[codes_NK[band].int()]
                numbers = values.float() - self.zero
                if zeros_NG is not None:
                    numbers -= zeros_NG[band][:, groups_K]
                out_NK[band] = numbers.mul_(scales_NG[band][:, groups_K])
            first += size
        return out_NK

    def packed_bits(self, activation_bits: int, weight: torch.Tensor) -> float | None:
        if activation_bits > 16 or self.packing.requantizes or uses_triton(weight):
            return self.packing.packed_bits(activation_bits, weight) or 8 * weight.itemsize
        return None

    def pack(self, loaded: LoadedLinear) -> Any:
        codes, (order, *others) = loaded.tensors["weight"], self.orders(loaded)
        columns, are_paired = codes.shape[1] * 8 // self.bits, self.bits == 4 and order is None
        group = self.kernel_group(columns, loaded.first_column)
        is_one = all(
            torch.equal(one, order) if one is not None and order is not None else one is order for one in others
        )
        is_readable = loaded.activation_bits <= 16 and not uses_triton(codes)
        if group is None or not is_one or not is_readable or self.packing.requantizes:
            return self.packing.pack(dataclasses.replace(loaded, tensors={"weight": self.dense(loaded)}))
        size, num_groups = self._group_size(loaded, columns), columns // group
        first = loaded.first_column % size // group

        def spread(values_NG: torch.Tensor) -> torch.Tensor:
            return values_NG[:, :, None].expand(-1, -1, size // group).flatten(1)[:, first : first + num_groups]

        zeros = loaded.tensors.get("weight_zero_point")
        packed = loaded.pack_codes(GroupedCodes(
            codes=codes if order is None else self.codes(loaded)[:, order], bits=self.bits, group_size=group,
            are_paired=are_paired,
            scales=spread(loaded.tensors["weight_scale"]), zero=self.zero,
            zeros=None if zeros is None else spread(zeros), table=self.table,
        ))  # fmt: skip
        return packed if order is None else PermutedWeight(packed, order.argsort())

    def pack_joined(self, parts: Sequence[tuple[LinearMethod, LoadedLinear]], whole: LoadedLinear) -> Any:
        packed = [] if whole.gated else [method.pack(loaded) for method, loaded in parts]
        if packed and not any(isinstance(one, PermutedWeight) for one in packed):
            return stack_linear(packed)
        weight_NK = torch.cat([method.dense(loaded) for method, loaded in parts])
        return self.packing.pack(dataclasses.replace(whole, tensors={"weight": weight_NK}))


class PackedWords(Grouped):
    """Codes in words of 32 bits."""

    code_types = ("I32",)

    def __init__(self, stored: WeightFormat, packing: LinearMethod) -> None:
        super().__init__(packing, stored.bits, stored.group_size, 1 << stored.bits - 1 if stored.is_symmetric else 0)
        self.stored, self.per_word = stored, 32 // stored.bits
        if not stored.is_symmetric:
            self.tensors = {**self.tensors, "weight_zero_point": self.of_groups(torch.uint8, ("I32", "I8"))}

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        kind = NAMES[self.stored.method].get(tensor.name.rpartition(".")[2])
        if kind is None:  # a bias
            yield from super().read(tensor, index)
            return
        rows, columns = tensor.rows_in_file(index[0].start, index[0].stop), index[1]
        if kind == "weight":
            yield from self._read_codes(tensor, rows, columns)
        elif kind == "weight_zero_point":
            yield self._read_zeros(tensor, rows, columns)
        else:
            is_by_row = self.stored.method == "pack-quantized"
            piece = tensor.reader.read(tensor, (rows, columns) if is_by_row else (columns, rows))
            yield piece if is_by_row else piece.t()
            tensor.reader.release(piece)

    def _read_codes(self, tensor: StoredTensor, rows: slice, columns: slice) -> Iterator[torch.Tensor]:
        """Columns of bytes."""
        if self.stored.method == "awq":
            yield from self._read_awq_codes(tensor, rows, columns)
            return
        words = _around(columns, 4)
        is_by_row = self.stored.method == "pack-quantized"
        piece = tensor.reader.read(tensor, (rows, words) if is_by_row else (words, rows))
        cut = slice(columns.start - 4 * words.start, columns.stop - 4 * words.start)
        for band in bands(0, rows.stop - rows.start, 2 * (columns.stop - columns.start)):
            words_NW = piece[band] if is_by_row else _transposed(piece[:, band])
            yield _bytes(words_NW)[:, cut]
        tensor.reader.release(piece)

    def _read_awq_codes(self, tensor: StoredTensor, rows: slice, columns: slice) -> Iterator[torch.Tensor]:
        words = _around(rows, 8)
        piece_KW = tensor.reader.read(tensor, (slice(2 * columns.start, 2 * columns.stop), words))
        for band in bands(words.start, words.stop, 16 * (columns.stop - columns.start)):
            codes_KN = self._unpack(piece_KW[:, band.start - words.start : band.stop - words.start])
            pairs_BN = codes_KN[::2] | (codes_KN[1::2] << 4)
            # Several pairs of a row at once, in the order of the rows: transposing bytes is slow.
            each = math.gcd(len(pairs_BN), 4)
            together = pairs_BN.view(-1, each, pairs_BN.shape[1] // 8, 2, 4).permute(0, 2, 4, 3, 1).flatten(1)
            pairs_NB = _bytes(_transposed(together.view(WORDS[each])))
            yield pairs_NB[max(rows.start - 8 * band.start, 0) : rows.stop - 8 * band.start]
        tensor.reader.release(piece_KW)

    def _read_zeros(self, tensor: StoredTensor, rows: slice, groups: slice) -> torch.Tensor:
        """[N, G] uint8, from 0 on."""
        if tensor.dtype == "I8":
            return (tensor.reader.read(tensor, (rows, groups)).int() + (1 << self.bits - 1)).to(torch.uint8)
        words = _around(rows, self.per_word)
        inside = (words, groups) if self.stored.method == "pack-quantized" else (groups, words)
        piece = tensor.reader.read(tensor, inside)
        zeros_GN = self._in_order(self._unpack(piece.t() if self.stored.method == "pack-quantized" else piece))
        first = rows.start - words.start * self.per_word
        zeros_GN = zeros_GN[:, first : first + rows.stop - rows.start]
        return ((zeros_GN + self.stored.zero_shift) & (1 << self.bits) - 1).t()

    def _unpack(self, words_MW: torch.Tensor) -> torch.Tensor:
        """int32 → uint8, one code each, as they lie in the words."""
        codes = _bytes(words_MW)
        return unpack_pairs(codes) if self.bits == 4 else codes

    def _in_order(self, values_MN: torch.Tensor) -> torch.Tensor:
        """The output features in their order."""
        if self.stored.method != "awq":
            return values_MN
        return values_MN.view(len(values_MN), -1, 2, 4).transpose(2, 3).flatten(1)


@dataclass(frozen=True, slots=True)
class PermutedWeight:
    """A packed weight whose input features are in an order of its own."""

    weight: LinearWeight
    columns: torch.Tensor
    """int64, where each input feature goes."""


def permuted_linear(
    x_TK: torch.Tensor,
    weight: LinearWeight | PermutedWeight,
    out_dtype: torch.dtype | None = None,
    lora: LoraRows | None = None,
) -> torch.Tensor:
    """As `quire_kernels.linear`, of activations in the order of the checkpoint."""
    if not isinstance(weight, PermutedWeight):
        return linear(x_TK, weight, out_dtype, lora=lora)
    permuted_TK = store_columns(x_TK, weight.columns)
    return linear(permuted_TK, weight.weight, out_dtype, lora=lora, lora_x_TK=None if lora is None else x_TK)


class ActOrder(PackedWords):
    """Columns that belong to groups as `g_idx` says. If `is_plain`, the packed weight must take activations in their
    own order, as an expert's; so it is dequantised."""

    apply = staticmethod(permuted_linear)

    def __init__(self, stored: WeightFormat, packing: LinearMethod, is_plain: bool) -> None:
        super().__init__(stored, packing)
        self.is_dequantized = is_plain and stored.has_act_order and stored.group_size is not None
        order = TensorFormat(dtype=torch.int32, stored=("I32", "I64"), row_block=None)
        self.tensors = {**self.tensors, "weight_g_idx": order}

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        if not tensor.name.endswith("g_idx"):
            yield from super().read(tensor, index)
            return
        size, columns, where = tensor.shape[1], index[1], f"{tensor.path}: tensor {tensor.name}"
        groups_K = tensor.reader.read(tensor, (slice(0, size),)).long()
        in_order_K = torch.arange(size) // (self.group_size or size)
        if not torch.equal(groups_K.sort().values, in_order_K):
            raise CheckpointError(f"{where} must give each group {self.group_size or size} of the {size} columns")
        if not torch.equal(groups_K, in_order_K):
            if not self.stored.has_act_order:
                raise CheckpointError(
                    f"{where} has columns in another order, and quantization_config says no such thing"
                )
            if columns.stop - columns.start < size:
                raise CheckpointError(
                    f"{where}: tensor_parallel_size cuts the input features of this layer, and with act-order its "
                    "groups; it must be 1 for this checkpoint"
                )
        yield groups_K[None, columns]

    def orders(self, loaded: LoadedLinear) -> list[torch.Tensor | None]:
        rows = loaded.tensors["weight_g_idx"][: len(loaded.sizes)]
        return [row.argsort(stable=True) if bool((row.diff() < 0).any()) else None for row in rows]

    def kernel_group(self, columns: int, first_column: int) -> int | None:
        return None if self.is_dequantized else super().kernel_group(columns, first_column)


def gather_words(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """Tensors by our names, with the shapes that they have here."""
    names, gathered = NAMES[stored.method], {}
    codes_name = next(iter(names))
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        codes, ours = tensors.get(f"{module}.{codes_name}"), names.get(kind)
        if codes is None or ours is None:
            gathered[name] = tensor
        elif not (ours == "weight_zero_point" and stored.is_symmetric) and not (
            ours == "weight_g_idx" and stored.method == "pack-quantized" and not stored.has_act_order
        ):
            gathered[f"{module}.{ours}"] = dataclasses.replace(tensor, shape=_shape(stored, ours, tensor, codes))
    return gathered


def _shape(stored: WeightFormat, kind: str, tensor: StoredTensor, codes: StoredTensor) -> tuple[int, int]:
    if len(codes.shape) != 2 or (stored.method == "awq" and codes.shape[0] % 2):
        raise CheckpointError(
            f"{codes.path}: tensor {codes.name} has shape {codes.shape}; it must be a matrix of words"
        )
    (first, second), per_word = codes.shape, 32 // stored.bits
    rows, columns = {
        "awq": (second * per_word, first), "gptq": (second, first * per_word),
        "pack-quantized": (first, second * per_word),
    }[stored.method]  # fmt: skip
    groups = -(-columns // (stored.group_size or max(columns, 1)))
    word_rows, is_by_row = -(-rows // per_word), stored.method == "pack-quantized"
    if kind == "weight":
        return rows, columns * stored.bits // 8
    if kind == "weight_g_idx":
        shape: tuple[int, ...] = (columns,)
    elif kind == "weight_zero_point" and tensor.dtype != "I8":
        shape = (word_rows, groups) if is_by_row else (groups, word_rows)
    else:
        shape = (rows, groups) if is_by_row else (groups, rows)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; {codes.name} and quantization_config ask "
            f"for {shape}"
        )
    return (1, columns) if kind == "weight_g_idx" else (rows, groups)


def _bytes(words_MW: torch.Tensor) -> torch.Tensor:
    """uint8 [M, W times the bytes of a word]."""
    words_MW = words_MW.contiguous()
    if words_MW.stride(-1) != 1:  # one column is contiguous with any stride, which `view` rejects
        words_MW = words_MW.clone(memory_format=torch.contiguous_format)
    return words_MW.view(torch.uint8)


def _transposed(matrix_MN: torch.Tensor) -> torch.Tensor:
    """[N, M], without gaps; of a part of a matrix torch would copy element by element."""
    return matrix_MN.contiguous().t().contiguous()


def _around(part: slice, size: int) -> slice:
    return slice(part.start // size, -(-part.stop // size))
