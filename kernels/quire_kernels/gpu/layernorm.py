"""RMSNorm in the Triton language, alone and fused with the residual addition: a row is read once, and then stays in
registers."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast


@triton.jit
def normed(x, weight, mean_square, eps, dtype: tl.constexpr):
    """`x / rms(x) * weight`, rounded to `dtype` before the weight (as Hugging Face's modules do) unless the weight is
    float32, and after it."""
    unit = x * tl.math.rsqrt(mean_square + eps)
    if weight.dtype != tl.float32:
        unit = cast(unit, dtype).to(tl.float32)
    return cast(unit * weight.to(tl.float32), dtype)


@triton.jit
def _rms_norm_kernel(
    hidden, residual, weight, out, hidden_stride, residual_stride, out_stride, eps, multiplier,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(hidden + row * hidden_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * residual_stride + i
        total = x * multiplier + tl.load(pointers, mask=i < SIZE, other=0.0).to(tl.float32)
        total = cast(total, residual.dtype.element_ty)
        tl.store(pointers, total, mask=i < SIZE)
        x = total.to(tl.float32)
    scale = tl.load(weight + i, mask=i < SIZE, other=0.0)
    y = normed(x, scale, tl.sum(x * x, 0) / SIZE, eps, out.dtype.element_ty)
    tl.store(out + row * out_stride + i, y, mask=i < SIZE)


def rms_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    return _rms_norm(hidden_TE, None, weight_E, eps, out)


def add_rms_norm(
    hidden_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, multiplier: float
) -> torch.Tensor:
    return _rms_norm(hidden_TE, residual_TE, weight_E, eps, multiplier=multiplier)


def _rms_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    multiplier: float = 1.0,
) -> torch.Tensor:
    rows, size = hidden_TE.shape
    out_TE = hidden_TE.new_empty(rows, size) if out is None else out
    block = triton.next_power_of_2(size)
    residual_stride = 0 if residual_TE is None else residual_TE.stride(0)
    if rows:
        _rms_norm_kernel[(rows,)](
            hidden_TE, residual_TE, weight_E, out_TE, hidden_TE.stride(0), residual_stride,
            out_TE.stride(0), eps, multiplier, size, block, residual_TE is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out_TE
