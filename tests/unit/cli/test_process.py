"""A process that has to leave the CPU to others: every thread of it, whatever comes and goes meanwhile."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire_cli import process
from quire_engine.system import process_state

THREADS = """
import sys, threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


def test_without_a_descriptor_nobody_is_taken_for_dead() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            process_state.process_stat(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def start() -> Iterator[Callable[[int], int]]:
    """Starts a process of four threads with a niceness, in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def run(niceness: int) -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            preexec_fn=lambda: process.lower_priority(niceness),
        )  # fmt: skip
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    yield run
    for child in started:
        with child:
            child.kill()


def nice_values(pid: int) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def autogroup(pid: int) -> str:
    """Empty where the kernel has none."""
    file = Path(f"/proc/{pid}/autogroup")
    return file.read_text().split()[-1] if file.exists() else ""


def test_every_thread_yields_and_so_does_the_session(start: Callable[[int], int]) -> None:
    pid = start(19)
    assert nice_values(pid) == [19] * 4
    assert autogroup(pid) in ("", "19")


def test_a_process_never_gets_more_than_the_one_that_starts_it(start: Callable[[int], int]) -> None:
    assert set(nice_values(start(0))) == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_session_that_was_set_just_before_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def refuse_once(self: Path, text: str) -> None:
        written.append(f"{self} {text}")
        if len(written) == 2:
            raise OSError(errno.EAGAIN, "too often")

    monkeypatch.setattr(Path, "write_text", refuse_once)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: written.append(f"{who} {priority}"))
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    process.lower_priority(10)
    assert written == ["0 10", "/proc/self/autogroup 10", "/proc/self/autogroup 10"]
