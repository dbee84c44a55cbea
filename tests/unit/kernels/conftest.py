"""Kernels are tested on every instruction set that this machine has or can emulate, and in plain torch. Sets that
differ from another in the products of linear layers alone are tested there, and AMX with attention too.

A test that takes `cpu_kernels` is one item, which runs once with each name: thousands of items cost more than what they
compute. `once` keeps what is the same on all sets: the reference."""

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from quire_kernels import cpu
from support.emulated_instructions import selected

DOT_PRODUCTS = ("amx", "avx512_vnni", "avx_vnni")


@pytest.fixture
def cpu_kernels() -> str:
    """The name of the instruction set in use: `pytest_pyfunc_call` passes each of them to the test."""
    return ""


@pytest.fixture
def once() -> Callable[[Hashable, Callable[[], Any]], Any]:
    """What a function returns, by key: called on the first instruction set alone. The test leaves it as it is."""
    known: dict[Hashable, Any] = {}

    def get(key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = make()
        return known[key]

    return get


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with `cpu_kernels` on each instruction set. Its report names the one that it fails with; it counts as
    skipped if it is skipped with all."""
    if "cpu_kernels" not in pyfuncitem.funcargs:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    module = pyfuncitem.module.__name__.rpartition(".")[2]
    own: tuple[str, ...] = ("amx",) if module == "test_attention" else ()
    if module in ("test_linear", "test_grouped", "test_lora"):
        own = DOT_PRODUCTS
    names = [name for name in cpu.INSTRUCTION_SETS if name in own or name not in DOT_PRODUCTS]
    skipped: pytest.skip.Exception | None = None
    has_run = False
    for name in (*names, "torch"):
        reason = _run(pyfuncitem, {**arguments, "cpu_kernels": name})
        has_run |= reason is None
        skipped = skipped or reason
    if skipped is not None and not has_run:
        raise skipped
    return True


def _run(pyfuncitem: pytest.Function, arguments: dict[str, Any]) -> pytest.skip.Exception | None:
    """Run a test on one instruction set. Returns why it is skipped, if it is."""
    try:
        with selected(arguments["cpu_kernels"]):
            pyfuncitem.obj(**arguments)
    except pytest.skip.Exception as reason:
        return reason
    except BaseException:
        pyfuncitem.add_report_section("call", "kernels", arguments["cpu_kernels"])
        raise
    return None
