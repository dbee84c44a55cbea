"""Triton's interpreter as tests use it: a row's product is its own to the last bit, and calls cost less."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from quire_kernels import cpu
from triton.runtime import interpreter

__all__ = ["interpreted_kernels"]


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Ops on CPU tensors compute with the kernels in the Triton language, in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch, _language_patched_once(patch):
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_get_np_dtype", _np_dtype)
        patch.setattr(interpreter, "_convert_float", _convert_float)
        # Overflows of integers are looked for in int64, and then told to nobody.
        options = interpreter.interpreter_builder.options
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        patch.setenv(cpu.KERNELS_VARIABLE, cpu.INTERPRETER)
        cpu.status.cache_clear()
        yield
    cpu.status.cache_clear()


def _dot(self: Any, a: Any, b: Any, accumulator: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """As a GPU's: what becomes of a row is a matter of that row alone.

    The interpreter asks numpy's matmul, whose BLAS gives a row other bits at another place of the matrix on some
    processors. numpy's own loops add the products up in the order of the columns, for each row alike.
    """
    factors = []
    for x in (a, b):
        data = x.data
        if x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, x.dtype, tl.float16, None).view(np.float16)
        factors.append(data.astype(accumulator.data.dtype, order="C"))
    product = np.einsum("mk,kn->mn", *factors, optimize=False)
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


_np_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _np_dtype(tt_dtype: Any) -> "np.dtype[Any]":
    """The interpreter's own makes a table of all dtypes at each call."""
    scalar = tt_dtype.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _np_dtype_of_scalar(scalar)


_convert_any_float = interpreter._convert_float


def _convert_float(numbers: Any, given: Any, wanted: Any, rounding_mode: Any) -> Any:
    """The interpreter's own takes numbers apart, which are the same bits here, with zeros behind them."""
    if given == tl.bfloat16 and wanted == tl.float32:
        return numbers.astype(np.uint32) << 16
    return _convert_any_float(numbers, given, wanted, rounding_mode)


@contextmanager
def _language_patched_once(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter looks through the language for what it has to replace at each call of each function."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    try:
        yield
    finally:
        scope.restore()
