"""The least time a step can take on a machine: what has to be read, by its bandwidth, and computed, by its peak.

The roofline of Williams, Waterman and Patterson 2009, applied to the two parts of a step one after the other, as they
run: the linears read every weight once for the whole batch, attention reads the keys and values of every token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Ceilings", "ModelShape", "decode_roofline_seconds", "measure_ceilings"]

READ_BYTES = 2**29
"""Far more than any cache."""
TRIALS, CALLS = 7, 20
MATRIX = (256, 2816, 1024)
"""Rows, outputs and inputs of the multiplication that shows the peak: m400's largest, at a prefill's batch."""


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a step's cost depends on."""

    linear_parameters: int
    """Weights that every step reads and multiplies with: all but the norms, the output head once."""
    num_layers: int
    num_heads: int
    head_size: int
    kv_bytes_per_token: int
    weight_dtype_bytes: int = 2


def decode_roofline_seconds(shape: ModelShape, ceilings: Ceilings, batch: int, context: int) -> float:
    """The least time of a step with one new token for each of `batch` requests of `context` tokens."""
    linears = max(
        shape.linear_parameters * shape.weight_dtype_bytes / ceilings.bytes_per_second,
        2 * shape.linear_parameters * batch / ceilings.flops_per_second,
    )
    attention = max(
        batch * context * shape.kv_bytes_per_token / ceilings.bytes_per_second,
        4 * batch * context * shape.num_layers * shape.num_heads * shape.head_size / ceilings.flops_per_second,
    )
    return linears + attention


def measure_ceilings(int8: bool = False) -> Ceilings:
    """The best of several trials of torch's fastest: a sum over much memory, a product with a large matrix.

    Args:
        int8: the product is of int8 numbers, instead of bf16 ones with prepacked weights.
    """
    import torch

    rows, outputs, inputs = MATRIX
    memory = torch.ones(READ_BYTES // 4)
    with torch.inference_mode():
        read_seconds = _best_seconds(memory.sum)
        multiply = _int8_product() if int8 else _bfloat16_product()
        multiply_seconds = _best_seconds(multiply) / CALLS
    return Ceilings(READ_BYTES / read_seconds, 2 * rows * outputs * inputs / multiply_seconds)


def _bfloat16_product() -> Callable[[], None]:
    """`CALLS` of it."""
    import torch

    rows, outputs, inputs = MATRIX
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    packed = None
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def multiply() -> None:
        for _ in range(CALLS):
            if packed is None:
                torch.nn.functional.linear(x, weight)
            else:
                torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return multiply


def _int8_product() -> Callable[[], None]:
    """`CALLS` of it."""
    import torch

    rows, outputs, inputs = MATRIX
    x = torch.randint(-128, 127, (rows, inputs), dtype=torch.int8)
    weight = torch.randint(-128, 127, (outputs, inputs), dtype=torch.int8).t()

    def multiply() -> None:
        for _ in range(CALLS):
            torch._int_mm(x, weight)

    return multiply


def _best_seconds(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
