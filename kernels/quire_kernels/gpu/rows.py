"""Ops on rows in the Triton language: activation · mul, norms, embedding, writes to slots, and masks by bits."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast

BLOCK = 1024
"""Elements per program: 8 for each of 128 threads, which is one 16-byte load for 16-bit types."""
TOKENS = 2048
"""Tokens of a program that masks: it writes the forbidden tokens' logits and reads none."""


@triton.jit
def gated(x, up, ACTIVATION: tl.constexpr):
    """Gate and up are float32. GELU is `x / 2 * (1 + erf(x / √2))`, SiLU is `x * sigmoid(x)`, and GELU by tanh is
    `x * sigmoid(2u)`, where u is √(2/π) · (x + 0.044715 x³)."""
    z = x
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216 * (x + 0.044715 * x * x * x)
    elif ACTIVATION == "swigluoai":
        x = tl.where(x > 7.0, 7.0, x)  # unlike a minimum, a NaN stays one
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        z = 1.702 * x
    if ACTIVATION == "none":
        y = x
    elif ACTIVATION == "gelu":
        y = x * 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        above = tl.where(x < 0, 0.0, x)  # a NaN stays one
        y = above * above
    else:
        decay = tl.exp(-tl.abs(z))  # the argument is at most 0, so it cannot overflow
        y = (1.0 if ACTIVATION == "sigmoid" else x) * tl.where(z < 0, decay, 1.0) / (1.0 + decay)
    return y * up


@triton.jit
def _xielu_kernel(x, alpha_p, alpha_n, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part of it)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    positive, negative = tl.load(alpha_p), tl.load(alpha_n)
    positive = tl.maximum(positive, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(positive)))  # softplus
    negative = tl.maximum(negative, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(negative))) + 0.5
    above, below = tl.where(value < 0, 0.0, value), tl.where(value > 0, 0.0, value)  # a NaN stays one
    y = positive * above * above + negative * (tl.exp(below) - 1.0 - below) + 0.5 * value
    tl.store(out + row * SIZE + i, cast(y, out.dtype.element_ty), mask=i < SIZE)


