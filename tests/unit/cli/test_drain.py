"""When a server that was told to end has nothing left to do, and when that is not known."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_backend.status_page import StatusPage, StubState, read_status_pages
from quire_cli.drain import DrainWatch
from quire_cli.ports import Endpoint

LONG_S = 100.0


@pytest.fixture
def idle_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """For how long a server counts as idle of which nothing changes for `LONG_S`. This process stands for its stub."""
    now = 0.0
    monkeypatch.setattr("quire_cli.drain.time", SimpleNamespace(monotonic=lambda: now))

    def wait(*, in_flight: int = 0, state: StubState = StubState.UP, models: set[str] | None, others: int = 0) -> float:
        nonlocal now
        page = StatusPage(tmp_path, model="m", version="1", instance="m_0_0")
        page.beat(state, in_flight, "")
        stubs = {(status.pid, status.start_time) for status in read_status_pages(tmp_path)}
        server: Any = SimpleNamespace(stubs=lambda: stubs | {(1, number) for number in range(others)})
        monkeypatch.setattr("quire_cli.drain._loaded_models", lambda endpoint: models)
        watch = DrainWatch(server, Endpoint("127.0.0.1", 1), tmp_path)
        watch.idle_s()
        now += LONG_S
        return watch.idle_s()

    return wait


def test_a_server_of_which_all_is_seen_is_idle_without_requests(idle_s: Callable[..., float]) -> None:
    assert idle_s(models={"m"}) == LONG_S


@pytest.mark.parametrize(
    "unseen",
    [
        {"models": {"m"}, "in_flight": 1},
        {"models": {"m"}, "state": StubState.ENDING},
        {"models": {"m", "somebody's"}},
        {"models": None},
        {"models": {"m"}, "others": 1},
    ],
    ids=["request", "ending", "model", "index", "stub"],
)
def test_it_is_not_while_something_may_be_in_flight(idle_s: Callable[..., float], unseen: Any) -> None:
    assert idle_s(**unseen) == 0.0
