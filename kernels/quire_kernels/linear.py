"""Linear layers over weights that are packed once, when a model is loaded: `pack_linear`, then `linear`.

Weights are bfloat16 or float32 as in the checkpoint, or W8A8 (`quantize=True`): int8 or fp8 weights with one scale per
output feature, and activations that are dynamically quantised per token (SmoothQuant's notation, Xiao et al. 2022,
https://arxiv.org/abs/2211.10438, section 2). W8A16 (`activation_bits=16`) loses next to nothing of activations, reads
the same int8 weights, and computes twice as much. With `asymmetric`, 8 bits have a zero point per token, and lose less
of rows that reach further above 0 than below it. The layout of a packed weight is drawn in `kernels/csrc/linear.inc`.

Every result is summed over the input features in one order, in any batch: bit for bit, a token's result does not depend
on the other tokens. (Plain torch does not guarantee that, nor does cuBLAS for unquantised weights.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from quire_kernels.activation import ACTIVATIONS, activate, activate_and_mul, check_activation
from quire_kernels.cpu import (
    ACTIVATION_GROUP,
    FLOATS,
    GROUPS,
    LARGEST,
    PANEL,
    Call,
    launch,
    library,
    library_for,
    pointer,
    structure,
    uses_triton,
    with_dense_heads,
    with_dense_rows,
)
from quire_kernels.lora import LoraDelta, LoraRows, shrink

BAND = 32 * PANEL
"""Rows that plain torch quantises at a time, so that temporaries are small compared with the weight."""

LinearCall = structure("LinearCall")
_HeadLinearCall = structure("HeadLinearCall")
_PackCall = structure("PackCall")
_QuantizeCall = structure("QuantizeCall")


@dataclass(slots=True)
class LinearWeight:
    """A weight in the form that `linear` reads. Made by `pack_linear`."""

    out_features: int
    in_features: int
    gated: bool
    """The output features are gate and up; `linear` returns `activation(gate) * up`, half as many."""
    activation: str
    """The gate's, or the result's if `activates`; else of no use. One of `ACTIVATIONS`."""
    dtype: torch.dtype
    """The dtype of activations."""
    data: torch.Tensor
    """Packed, or unpacked as [N, K] if there is no C++ kernel."""
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    """Quantised only: float32, one per output feature."""
    offsets: torch.Tensor | None
    """int8 only, packed only: int32, 128 times the sum of each output feature's weights."""
    call: Call | None
    """Filled except for the fields that change from call to call; None for plain torch."""
    activation_bits: int = 8
    """Quantised only: 8 (W8A8) or 16 (W8A16)."""
    group_size: int = 0
    """Columns that share a scale, of a weight from `pack_grouped`: `scales` and `offsets` then are of each group, and
    activations have a scale for each `ACTIVATION_GROUP` columns; 0: there are no groups."""
    extra: tuple[torch.Tensor, ...] = ()
    """What `call` points to besides."""
    parts: tuple["LinearWeight", ...] = ()
    """Weights of a stack, in different forms, whose output features follow each other. The rest is then the first's."""
    activates: bool = False
    """`linear` returns `activation` of the result."""
    asymmetric: bool = False
    """Quantised only: activations of 8 bits have a zero point."""
    column_factors: torch.Tensor | None = None
    """With `asymmetric` only: [K] float32, what activations are multiplied by before they are quantised."""

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None


