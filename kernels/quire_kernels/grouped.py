"""Weights of 4 or 8 bits whose rows are cut into groups with a scale each: what published quantisations are made of.

::

    w[n, k] = scale[n, g] · (value(code[n, k]) - zero) - offset[n, g]          g = k // group_size

    GGUF's Q4_0      4 bits, groups of 32, zero 8                  Q8_0      8 bits, codes are the int8 numbers + 128
    GGUF's Q4_1      4 bits, groups of 32, offsets                 GPTQ, AWQ 4 bits, offset = scale · zeros[n, g]
    GGUF's Q4_K      4 bits, groups of 32; int8 scales and offsets, times a float16 for each 256 columns
    mxfp4, IQ4_NL    4 bits, values from a table of 16

Nothing is rounded on the way to the packed weight: `GroupedCodes.dequantize` and what `linear` multiplies by are the
same numbers. `quantize_grouped` quantises a weight to codes of 4 bits.
"""

from dataclasses import dataclass

import torch

from quire_kernels.activation import ACTIVATIONS
from quire_kernels.cpu import (
    FLOATS,
    PANEL,
    SUPER_GROUP,
    launch,
    library,
    library_for,
    pointer,
    structure,
    uses_triton,
    with_dense_rows,
)
from quire_kernels.linear import (
    LinearCall,
    LinearWeight,
    check_activates,
    pack_linear,
    pack_words,
    padded,
    panel_rows,
)

GROUP_SIZES = (16, 32, 64, 128)
_GroupSearchCall = structure("GroupSearchCall")
ZERO = 8
STEPS = sorted(range(-9, 10), key=abs)
"""The grid's steps of 0.1 around the factor that gives a group's largest number the code 0; of equals, the first."""
BAND = 1 << 20
"""Numbers that plain torch quantises at a time, so that temporaries are small compared with the weight."""
LARGEST_SCALE = torch.finfo(torch.float16).max


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedCodes:
    """A weight [N, K] as codes, scales and offsets. Raises ValueError or TypeError if they do not fit each other."""

    codes: torch.Tensor
    """uint8 [N, K], one code each: below 16 if there are 4 bits. Or `are_paired`."""
    bits: int
    """4 or 8."""
    group_size: int
    """One of `GROUP_SIZES`; divides K. (Larger groups: repeat their scales.)"""
    scales: torch.Tensor
    """[N, K / group_size] float16, bfloat16 or float32; or int8, with `super_scales`."""
    zero: int = 0
    """Subtracted from each value, 0 to 255."""
    zeros: torch.Tensor | None = None
    """uint8 [N, K / group_size]: the offsets are `scale · zeros`. Not together with `offsets`."""
    offsets: torch.Tensor | None = None
    """Subtracted from each product: float16, bfloat16 or float32; or int8, with `super_offsets`."""
    super_scales: torch.Tensor | None = None
    """[N, K / 256] float16: a group's scale is its number in `scales` times this."""
    super_offsets: torch.Tensor | None = None
    """Likewise, of offsets."""
    table: torch.Tensor | None = None
    """uint8 [16]: value(code) = table[code]; of 4 bits only. None: the code itself."""
    are_paired: bool = False
    """The codes have 4 bits, and two are in a byte, the first in the lower bits: [N, K / 2]."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if self.codes.dtype != torch.uint8 or self.bits not in (4, 8) or not 0 <= self.zero <= 255:
            raise TypeError(f"codes are {self.codes.dtype} of {self.bits} bits with zero {self.zero}; see the docs")
        if self.group_size not in GROUP_SIZES or columns % self.group_size:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(f"group_size is {self.group_size} of {columns} columns; it must divide them: {sizes}")
        if self.zeros is not None and self.offsets is not None:
            raise ValueError("there are both zeros and offsets; there must be at most one of the two")
        if self.table is not None and (self.bits != 4 or self.table.shape != (16,)):
            raise ValueError("a table is of 4 bits, and has 16 values")
        if self.are_paired and self.bits != 4:
            raise ValueError("codes of 8 bits are paired; only those of 4 bits can be")
        groups, supers = (rows, columns // self.group_size), (rows, columns // SUPER_GROUP)
        for name, tensor, shape in (
            ("scales", self.scales, groups), ("zeros", self.zeros, groups),
            ("offsets", self.offsets, groups), ("super_scales", self.super_scales, supers),
            ("super_offsets", self.super_offsets, supers),
        ):  # fmt: skip
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
        for fine, coarse in ((self.scales, self.super_scales), (self.offsets, self.super_offsets)):
            is_fine = fine is not None and fine.dtype == torch.int8
            if is_fine != (coarse is not None) or (is_fine and columns % SUPER_GROUP):
                raise ValueError(f"int8 scales need super-scales of {SUPER_GROUP} columns each; others have none")

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return len(self.codes), self.codes.shape[1] * (1 + self.are_paired)

    def group_scales(self) -> torch.Tensor:
        """[N, G] float32, exact."""
        return _times_super(self.scales, self.super_scales)

    def group_offsets(self) -> torch.Tensor | None:
        """[N, G] float32, exact for zeros of 8 bits and scales of 16."""
        if self.zeros is not None:
            return self.group_scales() * self.zeros
        return None if self.offsets is None else _times_super(self.offsets, self.super_offsets)

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32; the numbers of the `gguf` package, of AWQ's and GPTQ's reference code, bit for bit."""
        codes = unpack_pairs(self.codes) if self.are_paired else self.codes
        values = codes if self.table is None else self.table[codes.int()]
        grouped = (values.float() - self.zero).view(len(values), -1, self.group_size)
        scales = self.group_scales().unsqueeze(-1)
        if self.zeros is not None:
            return ((grouped - self.zeros.unsqueeze(-1)) * scales).flatten(1)
        result, offsets = grouped * scales, self.group_offsets()
        return (result if offsets is None else result - offsets.unsqueeze(-1)).flatten(1)


