"""A process that has to leave the CPU to others: every thread of it, whatever comes and goes meanwhile."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def child() -> Iterator[int]:
    """With four threads, in a session of its own."""
    command = [sys.executable, "-c", THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield running.pid


def test_without_a_descriptor_nobody_is_taken_for_dead() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            process_state.process_stat(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def nice_values(pid: int) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_every_thread_yields_also_when_another_one_has_just_ended(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_priority = os.setpriority
    calls = []

    def first_is_gone(which: int, who: int, priority: int) -> None:
        calls.append(who)
        if len(calls) == 1:
            raise ProcessLookupError
        set_priority(which, who, priority)

    monkeypatch.setattr(os, "setpriority", first_is_gone)
    process.lower_priority(child, 10)
    assert len(calls) == 5
    assert set(nice_values(child)) == {10}


def test_a_thread_that_starts_meanwhile_yields_too(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    list_all = os.listdir
    rounds = []

    def without_the_last(folder: str) -> list[str]:
        rounds.append(folder)
        return list_all(folder)[: -1 if len(rounds) == 1 else None]

    monkeypatch.setattr(os, "listdir", without_the_last)
    process.lower_priority(child, 10)
    monkeypatch.undo()
    assert set(nice_values(child)) == {10}


def test_a_session_that_was_set_just_before_is_set_again(child: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_text, []

    def refuse_once(self: Path, text: str, *args: Any) -> int:
        written.append(str(self))
        if len(written) == 1:
            raise OSError(errno.EAGAIN, "too often")
        return write(self, text, *args) if self.exists() else 0

    monkeypatch.setattr(Path, "write_text", refuse_once)
    process.lower_priority(child, 10)
    assert written == [f"/proc/{child}/autogroup"] * 2
    assert set(nice_values(child)) == {10}


def test_one_that_has_ended_is_no_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    process.lower_priority(ended.pid, 10)
