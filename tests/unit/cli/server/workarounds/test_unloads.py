"""Which stubs tritonserver has forgotten."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from quire_backend.status_page import StubState, StubStatus
from quire_cli.server.server_watch import end_stub
from quire_cli.server.workarounds.triton_2_51 import GRACE_S, IDLE_S, REPLACED_S, StuckUnloads, left_behind
from quire_engine.system import process_state
from support.virtual_clock import Clock

STUB = StubStatus(
    pid=7, start_time=1, model="m", version="1", instance="m_0_0", beats=3, state=StubState.UP, reason="",
    num_in_flight=0, sending=0, num_instances=1,
)  # fmt: skip
SUCCESSOR = replace(STUB, pid=8, start_time=2)
OTHER = replace(STUB, pid=9, instance="m_0_1")
UNLOADING = {("m", "1")}
RETIRED = replace(STUB, state=StubState.RETIRED)


class Asked(list[StubStatus]):
    """Those that were asked to end their engines, and what is to be done with them at each look."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.unloads = StuckUnloads(self.append, self.clock)

    def find(self, *left: StubStatus, after: float = 0.0, unloading: set[tuple[str, str]] = UNLOADING) -> Sequence[int]:
        """The ids of those that are to be killed."""
        self.clock.now += after
        self.clear()
        return [page.pid for page in self.unloads.find(left, unloading)]

    @property
    def pids(self) -> list[int]:
        return [page.pid for page in self]


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture(autouse=True)
def alive(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes that live."""
    living = {STUB.pid, SUCCESSOR.pid, OTHER.pid, 10}
    monkeypatch.setattr(
        "quire_cli.server.workarounds.triton_2_51.process_state.is_alive", lambda pid, start_time: pid in living
    )
    return living


@pytest.mark.parametrize(
    ("pages", "unloading", "expected"),
    [
        ([STUB], UNLOADING, [STUB]),
        ([STUB, SUCCESSOR], set(), [STUB]),
        ([STUB, SUCCESSOR], UNLOADING, [STUB, SUCCESSOR]),
        ([STUB], set(), []),
        ([STUB], {("m", "2"), ("other", "1")}, []),
        ([STUB, replace(SUCCESSOR, instance="m_0_1", num_instances=2)], set(), []),
        ([replace(STUB, num_in_flight=1), SUCCESSOR], set(), []),
        ([replace(STUB, state=StubState.ENDING), SUCCESSOR], set(), []),
        ([replace(STUB, state=StubState.ENDING), OTHER], UNLOADING, []),
        ([STUB, OTHER, replace(SUCCESSOR, num_instances=2)], set(), []),
    ],
    ids=[
        "unloaded", "reloaded", "both", "serving", "another", "two-instances", "busy", "ending", "its-turn-comes",
        "half-reloaded",
    ],
)  # fmt: skip
def test_a_stub_is_stuck_when_it_has_no_model_and_no_request_for_long(
    asked: Asked, pages: list[StubStatus], unloading: set[tuple[str, str]], expected: list[StubStatus]
) -> None:
    left = left_behind(pages, unloading)
    wait_s = IDLE_S if unloading else REPLACED_S
    assert asked.find(*left, unloading=unloading) == []
    assert asked.find(*left, after=wait_s - 0.1, unloading=unloading) == []
    assert asked == []
    assert asked.find(*left, after=0.2, unloading=unloading) == []
    assert asked == expected
    assert asked.find(*left, after=GRACE_S, unloading=unloading) == [page.pid for page in expected]


def test_a_successor_that_died_replaces_nobody(alive: set[int]) -> None:
    assert left_behind([STUB, SUCCESSOR], set()) == [STUB]
    alive.remove(SUCCESSOR.pid)
    assert left_behind([STUB, SUCCESSOR], set()) == []


A, B = replace(STUB, num_instances=2), replace(OTHER, start_time=2, num_instances=2)
C, D = replace(SUCCESSOR, start_time=3, num_instances=2), replace(B, pid=10, start_time=4)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([A, B], []),
        ([A, B, C], []),
        ([A, B, C, D], [A, B]),
        ([B, A, C, D], [B, A]),
        ([A, B, replace(C, num_instances=1)], [A, B]),
        ([STUB, replace(C, num_instances=2)], []),
        ([STUB, replace(C, num_instances=2), D], [STUB]),
        ([STUB, D, replace(C, start_time=5)], [STUB]),
        ([STUB, D], []),
        ([B, STUB, D], []),
        ([B, replace(C, num_instances=1)], [B]),
        ([A, B, D], []),
    ],
    ids=[
        "two", "half-reloaded", "reloaded", "in-any-order", "fewer", "more-to-come", "more", "more-in-any-order",
        "one-more-in-place", "fewer-then-one-more-in-place", "fewer-in-place-then-reloaded", "one-in-place-of-another",
    ],
)  # fmt: skip
def test_stubs_are_left_when_a_later_load_is_whole(pages: list[StubStatus], expected: list[StubStatus]) -> None:
    assert left_behind(pages, set()) == expected


def test_one_that_has_retired_is_left_and_waited_for_whatever_the_index_says(asked: Asked) -> None:
    assert left_behind([RETIRED, OTHER], set()) == [RETIRED]
    asked.find(RETIRED)
    assert asked.find(RETIRED, after=IDLE_S + 0.1) == []
    assert asked == [], "it knows"
    assert asked.find(RETIRED, after=GRACE_S) == [STUB.pid]


def test_the_wait_begins_anew_with_every_request(asked: Asked) -> None:
    asked.find(STUB)
    asked.find(replace(STUB, num_in_flight=1), after=IDLE_S - 0.1)
    asked.find(STUB, after=0.2)
    asked.find(STUB, after=IDLE_S - 0.1)
    assert asked == []


def test_instances_that_end_one_after_the_other_are_waited_for(asked: Asked, alive: set[int]) -> None:
    """Each takes its time, and its page goes before its process."""
    asked.find(STUB, OTHER)
    asked.find(STUB, OTHER, after=IDLE_S + 0.1)
    assert asked.pids == [STUB.pid, OTHER.pid], "their engines can end at once"
    other = replace(OTHER, state=StubState.RETIRED)
    for pages in ([replace(STUB, state=StubState.ENDING), other], [other], [other]):
        assert asked.find(*pages, after=GRACE_S + 0.1) == []
    alive.remove(STUB.pid)
    assert asked.find(other) == []
    assert asked.find(other, after=IDLE_S + GRACE_S + 0.1) == [OTHER.pid]


def test_one_that_ended_between_two_looks_has_the_others_waited_for(asked: Asked) -> None:
    other = replace(OTHER, state=StubState.RETIRED)
    asked.find(RETIRED, other)
    assert asked.find(other, after=IDLE_S + GRACE_S + 0.1) == []


def test_a_stub_is_ended_with_all_that_it_had(tmp_path: Path, alive: set[int]) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    alive.add(victim.pid)
    stat = process_state.process_stat(victim.pid)
    assert stat is not None
    page = replace(STUB, pid=victim.pid, start_time=stat.start_time)
    (tmp_path / page.file_name).touch()
    end_stub(page, tmp_path)
    assert victim.wait(60) < 0
    assert list(tmp_path.iterdir()) == []
    end_stub(page, tmp_path)  # it is gone already