def unpack_pairs(codes_NB: torch.Tensor) -> torch.Tensor:
    """uint8 [N, B], two codes in a byte, the lower bits first → [N, 2 · B]."""
    wide = codes_NB.to(torch.int16)
    return (wide | (wide << 4)).bitwise_and_(0x0F0F).view(torch.uint8)


def _times_super(fine_NG: torch.Tensor, coarse_NS: torch.Tensor | None) -> torch.Tensor:
    if coarse_NS is None:
        return fine_NG.float()
    each = fine_NG.shape[1] // coarse_NS.shape[1]
    return fine_NG.float() * coarse_NS.float().repeat_interleave(each, dim=1)


def pack_grouped(
    codes: GroupedCodes,
    bias_N: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation_bits: int = 8,
    gated: bool = False,
    activation: str = "silu",
    activates: bool = False,
) -> LinearWeight:
    """Convert a weight of codes to the form that `linear` reads fastest. Experts, embeddings and heads take it too.

    Args:
        codes: the weight; may be freed afterwards.
        bias_N: added to the result.
        dtype: of activations.
        activation_bits: that activations are quantised to, for each token and 128 columns: 8, or 16.
        gated: see `pack_linear`, also for the next two.
        activation: likewise.
        activates: likewise.
    """
    if library() is None or uses_triton(codes.codes) or codes.codes.device.type != "cpu" or dtype not in FLOATS:
        weight_NK = codes.dequantize().to(dtype)
        return pack_linear(weight_NK, bias_N, dtype=dtype, gated=gated, activation=activation, activates=activates)
    check_activates(activation, gated, activates)
    out_features, in_features = codes.shape
    rows = panel_rows(out_features, gated)
    kind = 8 // codes.bits * 4
    data = torch.empty(len(rows) // PANEL, in_features // kind, PANEL, 4, dtype=torch.uint8)
    code_form = 0 if codes.bits == 8 else 2 if codes.are_paired else 1  # `CodeForm` of kernels/csrc/calls.h
    pack_words(codes.codes.contiguous().view(torch.float32), rows, data, code_form=code_form)
    scale_form, scales = _group_form(codes.scales)
    zeros = codes.offsets if codes.zeros is None else codes.zeros
    offset_form, offsets = (0, None) if zeros is None else _group_form(zeros)
    scales, bias = _by_panel(scales, rows), padded(bias_N, rows)
    offsets = None if offsets is None else _by_panel(offsets, rows)
    supers = [None if one is None else _by_panel(one.half(), rows) for one in (codes.super_scales, codes.super_offsets)]
    table = None if codes.table is None else codes.table.to(torch.uint8).contiguous()
    call = LinearCall(
        weight=data.data_ptr(), bias=pointer(bias), in_features=in_features, out_features=out_features, kind=kind,
        activation=ACTIVATIONS[activation] if gated or activates else 0, is_gated=gated,
        x_parts=activation_bits // 8, table=pointer(table),
        group_scales=scales.data_ptr(), group_offsets=pointer(offsets), super_scales=pointer(supers[0]),
        super_offsets=pointer(supers[1]), group_size=codes.group_size, zero=codes.zero, scale_form=scale_form,
        offset_form=offset_form,
    )  # fmt: skip
    extra = tuple(one for one in (*supers, table) if one is not None)
    parts = (data, bias, scales, offsets, call, activation_bits, codes.group_size, extra)
    return LinearWeight(out_features, in_features, gated, activation, dtype, *parts, activates=activates)


def _group_form(values_NG: torch.Tensor) -> tuple[int, torch.Tensor]:
    """`GroupForm` of kernels/csrc/calls.h, and the values in it; float16 where that is exact."""
    if values_NG.dtype in (torch.int8, torch.uint8):
        return (3 if values_NG.dtype == torch.int8 else 4), values_NG
    half_NG = values_NG.half()
    is_exact = values_NG.dtype == torch.float16 or torch.equal(half_NG.float(), values_NG.float())
    return (1, half_NG) if is_exact else (2, values_NG.float())


def _by_panel(values_NG: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[panels, G, 32], zeros for padding."""
    padded_NG = torch.cat((values_NG, values_NG.new_zeros(1, values_NG.shape[1])))
    return padded_NG[rows].view(-1, PANEL, values_NG.shape[1]).transpose(1, 2).contiguous()


def quantize_grouped(
    weight_NK: torch.Tensor, group_size: int, importance_K: torch.Tensor | None = None
) -> GroupedCodes:
    """Quantise a weight of finite numbers to 4 bits, symmetrically: `w = scale · (code - 8)`. Raises ValueError if the
    group size does not divide K, or `importance_K` has another shape.

    Each group has the scale with the least squared error, of a grid around `largest / 8`, as llama.cpp's
    `make_qx_quants` finds it. Scales are rounded so that float16 and bfloat16 both hold them.

    Args:
        weight_NK: the weight.
        group_size: one of `GROUP_SIZES`; divides K.
        importance_K: float32, at least 0, by which squared errors count; None: all alike.
    """
    rows, columns = weight_NK.shape
    if group_size not in GROUP_SIZES or columns % group_size:
        raise ValueError(f"group_size is {group_size} of {columns} columns; it must divide them: {GROUP_SIZES}")
    if importance_K is not None:
        if importance_K.shape != (columns,):
            raise ValueError(f"importance_K has shape {list(importance_K.shape)}; it must be [{columns}]")
        importance_K = importance_K.float().contiguous()
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight_NK.device)
    scales = torch.empty(rows, columns // group_size, dtype=torch.float32, device=weight_NK.device)
    if library_for(weight_NK) is not None:
        weight_NK = with_dense_rows(weight_NK)
        launch("quire_quantize_groups", _GroupSearchCall(
            weight_NK.data_ptr(), weight_NK.stride(0), pointer(importance_K), codes.data_ptr(), scales.data_ptr(), rows,
            columns, group_size, weight_NK.dtype == torch.float32,
        ))  # fmt: skip
    else:
        height = max(1, BAND // columns)
        for first in range(0, rows, height):
            band = slice(first, first + height)
            codes[band], scales[band] = _quantize_torch(weight_NK[band].float(), group_size, importance_K)
    scales = scales.clamp_(-LARGEST_SCALE, LARGEST_SCALE).to(torch.float16)
    return GroupedCodes(codes=codes, bits=4, group_size=group_size, scales=scales, zero=ZERO)


def _quantize_torch(
    weight_NK: torch.Tensor, group_size: int, importance_K: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.unflatten(weight_NK, 1, (-1, group_size))
    weights = x.new_ones(()) if importance_K is None else importance_K.view(-1, group_size)
    highest, lowest = x.amax(2, keepdim=True), x.amin(2, keepdim=True)
    extreme = torch.where(highest >= -lowest, highest, lowest)
    relative = torch.where(extreme == 0, 0.0, x / extreme)
    best, best_scale = torch.zeros_like(extreme), torch.full_like(extreme, -1 / ZERO)
    for step in STEPS:
        code = (relative * (-ZERO - 0.1 * step)).round_().clamp_(-ZERO, ZERO - 1)
        product = (weights * code * relative).sum(2, keepdim=True)
        square = (weights * code * code).sum(2, keepdim=True)
        is_better = product * product > best * square
        best = torch.where(is_better, product * product / square, best)
        best_scale = torch.where(is_better, product / square, best_scale)
    scale = (extreme * best_scale).bfloat16().float()
    code = torch.where(scale == 0, 0.0, x / scale).round_().clamp_(-ZERO, ZERO - 1)
    return (code + ZERO).to(torch.uint8).flatten(1), scale.squeeze(2)
