"""Kernels are tested on every instruction set that this machine has, and in plain torch. Sets that differ from another
in the dot products of int8 alone are tested where weights have 8 bits or fewer."""

from collections.abc import Iterator

import pytest
from quire_kernels import cpu

DOT_PRODUCTS = ("avx512_vnni", "avx_vnni")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cpu_kernels" not in metafunc.fixturenames:
        return
    has_dot_products = metafunc.module.__name__.rpartition(".")[2] in ("test_linear", "test_grouped")
    names = [name for name in cpu.INSTRUCTION_SETS if has_dot_products or name not in DOT_PRODUCTS]
    metafunc.parametrize("cpu_kernels", [*names, "torch"], indirect=True)


@pytest.fixture
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the instruction set in use; skips one that the processor lacks."""
    name: str = request.param
    handle = cpu.library()
    if name != "torch" and handle is None:
        pytest.skip(cpu.status().reason)
    if name != "torch" and not handle.quire_select(name.encode()):
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, name)
    cpu.status.cache_clear()
    yield name
    monkeypatch.undo()
    cpu.status.cache_clear()
    cpu.status()  # selects the best again, which the library remembers for the whole process
