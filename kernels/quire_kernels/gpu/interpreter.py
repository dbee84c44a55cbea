"""Corrections for operations that Triton's interpreter computes differently from a GPU.

With `TRITON_INTERPRET=1` in the environment when triton is first imported, kernels run in numpy, on any machine. The
interpreter of triton 3.6 to 3.9 multiplies the bits of bfloat16 numbers as if they were integers, rounds float32 to
bfloat16 towards 0, and loses the carry when it rounds to fp8. On a GPU none of the corrections are compiled.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def dot(a, b, accumulator):
    """`a @ b + accumulator`. float32 uses three products of TF32 parts (Ootomo & Yokota 2022,
    https://arxiv.org/abs/2203.03341), which is nearly as exact as float32 and runs on the tensor cores."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="tf32x3")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """A float32 tensor as `dtype`, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        x = _rounded(x, 16)
    if INTERPRETED and dtype == tl.float8e4nv:
        # Below 2**-6, numbers are 2**-9 apart.
        x = tl.where(tl.abs(x) < 2.0**-6, round_even(x * 2.0**9) * 2.0**-9, _rounded(x, 20))
    return x.to(dtype)


@triton.jit
def round_even(x):
    """Round a float32 below 2**22 to the nearest integer, ties to even."""
    return (x + 1.5 * 2.0**23) - 1.5 * 2.0**23  # from 2**23 on, float32 numbers are 1 apart


@triton.jit
def _rounded(x, ZEROS: tl.constexpr):
    """The nearest float32 whose last bits are zeros."""
    bits = x.to(tl.int32, bitcast=True)
    carried = bits + ((1 << (ZEROS - 1)) - 1) + ((bits >> ZEROS) & 1)
    return tl.where(x == x, (carried & -(1 << ZEROS)).to(tl.float32, bitcast=True), x)


@triton.jit
def both(mask, condition):
    """A mask, and a condition of the whole program: in the interpreter their conjunction has the type of what the
    condition compares, which no mask may have."""
    return (mask & condition) != 0
