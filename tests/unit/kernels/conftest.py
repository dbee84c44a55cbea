"""Kernels are tested on every instruction set that this machine has or can emulate, and in plain torch. Sets that
differ from another in the products of linear layers alone are tested there."""

from collections.abc import Iterator

import pytest
from quire_kernels import cpu
from support import emulated_instructions

DOT_PRODUCTS = ("amx", "avx512_vnni", "avx_vnni")


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
    if name == "torch" or handle.quire_select(name.encode()):
        monkeypatch.setenv(cpu.KERNELS_VARIABLE, name)
        cpu.status.cache_clear()
    elif name == "amx" and emulated_instructions.select(handle, name):  # AVX-VNNI would take minutes
        monkeypatch.setattr(cpu, "status", lambda: cpu.KernelStatus(name, "emulated", handle))
    else:
        pytest.skip(f"this processor has no {name}")
    yield name
    monkeypatch.undo()
    cpu.status.cache_clear()
    cpu.status()  # selects the best again, which the library remembers for the whole process
