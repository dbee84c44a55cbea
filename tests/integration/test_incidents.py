"""What page, terminal and log say after a real server, replica or stub was killed or stopped: victims, cause, row."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from quire_dashboard.incidents import Incident
from quire_dashboard.monitor import Monitor
from quire_dashboard.settings import Settings
from quire_engine.system.process_state import process_stat
from support.clients import Answer, ask, metric, snapshot, with_client
from support.serving import SMALL, Server, add_model, run_cli, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKEN = "a-token-for-the-incidents"
MODEL = "twins"
NUM_STREAMS = 6


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with two replicas, and steps as slow as a larger one's."""
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, MODEL, {**SMALL, "data_parallel_size": 2, "slo": {"default": {"e2e_ms": 600_000}}})
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with serve("--model-repository", str(repository), "--no-dashboard", env=environment, step_seconds=0.05) as server:
        yield server


@pytest.fixture(scope="module")
def watcher(twins: Server) -> Iterator[Monitor]:
    """A dashboard's, without its pages."""
    settings = Settings(url=twins.grpc, metrics=twins.metrics, health=twins.health, introspection_token=TOKEN)
    watcher = Monitor(settings)
    watcher.start()
    watcher.wait()
    yield watcher
    watcher.stop()


def find(server: Server, name: str) -> int:
    stats = ((pid, process_stat(pid)) for pid in server.run_id.processes())
    return next(pid for pid, stat in stats if stat and stat.name == name[:15])


def ended(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = snapshot(server, MODEL, TOKEN, introspect="ended")["requests"]
    return found


def rows_of(watcher: Monitor) -> list[Incident]:
    """All but what other tests beside this one cause: they take the host's CPUs."""
    return [row for row in watcher.incidents.rows() if row.cause not in ("host_cpu", "host_memory")]


def test_requests_that_a_killed_server_takes_along_are_listed_with_the_cause(twins: Server, watcher: Monitor) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> list[Answer]:
        streams = [
            asyncio.ensure_future(
                ask(client, model=MODEL, text_input="x", stream=True, request_id=f"victim-{number}",
                    parameters={"max_tokens": 400, "ignore_eos": True})
            )
            for number in range(NUM_STREAMS)
        ]  # fmt: skip
        while len((await asyncio.to_thread(snapshot, twins, MODEL, TOKEN))["requests"]) < NUM_STREAMS:
            await asyncio.sleep(0.1)
        os.kill(find(twins, "tritonserver"), signal.SIGKILL)
        return await asyncio.gather(*streams)

    before = {one["label"] for one in ended(twins)}
    answers = asyncio.run(with_client(twins, work))
    assert all(answer.error is not None for answer in answers)
    twins.wait_for_ready_line()
    victims = [one for one in ended(twins) if one["label"] not in before]
    assert sorted(one["label"] for one in victims) == [f"victim-{number}" for number in range(NUM_STREAMS)]
    for one in victims:
        assert (one["finish_reason"], one["error_code"]) == ("error", "lost")
        assert one["error"] == "tritonserver was killed by SIGKILL"
        assert one["id"]
        assert one["e2e_seconds"] > 0
    wait_until(lambda: metric(twins, "quire_requests_total", MODEL, outcome="error") == NUM_STREAMS, "they are counted")
    missed = metric(twins, "quire_slo_requests_total", MODEL, slo="default", verdict="miss", cause="error")
    assert missed == NUM_STREAMS

    def hurt() -> set[str]:
        return {one.label for row in rows_of(watcher) if row.cause == "server_restarts" for one in row.hurt}

    wait_until(lambda: hurt() == {one["label"] for one in victims}, "the row names them")
    (row,) = rows_of(watcher)
    assert "Tritonserver was killed by SIGKILL." in row.detail


def test_a_killed_replica_is_named_with_the_cause(twins: Server, watcher: Monitor) -> None:
    wait_until(lambda: all(row.over for row in rows_of(watcher)), "what was before is over")
    num_before = len(rows_of(watcher))
    engines = snapshot(twins, MODEL, TOKEN)["engine"]["engines"]
    os.kill(engines[1]["pid"], signal.SIGKILL)
    wait_until(lambda: len(rows_of(watcher)) > num_before, "there is a row")
    wait_until(lambda: rows_of(watcher)[0].title == "Engine 1 was restarted", "it says which")
    assert "Engine 1: the engine process was killed by SIGKILL." in rows_of(watcher)[0].detail


def test_a_stopped_stub_is_named_in_the_terminal(twins: Server) -> None:
    pid = find(twins, "triton_python_backend_stub")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "has been stopped" in _top(twins), "quire top says so")
    finally:
        with suppress(ProcessLookupError):  # quire serve does not wait for ever
            os.kill(pid, signal.SIGCONT)


def _top(server: Server) -> str:
    return run_cli("top", "--once", "--interval", "0.5", "--metrics", server.metrics, "--health", server.health).stdout
