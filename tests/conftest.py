"""How the tests are spread over processes (pytest-xdist): `make test` runs them in two parts.

::

    --servers=only    what starts `quire serve` or a stand-in for it, or drives a browser
    --servers=not     everything else

Tests of one group run in one process, one after the other: those of a file, unless each of them starts what it needs by
itself, or of several files that share a server. `support.sweeps` has what tests with servers must not do beside each
other.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
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

SERVERS = ("tests/integration/", "tests/unit/cli/", "tests/dashboard/test_browser.py")
"""Tests with servers and browsers."""

SPREAD = ("tests/integration/test_start_stop.py", "tests/unit/cli/server/test_supervisor.py")
"""Files of which each test is a group."""

SHARING = {
    f"tests/integration/test_{name}.py": group
    for group, names in {
        "server": ("bad_input", "generation", "introspection", "requests", "restricted_apis"),
        "gateway_server": ("anthropic", "openai"),
    }.items()
    for name in names
}
"""Files that are one group, as they share a fixture of the session."""

LONGEST = (
    "tests/dashboard/test_browser.py",
    "tests/integration/test_alerts.py",
    "tests/integration/test_crash_recovery.py",
    "tests/integration/test_reload.py",
    "server",
    "tests/integration/test_serve.py",
    "tests/integration/test_dashboard_browser.py",
    "tests/integration/test_drill.py",
    "tests/integration/test_idle.py",
)
"""Groups that go first, so that no process ends long before the others. Those with a test marked as slow follow."""


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process."""
    file = nodeid.partition("::")[0]
    return nodeid if file in SPREAD else SHARING.get(file, file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--servers", choices=["only", "not"], help="only the tests with servers and browsers, or all but")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of the other part are not even imported."""
    wanted = config.getoption("--servers")
    if wanted is None or not collection_path.is_relative_to(config.rootpath):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    if path.startswith(SERVERS):
        return True if wanted == "not" else None
    leads_there = any(one.startswith(f"{path}/") for one in SERVERS)
    return True if wanted == "only" and not leads_there else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Nothing of what is collected is garbage, and looking for it took 9 of the collection's 23 s."""
    gc.disable()
    try:
        return (yield None)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """A full collection would walk all imported objects and tests: 0.4 s, at each end of an engine in this process."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else nanobind finds its objects leaked when the interpreter ends


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The incidents that dashboards of tests note are not the user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def _forked_children(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines that the tests' own processes start spend no time on imports, nor on tokenizers that have passed. Beside
    servers they start hardly any, and the imports of what forks them would cost more.
    """
    from support.fork_server import forked_children, tokenizers_tried_once

    forking = nullcontext() if pytestconfig.getoption("--servers") == "only" else forked_children()
    with forking, tokenizers_tried_once(tmp_path_factory.mktemp("tokenizers")):
        yield


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """What a library sets in a test is gone after it: Ray's PYTHONBREAKPOINT would have no later child forked."""
    before = dict(os.environ)
    yield
    for name in {name for name in os.environ if os.environ[name] != before.get(name)} - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture
def started_as_ever(_forked_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of the start itself: its children are started as a user's are."""
    import subprocess

    from quire_engine.system import child_process

    monkeypatch.setattr(child_process, "subprocess", subprocess)


@pytest.fixture
def alone_with_dead_runs() -> Iterator[None]:
    """For a test that kills `quire serve`: no other may start one now, which would remove what is left."""
    from support.sweeps import no_sweeps

    with no_sweeps():
        yield


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler of groups. `--dist loadgroup` has no effect with pytest 9.2 and pytest-xdist 3.8: it sends groups as
    changed node ids, and node ids do not change any more (pytest-xdist issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # the order is that of the collection; see below
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes the long groups go first, so that none ends long before the others."""
    differing = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if differing:
        raise pytest.UsageError(f"give these parameters ids: an address is another one in each process: {differing}")
    if hasattr(config, "workerinput"):
        rank = {group: place for place, group in enumerate(LONGEST)}
        slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (rank.get(group := group_of(item.nodeid), len(rank)), group not in slow))
