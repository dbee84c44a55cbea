"""What `quire serve` knows of a real server, what its health address says, and what mends by itself."""

import asyncio
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire_cli.server.run_directory import RunId
from quire_engine.system import process_state
from support.clients import Answer, ask, cancel_at_the_end, run, with_client
from support.processes import command_line
from support.serving import CHECKPOINT, SMALL, Server, add_model, health, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.slow]

NUM_TOKENS = 400
NUM_CANCELLED = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that a test may harm."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("checkpoint") / "tinypy"))


@pytest.fixture(scope="module")
def health_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its end is a test too: exit code 0, whatever clients did before."""
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tinypy", {**SMALL, "model": str(checkpoint)})
    with serve("--model-repository", str(repository), step_seconds=0.01) as server:
        yield server


def is_well(server: Server) -> bool:
    return health(server)[0] == 200


def tells(server: Server, what: str) -> bool:
    status, body = health(server)
    return status == 503 and what in " ".join(body["problems"])


def find(run_id: RunId, name: str) -> int:
    stats = ((pid, process_state.process_stat(pid)) for pid in run_id.processes())
    return next(pid for pid, stat in stats if stat and stat.name == name[:15])


def core(server: Server) -> int:
    return next(pid for pid in server.run_id.processes() if "quire_engine.core.core_process" in command_line(pid))


class Stream(threading.Thread):
    """A stream that is under way when the constructor returns."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.answer: Answer | None = None
        self._server = server
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(60)

    def run(self) -> None:
        async def work(client: grpc_aio.InferenceServerClient) -> Answer:
            return await ask(client, text_input="def f(", stream=True, max_tokens=NUM_TOKENS, ignore_eos=True,
                             return_token_ids=True, on_response=lambda response: self._has_begun.set())  # fmt: skip

        self.answer = asyncio.run(with_client(self._server, work))

    def end(self) -> Answer:
        self.join(180)  # through as many starts of engines as there are tries
        assert self.answer is not None, "it does not end"
        return self.answer


def test_a_server_that_serves_is_well(health_server: Server) -> None:
    status, body = health(health_server)
    assert (status, body["status"], body["problems"]) == (200, "ok", [])
    (model,) = body["models"]
    assert (model["name"], model["version"], model["state"]) == ("tinypy", "1", "up")
    assert model["pid"] == find(health_server.run_id, "triton_python_backend_stub")


def test_a_model_whose_file_was_moved_away_serves_when_it_is_back(health_server: Server, checkpoint: Path) -> None:
    stub = find(health_server.run_id, "triton_python_backend_stub")
    weights, away = checkpoint / "model.safetensors", checkpoint / "away"
    stream = Stream(health_server)
    weights.rename(away)
    os.kill(core(health_server), signal.SIGKILL)
    wait_until(lambda: tells(health_server, "it is being started again"), "the health address tells of it")
    message = stream.end().message
    assert "times in a row without an output; the last time:" in message
    assert "there is no model.safetensors" in message
    refused = run(health_server, text_input="x", max_tokens=1)
    assert refused.error is not None
    assert "the engine is not running" in refused.message
    assert "there is no model.safetensors" in refused.message
    assert "it is tried again" in refused.message
    assert tells(health_server, "there is no model.safetensors")
    away.rename(weights)
    wait_until(lambda: is_well(health_server), "the next try")
    assert run(health_server, text_input="def f(", max_tokens=4).text
    assert find(health_server.run_id, "triton_python_backend_stub") == stub, "nothing else was started again"


def test_descriptors_that_run_out_for_a_while_are_a_pause(health_server: Server) -> None:
    stub = find(health_server.run_id, "triton_python_backend_stub")
    stream = Stream(health_server)
    soft, hard = resource.prlimit(stub, resource.RLIMIT_NOFILE)
    resource.prlimit(stub, resource.RLIMIT_NOFILE, (3, hard))
    try:
        os.kill(core(health_server), signal.SIGKILL)
        wait_until(lambda: tells(health_server, "Too many open files"), "the health address tells of it")
    finally:
        resource.prlimit(stub, resource.RLIMIT_NOFILE, (soft, hard))
    assert len(stream.end().token_ids) == NUM_TOKENS
    wait_until(lambda: is_well(health_server), "all is well again")


@pytest.mark.parametrize("name", ["tritonserver", "triton_python_backend_stub"])
def test_what_is_stopped_is_named(health_server: Server, name: str) -> None:
    pid = find(health_server.run_id, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: tells(health_server, "has been stopped (SIGSTOP)"), "the health address tells of it")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_well(health_server), "all is well again")
    assert "stopped (SIGSTOP)" in health_server.log()


def test_clients_that_cancel_as_their_streams_end_do_not_keep_the_server_from_ending(health_server: Server) -> None:
    """It would wait for those that it keeps."""
    cancel_at_the_end(health_server, NUM_CANCELLED)
    # What the end of the server must be is said in `support.serving.serve`, which the fixture uses.
    assert is_well(health_server)
