"""Which stubs tritonserver has forgotten."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from quire_backend.status_page import StubState, StubStatus
from quire_cli import process
from quire_cli.unloads import STUCK_S, StuckUnloads, end_stub, left_behind

STUB = StubStatus(
    pid=7, start_time=1, model="m", version="1", instance="m_0_0", beats=3, state=StubState.UP, reason="",
    num_in_flight=0, sending=0,
)  # fmt: skip
SUCCESSOR = replace(STUB, pid=8, start_time=2)
OTHER = replace(STUB, pid=9, instance="m_0_1")
UNLOADING = {("m", "1")}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes that live."""
    living = {STUB.pid, SUCCESSOR.pid, OTHER.pid}
    monkeypatch.setattr("quire_cli.unloads.process.is_alive", lambda pid, start_time: pid in living)
    return living


@pytest.mark.parametrize(
    ("pages", "unloading", "expected"),
    [
        ([STUB], UNLOADING, [STUB]),
        ([STUB, SUCCESSOR], set(), [STUB]),
        ([STUB, SUCCESSOR], UNLOADING, [STUB, SUCCESSOR]),
        ([STUB], set(), []),
        ([STUB], {("m", "2"), ("other", "1")}, []),
        ([STUB, replace(SUCCESSOR, instance="m_0_1")], set(), []),
        ([replace(STUB, num_in_flight=1), SUCCESSOR], set(), []),
        ([replace(STUB, state=StubState.ENDING), SUCCESSOR], set(), []),
        ([replace(STUB, state=StubState.ENDING), OTHER], UNLOADING, []),
        ([STUB, OTHER, SUCCESSOR], set(), []),
    ],
    ids=[
        "unloaded", "reloaded", "both", "serving", "another", "two-instances", "busy", "ending", "its-turn-comes",
        "half-reloaded",
    ],
)  # fmt: skip
def test_a_stub_is_stuck_when_it_has_no_model_and_no_request_for_long(
    pages: list[StubStatus], unloading: set[tuple[str, str]], expected: list[StubStatus]
) -> None:
    clock = Clock()
    unloads = StuckUnloads(clock)
    assert unloads.find(left_behind(pages, unloading)) == []
    clock.now += STUCK_S + 0.1
    assert unloads.find(left_behind(pages, unloading)) == expected


def test_a_successor_that_died_replaces_nobody(alive: set[int]) -> None:
    assert left_behind([STUB, SUCCESSOR], set()) == [STUB]
    alive.remove(SUCCESSOR.pid)
    assert left_behind([STUB, SUCCESSOR], set()) == []


def test_the_wait_begins_anew_with_every_request() -> None:
    clock = Clock()
    unloads = StuckUnloads(clock)
    unloads.find([STUB])
    clock.now += STUCK_S - 1
    unloads.find([replace(STUB, num_in_flight=1)])
    clock.now += STUCK_S - 0.1
    assert unloads.find([STUB]) == []


def test_instances_that_end_one_after_the_other_are_waited_for(alive: set[int]) -> None:
    clock = Clock()
    unloads = StuckUnloads(clock)
    for pages in ([replace(STUB, state=StubState.ENDING), OTHER], [OTHER], [OTHER]):  # its page goes before its process
        assert unloads.find(pages) == []
        clock.now += STUCK_S + 0.1
    alive.remove(STUB.pid)
    assert unloads.find([OTHER]) == []
    clock.now += STUCK_S + 0.1
    assert unloads.find([OTHER]) == [OTHER]


def test_a_stub_is_ended_with_all_that_it_had(tmp_path: Path, alive: set[int]) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    alive.add(victim.pid)
    stat = process.process_stat(victim.pid)
    assert stat is not None
    page = replace(STUB, pid=victim.pid, start_time=stat.start_time)
    (tmp_path / page.file_name).touch()
    end_stub(page, tmp_path)
    assert victim.wait(10) < 0
    assert list(tmp_path.iterdir()) == []
    end_stub(page, tmp_path)  # it is gone already
