"""How the tests are spread when they run in two processes: `make test ARGS="-n 2"` (pytest-xdist).

::

    one process       what starts `quire serve`, tidies up after one, or drives a browser: one after the other
    the other one     everything else, file by file; when the first is done, it takes files too

A server that starts removes what dead runs have left, whoever's they are, so no two such tests may run at once.
"""

import os
from pathlib import Path
from typing import Any

import pytest

# This process computes in OpenMP threads too. As those of an engine's process they must not wait by spinning for long:
# with two processes on two cores, a thread that spins keeps the one that it waits for from running.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# Without a GPU, kernels in the Triton language are tested in Triton's interpreter. triton looks for this when it is
# imported, and transformers imports it.
if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

ALONE = ("tests/integration/", "tests/unit/cli/", "tests/dashboard/test_browser.py")
"""The tests that never run beside each other."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process."""
    return "alone" if nodeid.startswith(ALONE) else nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=["only", "not"], help="only the tests that never run beside others, or all but")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler of groups. Those of `--dist loadgroup` come to nothing with pytest 9.2 and pytest-xdist 3.8: they are
    told by changed node ids, and node ids do not change any more (pytest-xdist issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # the order is that of the collection; see below
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In two processes the long groups go first, so that none ends long before the other."""
    differing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if differing:
        raise pytest.UsageError(f"give these parameters ids: an address is another one in each process: {differing}")
    if wanted := config.getoption("--alone"):
        others = [item for item in items if (group_of(item.nodeid) == "alone") != (wanted == "only")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    if hasattr(config, "workerinput"):
        slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (group_of(item.nodeid) != "alone", group_of(item.nodeid) not in slow))
