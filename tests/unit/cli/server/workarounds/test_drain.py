"""When a server that was told to end has nothing left to do, and when that is not known."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_backend.status_page import StatusPage, StubState, read_status_pages
from quire_cli.console import Console
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.server.health import Health
from quire_cli.server.supervisor import Service
from quire_cli.server.workarounds.triton_2_51 import Triton251
from quire_engine.system import process_state

TIMEOUT_S = 20


class Server:
    """One that does not end by itself. Waiting for it takes no time."""

    pid = 0
    exit_code = None

    def __init__(self, stubs: set[tuple[int, int]]) -> None:
        self._stubs = stubs
        self.now = 0.0

    def stubs(self) -> set[tuple[int, int]]:
        return self._stubs

    def terminate(self) -> None:
        pass

    kill = terminate

    def wait_for_signal(self, timeout_s: float) -> bool:
        self.now += timeout_s
        return False


def start_time(pid: int) -> int:
    stat = process_state.process_stat(pid)
    assert stat is not None
    return stat.start_time


@pytest.fixture
def drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """How long it takes to end a server. This process stands for its stub."""

    def end(
        *, in_flight: int = 0, state: StubState = StubState.UP, models: set[str] | None, others: tuple[int, ...] = (),
        given_up: tuple[str, ...] = (), ends: bool = False,
    ) -> float:  # fmt: skip
        page = StatusPage(tmp_path, model="m", version="1", instance="m_0_0")
        page.beat(state, "")
        page.in_flight(in_flight)
        stubs = {(status.pid, status.start_time) for status in read_status_pages(tmp_path)}
        server: Any = Server(stubs | {(pid, start_time(pid)) for pid in others})
        clock = SimpleNamespace(monotonic=lambda: server.now)
        monkeypatch.setattr("quire_cli.server.workarounds.triton_2_51.time", clock)
        monkeypatch.setattr("quire_cli.server.supervisor.time", clock)
        monkeypatch.setattr("quire_cli.server.workarounds.triton_2_51._loaded_models", lambda endpoint: models)
        unused: Any = None
        with Console() as console:
            run: Any = SimpleNamespace(temporary=tmp_path)
            service = Service(
                command=unused, environment={}, endpoints={"http": Endpoint("127.0.0.1", 1)}, ready_line="", what="",
                drain_timeout_s=TIMEOUT_S, console=console, run_directory=run, health=Health(),
                workarounds=Triton251(tmp_path),
            )  # fmt: skip
            if ends:
                server.terminate = page.close
            assert service._drain(server, given_up) == 0
        return float(server.now)

    return end


def test_a_server_of_which_all_is_seen_is_ended_once_nothing_is_in_flight(drain: Callable[..., float]) -> None:
    assert drain(models={"m"}) < 2


def test_a_server_that_keeps_an_unloaded_model_is_ended_at_once_when_its_stubs_have_ended(
    drain: Callable[..., float],
) -> None:
    assert drain(models={"m", "unloaded"}, given_up=("unloaded",), ends=True) < 0.5


def test_a_stub_that_has_taken_its_page_away_and_is_about_to_end_is_waited_for(drain: Callable[..., float]) -> None:
    with subprocess.Popen(["true"]) as about_to_end:
        os.waitid(os.P_PID, about_to_end.pid, os.WEXITED | os.WNOWAIT)
        assert drain(models={"m"}, others=(about_to_end.pid,)) < 2


@pytest.mark.parametrize(
    "unseen",
    [
        {"models": {"m"}, "in_flight": 1},
        {"models": {"m"}, "state": StubState.ENDING},
        {"models": {"m", "somebody's"}},
        {"models": None},
        {"models": {"m"}, "others": (os.getppid(),)},
        {"models": {"m"}, "ends": True},
    ],
    ids=["request", "ending", "model", "index", "stub", "in-good-order"],
)
def test_it_is_not_while_something_may_be_in_flight(drain: Callable[..., float], unseen: Any) -> None:
    with pytest.raises(CommandError, match=f"not drained within {TIMEOUT_S} s"):
        drain(**unseen)
