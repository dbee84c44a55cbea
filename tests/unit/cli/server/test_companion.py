"""A companion of `quire serve`, which is started again when it ends."""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_cli import process
from quire_cli.console import Console
from quire_cli.ports import Endpoint
from quire_cli.server.companion import Companion
from quire_cli.server.health import Health
from quire_cli.server.supervisor import Service
from support.serving import wait_until

NICENESS = 19


class StartedAgain(Companion):
    def __init__(self) -> None:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        super().__init__("toy", Endpoint("127.0.0.1", 1), command, dict(os.environ), NICENESS)

        self.num_ends = 0

    def on_end(self, served_s: float) -> float:
        self.num_ends += 1
        return 0.0


def test_what_is_started_in_its_place_has_the_same_priority() -> None:
    with StartedAgain() as companion:
        first = companion.pid
        assert os.getpriority(os.PRIO_PROCESS, first) == NICENESS
        os.kill(first, 9)

        def is_another() -> bool:
            companion.look()
            return companion.pid != first

        wait_until(is_another, "another one is started")
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, companion.pid) == NICENESS, "its priority is low, too")


def test_one_that_cannot_be_started_again_now_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure must not end the server, nor count as a death."""
    actual, failures = process.start, [OSError(errno.EMFILE, "no descriptor"), OSError(errno.EAGAIN, "no process")]

    def start(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return actual(*arguments, **options)

    monkeypatch.setattr("quire_cli.server.companion._RETRY_S", 0.0)
    with StartedAgain() as companion:
        monkeypatch.setattr(process, "start", start)
        first = companion.pid
        os.kill(first, signal.SIGKILL)

        def is_another() -> bool:
            companion.look()
            return companion.pid != first

        wait_until(is_another, "another one is started")
        assert not failures
        assert companion.num_ends == 1


def test_the_service_starts_it_again_whoever_collects_its_exit_code(tmp_path: Path) -> None:
    """`ServerProcess.wait_for_signal` collects all children that have died."""

    def wait_for_signal(timeout_s: float) -> bool:
        time.sleep(timeout_s)
        return False

    unused: Any = None
    run: Any = SimpleNamespace(temporary=tmp_path)
    server: Any = SimpleNamespace(wait_for_signal=wait_for_signal)
    with Console() as console, StartedAgain() as companion:
        service = Service(
            command=unused, environment={}, endpoints={}, ready_line="", what="", drain_timeout_s=0, console=console,
            run_directory=run, health=Health(), companions=[companion],
        )  # fmt: skip
        first = companion.pid
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        assert not service._pause(server, 0.01)
        assert companion.pid != first
