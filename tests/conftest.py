"""How all tests are spread when they run in two processes, as `make test` has it (`-n 2 --dist loadgroup`).

::

    one process       what starts `quire serve`, tidies up after one, or drives a browser: one after the other
    the other one     everything else, file by file; when the first is done, it takes files too

A server that starts removes what dead runs have left, whoever's they are, so no two such tests may run at once.
"""

import os

import pytest

# This process computes in OpenMP threads too. As those of an engine's process they must not wait by spinning for long:
# with two processes on two cores, a thread that spins keeps the one that it waits for from running.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

ALONE = "alone"
"""The group of tests that never run beside each other."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Name the group of a test, where xdist asks for groups: `--dist loadgroup`."""
    if item.config.getoption("loadgroup", False):
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In two processes the long groups go first, so that none ends long before the other."""
    differing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if differing:
        raise pytest.UsageError(f"give these parameters ids: an address is another one in each process: {differing}")
    if config.getoption("loadgroup", False):
        slow_groups = {_group(item) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (_group(item) != ALONE, _group(item) not in slow_groups))


def _group(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    starts_much = item.get_closest_marker("server") or item.get_closest_marker("browser")
    return ALONE if starts_much or file.startswith("tests/unit/cli/") else file
