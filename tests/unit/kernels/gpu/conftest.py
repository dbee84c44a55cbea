"""The kernels in the Triton language: on a GPU where there is one, else in Triton's interpreter, with CPU tensors."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.triton_interpreter import interpreted_kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the interpreter of triton 3.6 does with branches on numbers, numpy 1.25 and later deprecate."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar"))


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where the tensors of a test are to lie, so that the kernels in the Triton language compute with them."""
    from quire_kernels.gpu.interpreter import INTERPRETED
    from triton.runtime.interpreter import InterpretedFunction

    has_gpu = torch.cuda.is_available()
    assert INTERPRETED.value != has_gpu, (
        "TRITON_INTERPRET is to be 1 without a GPU, and 0 with one: see tests/conftest.py"
    )
    import triton.language as tl

    assert isinstance(tl.cdiv, InterpretedFunction) != has_gpu, "triton was imported before TRITON_INTERPRET was set"
    with nullcontext() if has_gpu else interpreted_kernels():
        yield torch.device("cuda" if has_gpu else "cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.fixture
def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Of a result of `dtype` whose parts were summed in float32."""
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    return {"atol": step, "rtol": step}
