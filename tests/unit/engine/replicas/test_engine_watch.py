"""The watch over one engine's process."""

import queue
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from quire_engine.replicas import engine_watch
from quire_engine.replicas.engine_watch import EngineWatch
from quire_engine.system.process_state import ProcessStat


class Beats:
    """The heartbeat of a process that does nothing: it begins to end when told to."""

    turns, steps, oldest_request_time = 0, 0, None

    def __init__(self) -> None:
        self.ending: queue.Queue[bool | None] = queue.Queue()

    def wait_for_end(self, seconds: float) -> bool | None:
        return self.ending.get()


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(1)"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def watch(process: "subprocess.Popen[bytes]", beats: Any, deaths: "queue.Queue[str]") -> EngineWatch:
    return EngineWatch(process.pid, [], beats, 300, lambda: False, deaths.put)


def says(wait_status: int) -> Any:
    return lambda pid: ProcessStat(name="", state="R", parent=1, start_time=1, cpu_ticks=0, wait_status=wait_status)


def test_one_that_begins_to_end_is_dead(process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    beats, deaths = Beats(), queue.Queue[str]()
    monkeypatch.setattr(engine_watch, "process_stat", says(9))
    one = watch(process, beats, deaths)
    beats.ending.put(True)
    assert deaths.get() == "the engine process was killed by SIGKILL"
    assert process.wait() == -9, "all of the engine is killed"
    one.close()
    one.join()


@pytest.mark.parametrize("ending", [True, None])
def test_where_the_kernel_does_not_tell_its_end_has_to_do(
    ending: bool | None, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, deaths, asked = Beats(), queue.Queue[str](), queue.Queue[int]()

    def nothing(pid: int) -> ProcessStat:
        asked.put(pid)
        return says(0)(pid)

    monkeypatch.setattr(engine_watch, "process_stat", nothing)
    one = watch(process, beats, deaths)
    beats.ending.put(ending)
    if ending:
        assert asked.get() == process.pid
    assert deaths.empty()
    assert process.stdin is not None
    process.stdin.close()
    assert deaths.get() == "the engine process ended with exit code 1"
    one.close()
    one.join()


def test_closing_it_ends_both_threads(process: "subprocess.Popen[bytes]") -> None:
    beats, deaths = Beats(), queue.Queue[str]()
    one = watch(process, beats, deaths)
    beats.ending.put(False)
    one.close()
    beats.ending.put(True)
    one.join()
    assert deaths.empty()
    assert process.poll() is None
    one.close()


def test_idleness_is_no_silence(process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come after so long an idleness that the step's timeout would be over."""
    clock, busy = [1000.0], iter([False, False, True, True, True])
    monkeypatch.setattr(engine_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(engine_watch, "LOOK_SECONDS", 0.01)
    looks = queue.Queue[bool]()
    deaths = queue.Queue[str]()

    def is_busy() -> bool:
        is_busy = next(busy, None)
        if is_busy is None:  # it hangs from now on
            is_busy = True
            clock[0] += 301
        elif not is_busy:
            clock[0] += 900
        looks.put(is_busy)
        return is_busy

    beats = Beats()
    beats.ending.put(None)
    one = EngineWatch(process.pid, [], beats, 300, is_busy, deaths.put)  # type: ignore[arg-type]
    assert "the engine hangs" in deaths.get(timeout=60)
    assert looks.qsize() > 5, "only after all looks at which it had just been idle"
    process.wait()
    one.close()
    one.join()