def xielu(x_TI: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    rows, size = x_TI.shape
    out = x_TI.new_empty(rows, size)
    if rows:
        _xielu_kernel[(rows, triton.cdiv(size, BLOCK))](x_TI, alpha_p, alpha_n, out, x_TI.stride(0), size, BLOCK)
    return out


@triton.jit
def _activate_and_mul_kernel(
    gates, ups, out, gate_stride, up_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (row, part of it)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gates + row * gate_stride + i // WIDTH, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, cast(gated(gate, up, ACTIVATION), out.dtype.element_ty), mask=i < SIZE)


def activate_and_mul(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    rows, size = up.shape
    out, width = gate.new_empty(rows, size), size // max(gate.shape[1], 1)
    if rows:
        grid = (rows, triton.cdiv(size, BLOCK))
        _activate_and_mul_kernel[grid](gate, up, out, gate.stride(0), up.stride(0), size, width, BLOCK, activation)
    return out


@triton.jit
def normed(x, weight, mean_square, eps, dtype: tl.constexpr):
    """`x / rms(x) * weight`, rounded to `dtype` before the weight (as Hugging Face's modules do) unless the weight is
    float32, and after it."""
    unit = x * tl.math.rsqrt(mean_square + eps)
    if weight.dtype != tl.float32:
        unit = cast(unit, dtype).to(tl.float32)
    return cast(unit * weight.to(tl.float32), dtype)


@triton.jit
def _layer_norm_kernel(
    hidden, residual, weight, bias, out, hidden_stride, residual_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (row, part of it that is normed for itself)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first = tl.program_id(1) * SIZE
    x = tl.load(hidden + row * hidden_stride + first + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * residual_stride + first + i
        total = cast(x + tl.load(pointers, mask=i < SIZE, other=0.0).to(tl.float32), residual.dtype.element_ty)
        tl.store(pointers, total, mask=i < SIZE)
        x = total.to(tl.float32)
    x = tl.where(i < SIZE, x - tl.sum(x, 0) / SIZE, 0.0)
    y = x * tl.math.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * tl.load(weight + first + i, mask=i < SIZE, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias + first + i, mask=i < SIZE, other=0.0)
    tl.store(out + row * (tl.num_programs(1) * SIZE) + first + i, cast(y, out.dtype.element_ty), mask=i < SIZE)


def layer_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    bias_E: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    (rows, whole), size = hidden_TE.shape, weight_E.shape[-1]
    out, both = hidden_TE.new_empty(rows, whole), hidden_TE if residual_TE is None else residual_TE
    if rows:
        _layer_norm_kernel[(rows, whole // size)](
            hidden_TE, both, weight_E, weight_E if bias_E is None else bias_E, out, hidden_TE.stride(0),
            both.stride(0), eps, size, triton.next_power_of_2(size), residual_TE is not None, bias_E is not None,
        )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    hidden, residual, weight, out, hidden_stride, residual_stride, out_stride, eps, multiplier, scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(hidden + row * hidden_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * residual_stride + i
        total = x * multiplier + tl.load(pointers, mask=i < SIZE, other=0.0).to(tl.float32)
        total = cast(total * scale, residual.dtype.element_ty)
        tl.store(pointers, total, mask=i < SIZE)
        x = total.to(tl.float32)
    weights = tl.load(weight + i, mask=i < SIZE, other=0.0)
    y = normed(x, weights, tl.sum(x * x, 0) / SIZE, eps, out.dtype.element_ty)
    tl.store(out + row * out_stride + i, y, mask=i < SIZE)


def rms_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return _rms_norm(hidden_TE, None, weight_E, eps, out)


def add_rms_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    multiplier: float,
    scale: float,
) -> torch.Tensor:
    return _rms_norm(hidden_TE, residual_TE, weight_E, eps, multiplier=multiplier, scale=scale)


def _rms_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    multiplier: float = 1.0,
    scale: float = 1.0,
) -> torch.Tensor:
    rows, size = hidden_TE.shape
    out_TE = hidden_TE.new_empty(rows, size) if out is None else out
    block = triton.next_power_of_2(size)
    residual_stride = 0 if residual_TE is None else residual_TE.stride(0)
    if rows:
        _rms_norm_kernel[(rows,)](
            hidden_TE, residual_TE, weight_E, out_TE, hidden_TE.stride(0), residual_stride,
            out_TE.stride(0), eps, multiplier, scale, size, block, residual_TE is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out_TE


@triton.jit
def _gated_rms_norm_kernel(
    hidden, gate, weight, out, hidden_stride, gate_stride, eps,
    SIZE: tl.constexpr, GROUP_SIZE: tl.constexpr, WEIGHT_SIZE: tl.constexpr, GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, group)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, column = i < GROUP_SIZE, tl.program_id(1) * GROUP_SIZE + i
    x = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate_ = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATES_FIRST:
        x = gated(gate_, x, "silu")
    scale = tl.load(weight + column % WEIGHT_SIZE, mask=inside, other=0.0)
    y = x * tl.math.rsqrt(tl.sum(x * x, 0) / GROUP_SIZE + eps) * scale
    if not GATES_FIRST:
        y = gated(gate_, y, "silu")
    tl.store(out + row * SIZE + column, cast(y, out.dtype.element_ty), mask=inside)


def gated_rms_norm(
    hidden_TE: torch.Tensor,
    gate_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    group_size: int,
    gates_first: bool,
) -> torch.Tensor:
    rows, size = hidden_TE.shape
    out_TE = hidden_TE.new_empty(rows, size)
    if rows:
        _gated_rms_norm_kernel[(rows, size // group_size)](
            hidden_TE, gate_TE, weight_E, out_TE, hidden_TE.stride(0), gate_TE.stride(0), eps, size, group_size,
            len(weight_E), gates_first, triton.next_power_of_2(group_size),
        )  # fmt: skip
    return out_TE


@triton.jit
def _embedding_kernel(
    token_ids, weight, scales, out, weight_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Program (token, part of its row)."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token)
    values = tl.load(weight + row * weight_stride + i, mask=i < SIZE, other=0.0)
    if HAS_SCALES:
        values = cast(values.to(tl.float32) * tl.load(scales + row), out.dtype.element_ty)
    tl.store(out + token * SIZE + i, values, mask=i < SIZE)


def embedding(
    token_ids_T: torch.Tensor, weight_VE: torch.Tensor, scales_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The tokens' rows of `weight_VE`, times their scales if there are any, in `dtype`."""
    size = weight_VE.shape[1]
    out_TE = torch.empty(len(token_ids_T), size, dtype=dtype, device=weight_VE.device)
    if len(token_ids_T):
        _embedding_kernel[(len(token_ids_T), triton.cdiv(size, BLOCK))](
            token_ids_T.contiguous(), weight_VE, scales_V, out_TE, weight_VE.stride(0), size, BLOCK,
            scales_V is not None,
        )  # fmt: skip
    return out_TE


@triton.jit
def _store_rows_kernel(rows, slot_mapping, out, rows_stride, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, part of its row)."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_mapping + token)
    values = tl.load(rows + token * rows_stride + i, mask=i < SIZE, other=0.0)
    tl.store(out + slot * out_stride + i, values, mask=i < SIZE)


def store_rows(rows_TE: torch.Tensor, slot_mapping_T: torch.Tensor, out_NE: torch.Tensor) -> None:
    rows, size = rows_TE.shape
    if rows:
        _store_rows_kernel[(rows, triton.cdiv(size, BLOCK))](
            rows_TE, slot_mapping_T.contiguous(), out_NE, rows_TE.stride(0), out_NE.stride(0), size, BLOCK
        )


@triton.jit(do_not_specialize=["vocab_size"])
def _bitmask_kernel(logits, row_ids, bitmask, logits_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    """Program (row of the bitmask, part of the vocabulary)."""
    row, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(bitmask + row * words_stride + tokens // 32, mask=inside, other=-1)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    pointers = logits + tl.load(row_ids + row) * logits_stride + tokens
    masked = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(pointers, masked, mask=inside & forbidden)


def apply_token_bitmask(logits_SV: torch.Tensor, row_ids_R: torch.Tensor, bitmask_RW: torch.Tensor) -> None:
    """The row ids and the bitmask may be on the host."""
    assert logits_SV.stride(1) == bitmask_RW.stride(1) == 1
    if len(row_ids_R):
        row_ids_R, bitmask_RW = (x.to(logits_SV.device, non_blocking=True) for x in (row_ids_R, bitmask_RW))
        _bitmask_kernel[(len(row_ids_R), triton.cdiv(logits_SV.shape[1], TOKENS))](
            logits_SV, row_ids_R, bitmask_RW, logits_SV.stride(0), bitmask_RW.stride(0), logits_SV.shape[1], TOKENS
        )