def pack_linear(
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    scales_N: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    quantize: bool = False,
    quantized_dtype: torch.dtype = torch.int8,
    activation_bits: int = 8,
    gated: bool = False,
    activation: str = "silu",
    activates: bool = False,
    asymmetric: bool = False,
    column_factors_K: torch.Tensor | None = None,
) -> LinearWeight:
    """Convert a weight to the form that `linear` reads fastest. Raises TypeError or ValueError for other dtypes,
    shapes, activations or numbers of bits than these.

    Args:
        weight_NK: as in the checkpoint; may be freed afterwards, unless the C++ kernels are missing.
        bias_N: added to the result.
        scales_N: of a weight that is int8 or fp8 already: float32, one per output feature.
        dtype: of activations, if it is not the weight's.
        quantize: symmetrically, with one scale per output feature.
        quantized_dtype: int8 or float8_e4m3fn (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). There is
            no C++ kernel for fp8.
        activation_bits: of a quantised weight's activations, 8 or 16; 16 only with int8 on the CPU.
        gated: the first half of N is the gate of the second half, and `linear` applies it.
        activation: of the gate, or of the result; one of `ACTIVATIONS`.
        activates: `linear` applies the activation to the result, which has no gate.
        asymmetric: 8 bits of a quantised weight's activations have a zero point; only with int8 on the CPU.
        column_factors_K: float32 powers of two, with `quantize` and `asymmetric` only: activations are multiplied by
            them before they are quantised, and the weight's columns are divided by them. Columns of large activations
            then leave the others more steps (SmoothQuant).
    """
    check_activates(activation, gated, activates)
    dtype = dtype or weight_NK.dtype
    if quantized_dtype not in LARGEST:
        known = ", ".join(map(str, LARGEST))
        raise TypeError(f"quantized_dtype is {quantized_dtype}; it must be one of {known}")
    quantize = quantize and scales_N is None
    packed_dtype = quantized_dtype if quantize else weight_NK.dtype
    out_features, in_features = weight_NK.shape
    for name, values in (("bias_N", bias_N), ("scales_N", scales_N)):
        if values is not None and values.shape != (out_features,):
            raise ValueError(f"{name} has shape {list(values.shape)}; it must be [{out_features}]")
    if gated and out_features % 2:
        raise ValueError(f"a gated weight has {out_features} output features; they must be two halves")
    is_quantized = weight_NK.dtype in LARGEST
    if is_quantized != (scales_N is not None):
        raise TypeError(f"weight_NK is {weight_NK.dtype}, {'with' if scales_N is not None else 'without'} scales_N")
    if not is_quantized and weight_NK.dtype != dtype:
        raise TypeError(f"weight_NK is {weight_NK.dtype}; without scales it must be {dtype}, as activations are")
    has_kernel = packed_dtype not in LARGEST or (packed_dtype == torch.int8 and not uses_triton(weight_NK))
    if activation_bits not in (8, 16) or (activation_bits == 16 and not has_kernel):
        raise ValueError(
            f"activation_bits is {activation_bits} of a weight in {packed_dtype} on {weight_NK.device}; it must be 8, "
            "or 16 of int8 on the CPU"
        )
    if asymmetric and not (has_kernel and activation_bits == 8 and (quantize or is_quantized)):
        raise ValueError("asymmetric is True; it must be False unless activations of 8 bits are beside int8 on the CPU")
    if column_factors_K is not None:
        if not (asymmetric and quantize) or column_factors_K.shape != (in_features,):
            raise ValueError(
                f"column_factors_K has shape {list(column_factors_K.shape)}; it must be [{in_features}], with quantize "
                "and asymmetric"
            )
        weight_NK = weight_NK / column_factors_K.to(weight_NK.dtype)
    group = GROUPS.get(packed_dtype)
    if library() is None or weight_NK.device.type != "cpu" or dtype not in FLOATS or not group or in_features % group:
        if quantize:
            weight_NK, scales_N = _quantize_rows(weight_NK, quantized_dtype)
        unpacked = (weight_NK, bias_N, scales_N, None, None)
        return LinearWeight(
            out_features, in_features, gated, activation, dtype, *unpacked, activation_bits, activates=activates,
            asymmetric=asymmetric, column_factors=column_factors_K,
        )  # fmt: skip

    rows = panel_rows(out_features, gated)
    packed = torch.empty(len(rows) // PANEL, in_features // group, PANEL, group, dtype=packed_dtype)
    scales = torch.empty(len(rows), dtype=torch.float32) if quantize else padded(scales_N, rows)
    offsets = None if scales is None else torch.empty(len(rows), dtype=torch.int32)
    pack_words(weight_NK, rows, packed, scales, offsets, quantize=quantize)
    bias = padded(bias_N, rows)
    call = LinearCall(
        weight=packed.data_ptr(), bias=pointer(bias), weight_scales=pointer(scales), weight_offsets=pointer(offsets),
        in_features=in_features, out_features=out_features, kind=group,
        activation=ACTIVATIONS[activation] if gated or activates else 0, is_gated=gated, x_parts=activation_bits // 8,
    )  # fmt: skip
    parts = (packed, bias, scales, offsets, call)
    return LinearWeight(
        out_features, in_features, gated, activation, dtype, *parts, activation_bits, activates=activates,
        asymmetric=asymmetric, column_factors=column_factors_K,
    )  # fmt: skip


def check_activates(activation: str, gated: bool, activates: bool) -> None:
    """Raise ValueError if there is no such activation, or it has another place."""
    check_activation(activation)
    if activates and (gated or activation == "swigluoai"):
        raise ValueError(f"activates is True with gated={gated} and {activation!r}, which then is of the gate alone")


def pack_words(
    weight_NK: torch.Tensor,
    rows: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    *,
    quantize: bool = False,
    code_form: int = 0,
) -> None:
    """Write a weight to its panels, by 32 bits; for the arguments see `PackCall` of kernels/csrc/calls.h."""
    weight_NK = with_dense_rows(weight_NK)
    call = _PackCall(
        weight_NK.data_ptr(), weight_NK.stride(0), rows.data_ptr(), packed.data_ptr(), pointer(scales),
        pointer(offsets), len(packed), weight_NK.shape[1], len(weight_NK), GROUPS[weight_NK.dtype], quantize,
        code_form,
    )  # fmt: skip
    launch("quire_pack_linear", call)  # cannot be recorded: its `rows` does not count tokens


def stack_linear(weights: Sequence[LinearWeight]) -> LinearWeight:
    """One weight of several whose forms differ: their results side by side. Raises ValueError if they have other input
    features or dtypes than the first, or one is gated."""
    first = weights[0]
    for one in weights:
        if one.gated or one.activates or (one.in_features, one.dtype) != (first.in_features, first.dtype):
            raise ValueError(
                f"a weight takes {one.in_features} of {one.dtype}, gated: {one.gated}, activates: {one.activates}; it "
                "must fit the first"
            )
    return replace(first, out_features=sum(one.out_features for one in weights), parts=tuple(weights))


def weight_rows(weight: LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    """Where `embedding` finds rows of a weight, by their numbers."""
    if weight.call is None or not weight.gated:
        return rows
    half = weight.out_features // 2
    inside, is_second = rows % half, rows // half
    return inside // (PANEL // 2) * PANEL + is_second * (PANEL // 2) + inside % (PANEL // 2)


def _quantize_rows(weight_NK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = torch.empty_like(weight_NK, dtype=dtype)
    # A tensor, because torch divides by a number on a GPU by multiplying by its inverse, unlike on the CPU.
    largest = torch.full((), LARGEST[dtype], dtype=torch.float32, device=weight_NK.device)
    scales = torch.empty(len(weight_NK), dtype=torch.float32, device=weight_NK.device)
    for source, target, scale in zip(*(torch.split(one, BAND) for one in (weight_NK, quantized, scales)), strict=True):
        values = source.float()
        scale.copy_(values.abs().amax(1).clamp_(min=1e-10).div_(largest))
        values = values / scale[:, None]
        target.copy_(values.round_() if dtype == torch.int8 else values)
    return quantized, scales


def panel_rows(out_features: int, gated: bool) -> torch.Tensor:
    """The weight's row for each row of the panels; `out_features` stands for padding."""
    if not gated:
        rows = torch.arange(-(-out_features // PANEL) * PANEL)
        return rows.clamp_(max=out_features)
    half, half_panel = out_features // 2, PANEL // 2
    gate = torch.arange(-(-half // half_panel) * half_panel).view(-1, half_panel)
    inside = gate < half
    both = torch.stack((gate.where(inside, out_features), (gate + half).where(inside, out_features)), dim=1)
    return both.flatten()


def padded(values_N: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    if values_N is None:
        return None
    return torch.cat((values_N.float(), torch.zeros(1, dtype=torch.float32)))[rows].contiguous()


def linear(
    x_TK: torch.Tensor,
    weight: LinearWeight,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    lora: LoraRows | None = None,
    lora_x_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x · Wᵀ + bias`, [T, N], or `activation` of it; for a gated weight `activation(gate) * up` of it, [T, N / 2].
    Raises TypeError or ValueError if the activations do not fit the weight or the adapters, or the kernels cannot write
    the result's dtype.

    Args:
        x_TK: activations, in the weight's dtype; rows may be strided.
        weight: from `pack_linear`. Only one thread at a time may use it: its `call` is filled in place.
        out_dtype: the result's, if it is not that of `x_TK`; float32 keeps the sums as they were accumulated.
        out: a matrix of that dtype to write to, whose rows have no gaps; of the C++ kernel only.
        lora: adapters, whose `x · Aᵀ · Bᵀ` is added before the activation and the gate.
        lora_x_TK: what A multiplies, if it is not `x_TK`, whose columns may be in the order of a packed weight.
    """
    out_dtype = out_dtype or x_TK.dtype
    if lora is None:
        return _linear(x_TK, weight, out_dtype, out, None)
    if sum(lora.table.sizes) > weight.out_features:
        raise ValueError(f"the adapters have {lora.table.sizes} output features; the weight has {weight.out_features}")
    delta = shrink(x_TK if lora_x_TK is None else lora_x_TK, lora)
    return _linear(x_TK, weight, out_dtype, out, delta)


def _linear(
    x_TK: torch.Tensor,
    weight: LinearWeight,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    delta: LoraDelta | None,
) -> torch.Tensor:
    if weight.parts:
        return _linear_parts(x_TK, weight, out_dtype, delta)
    call = weight.call
    if weight.scales is not None and uses_triton(x_TK):
        from quire_kernels.gpu import linear as gpu

        x_TK = with_dense_rows(x_TK)
        activation = weight.activation if weight.gated else None
        lora = None
        if delta is not None:
            lora = delta.slots, x_TK.new_zeros(len(x_TK), weight.out_features, dtype=torch.float32)
            delta.add_to(lora[1])
        product = gpu.linear(x_TK, weight.data, weight.scales, weight.bias, activation, out_dtype, lora)
        return activate(product, weight.activation) if weight.activates else product
    if call is None:
        if x_TK.is_cuda and out_dtype != x_TK.dtype and not (weight.gated or weight.activates):
            result = torch.mm(x_TK, weight.data.t(), out_dtype=out_dtype)  # not rounded to their dtype in between
            result = result if weight.bias is None else result.add_(weight.bias)
            if delta is not None:
                delta.add_to(result)
            return result
        return _linear_torch(x_TK, weight, delta).to(out_dtype)
    if x_TK.dtype is not weight.dtype or not x_TK.is_cpu:
        raise TypeError(f"activations are {x_TK.dtype} on {x_TK.device}; the weight was packed for {weight.dtype}")
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {', '.join(map(str, FLOATS))}")
    x_TK = with_dense_rows(x_TK)
    rows, in_features = x_TK.shape
    if in_features != weight.in_features:
        raise ValueError(f"activations have {in_features} columns; the weight was packed for {weight.in_features}")
    if out is None:
        size = weight.out_features // (2 if weight.gated else 1)
        # Rows at multiples of 1 KiB have few places in the first-level cache: the next layer would read them slowly.
        gap = 64 // out_dtype.itemsize if weight.activates and size * out_dtype.itemsize % 1024 == 0 else 0
        out = torch.empty(rows, size + gap, dtype=out_dtype)[:, :size]
    if delta is not None:
        call = type(call).from_buffer_copy(call)
        delta.write_to(call)
    if weight.group_size:
        x_TK, *of_x = _quantize_in_groups(x_TK, weight, call.zero)
        call.x_scales, call.x_starts, call.x_sums = (one.data_ptr() for one in of_x)
    elif weight.is_quantized:
        zeros = torch.empty(rows, dtype=torch.int32) if weight.asymmetric else None
        x_TK, x_scales = quantize_per_token(x_TK, weight.activation_bits, zeros, weight.column_factors)
        call.x_scales, call.x_zeros = x_scales.data_ptr(), pointer(zeros)
    call.x, call.rows = x_TK.data_ptr(), rows
    call.x_stride = x_TK.shape[1] if weight.group_size else x_TK.stride(-2)
    call.out, call.out_stride, call.out_is_float = out.data_ptr(), out.stride(0), out_dtype == torch.float32
    launch("quire_linear", call)
    return out


def _linear_parts(
    x_TK: torch.Tensor, weight: LinearWeight, out_dtype: torch.dtype, delta: LoraDelta | None
) -> torch.Tensor:
    sizes = [part.out_features for part in weight.parts]
    deltas = [None if delta is None else replace(delta, first=sum(sizes[:i])) for i in range(len(sizes))]
    if weight.parts[0].call is None:
        parts = zip(weight.parts, deltas, strict=True)
        return torch.cat([_linear(x_TK, part, out_dtype, None, its) for part, its in parts], dim=1)
    out = torch.empty(len(x_TK), weight.out_features, dtype=out_dtype)
    for part, piece, its in zip(weight.parts, torch.split(out, sizes, dim=1), deltas, strict=True):
        _linear(x_TK, part, out_dtype, piece, its)
    return out


def _quantize_in_groups(x_TK: torch.Tensor, weight: LinearWeight, zero: int) -> list[torch.Tensor]:
    """Activations beside a weight of groups: what `LinearCall` calls x, x_scales, x_starts and x_sums."""
    (rows, size), parts = x_TK.shape, weight.activation_bits // 8
    blocks = -(-size // ACTIVATION_GROUP)
    out = torch.empty(blocks, rows * parts, ACTIVATION_GROUP, dtype=torch.int8)
    scales = torch.empty(blocks, rows * parts, dtype=torch.float32)
    starts = torch.empty(size // weight.group_size, rows * parts, dtype=torch.int32)
    sums = torch.empty(starts.shape, dtype=torch.float32)
    call = _QuantizeCall(
        x_TK.data_ptr(), x_TK.stride(0), out.data_ptr(), scales.data_ptr(), rows, size, x_TK.dtype == torch.float32,
        parts, weight.group_size, rows * parts, starts.data_ptr(), sums.data_ptr(), zero,
    )  # fmt: skip
    launch("quire_quantize_per_token", call)
    return [out, scales, starts, sums]


@dataclass(frozen=True, slots=True)
class HeadLinearWeight:
    """A weight for each head, in the form that `head_linear` reads. Made by `pack_head_linear`."""

    num_heads: int
    out_features: int
    """A head's."""
    packed: LinearWeight
    """The heads one after another, each of whole panels."""


def pack_head_linear(weight_HNK: torch.Tensor) -> HeadLinearWeight:
    """Convert a weight for each head, bfloat16 or float32, to the form that `head_linear` reads fastest."""
    num_heads, out_features, in_features = weight_HNK.shape
    padded_HNK = F.pad(weight_HNK, (0, 0, 0, -out_features % PANEL))
    return HeadLinearWeight(num_heads, out_features, pack_linear(padded_HNK.reshape(-1, in_features)))


def head_linear(x_THK: torch.Tensor, weight: HeadLinearWeight) -> torch.Tensor:
    """`x[:, h] · W[h]ᵀ` for each head h: [T, H, K] → [T, H, N]. In C++ its bits are those of `linear` with each head's
    weight. Tokens and heads may be strided. Raises TypeError or ValueError if the activations do not fit the weight."""
    packed, num_heads, out_features = weight.packed, weight.num_heads, weight.out_features
    if x_THK.shape[1:] != (num_heads, packed.in_features):
        raise ValueError(
            f"x_THK has shape {list(x_THK.shape)}; the weight was packed for {num_heads} heads of {packed.in_features}"
        )
    if x_THK.dtype != packed.dtype or x_THK.device != packed.data.device:
        raise TypeError(f"x_THK is {x_THK.dtype} on {x_THK.device}; it must be {packed.dtype}, where the weight is")
    if packed.call is None:
        weight_HNK = packed.data.view(num_heads, -1, packed.in_features)[:, :out_features]
        return torch.bmm(x_THK.transpose(0, 1), weight_HNK.transpose(1, 2)).transpose(0, 1)
    x_THK, token_stride, head_stride = with_dense_heads(x_THK)
    out_THN = x_THK.new_empty(len(x_THK), num_heads, out_features)
    call = _HeadLinearCall(
        x_THK.data_ptr(), token_stride, head_stride, packed.data.data_ptr(), out_THN.data_ptr(), len(x_THK), num_heads,
        packed.in_features, out_features, packed.call.kind,
    )  # fmt: skip
    launch("quire_head_linear", call)
    return out_THN


def _linear_torch(x_TK: torch.Tensor, weight: LinearWeight, delta: LoraDelta | None) -> torch.Tensor:
    if weight.scales is None:
        out = F.linear(x_TK, weight.data, weight.bias)
    else:
        if weight.data.dtype == torch.int8:
            zeros = torch.empty(len(x_TK), dtype=torch.int32) if weight.asymmetric else None
            x, x_scales = quantize_per_token(x_TK, weight.activation_bits, zeros, weight.column_factors)
            sums = torch._int_mm((x.to(torch.int16) - 128).to(torch.int8).flatten(0, -2), weight.data.t())
            if zeros is not None:
                sums -= (zeros[:, None] - 128) * weight.data.sum(1, dtype=torch.int32)
        else:
            x, x_scales = _quantize_rows(x_TK, weight.data.dtype)
            sums = F.linear(x.float(), weight.data.float())
        out = sums.float() * x_scales.view(-1, 1) * weight.scales
        out = out if x_scales.dim() == 1 else out[::2] + out[1::2]
        out = out if weight.bias is None else out + weight.bias
    if delta is not None:
        delta.add_to(out, weight.bias)
    if weight.activates:
        return activate(out, weight.activation)
    return activate_and_mul(out, weight.activation) if weight.gated else out


def quantize_per_token(
    x_TK: torch.Tensor,
    bits: int = 8,
    zeros_T: torch.Tensor | None = None,
    column_factors_K: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantisation with one scale per row, as unsigned numbers: the dot product multiplies u8 by s8.
    With 16 bits each row, and then what rounding has left of it, with a scale 256 times smaller.

    Args:
        zeros_T: int32, to be written: the zero points of 8 bits, which then are `round(x / scale) + zero` and have the
            range from the row's least number to its greatest, 0 among them. None: 128.
        column_factors_K: float32, what columns are multiplied by before, beside `zeros_T`.

    Returns:
        [T, K] uint8, `round(x / scale) + 128`, and [T] float32, the scales; of 16 bits [T, 2, K] and [T, 2].
    """
    if library_for(x_TK) is None:
        x = x_TK.float()
        if zeros_T is not None:
            x = x if column_factors_K is None else x * column_factors_K
            below = -x.amin(1).clamp_(max=0)
            scales = (below + x.amax(1).clamp_(min=0)).clamp_(min=1e-10) / 255
            zeros_T.copy_((below * (1 / scales)).round_())
            x = (x * (1 / scales)[:, None]).round_().add_(zeros_T[:, None])
            return x.clamp_(max=255).to(torch.uint8), scales
        scales = x.abs().amax(1).clamp_(min=1e-10) / 127
        x = x / scales[:, None]
        if bits == 16:
            rounded = x.round()
            x, scales = torch.stack((rounded, (x - rounded) * 256), 1), torch.stack((scales, scales / 256), 1)
        return (x.round_() + 128).clamp_(max=255).to(torch.uint8), scales
    x_TK = with_dense_rows(x_TK)
    rows, size, parts = *x_TK.shape, bits // 8
    shape = (rows,) if parts == 1 else (rows, parts)
    out, scales = torch.empty(*shape, size, dtype=torch.uint8), torch.empty(shape, dtype=torch.float32)
    is_float = x_TK.dtype == torch.float32
    call = _QuantizeCall(
        x_TK.data_ptr(), x_TK.stride(0), out.data_ptr(), scales.data_ptr(), rows, size, is_float, parts,
        zeros=pointer(zeros_T), column_factors=pointer(column_factors_K),
    )  # fmt: skip
    launch("quire_quantize_per_token", call)
    return out, scales
