"""Kernels are tested on every instruction set that this machine has, and in plain torch."""

from collections.abc import Iterator

import pytest
from quire_kernels import cpu


@pytest.fixture(params=[*cpu.INSTRUCTION_SETS, "torch"])
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
