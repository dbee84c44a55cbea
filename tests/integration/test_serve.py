"""`quire serve` as its user meets it: ready, drained, killed, mistyped; and nothing left of any of it.

The life of processes is tested with a small model of the plain Python backend, which starts within a second.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_cli.server.run_directory import sweep
from quire_engine.system import process_state
from support.clients import MODEL, Answer, ask, run, with_client
from support.faults import put_fault
from support.processes import command_line
from support.serving import ANY_PORTS, CHECKPOINT, Server, run_cli, serve, wait_until
from support.sweeps import no_sweeps
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

Start = Callable[..., Server]

STREAM: dict[str, Any] = {
    "text_input": "def add(a, b):", "max_tokens": 500, "ignore_eos": True, "stream": True,
    "return_token_ids": True, "return_finish_reason": True,
}  # fmt: skip
ECHO_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "number" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Counts, ten numbers a second; has a child process, as the engine does.
ECHO_MODEL = """
import subprocess, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        START
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])
            threading.Thread(target=self.answer, args=(request.get_response_sender(), count)).start()

    def answer(self, sender, count):
        for i in range(count):
            time.sleep(0.1 if i else 0)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("number", np.array([i], dtype=np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.child.kill()
        self.child.wait()
"""


def write_echo(folder: Path, at_start: str = "pass") -> Path:
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(ECHO_CONFIG)
    (folder / "echo" / "1" / "model.py").write_text(ECHO_MODEL.replace("START", at_start))
    return folder


@pytest.fixture
def echo(tmp_path: Path) -> str:
    return str(write_echo(tmp_path / "echo-repository"))


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs during all these tests, and is left in peace by all of them."""
    repository = write_echo(tmp_path_factory.mktemp("repository"))
    flags = ("--drain-timeout", "77", "--", "--exit-timeout-secs=33", "--log-info=true")
    with serve("--model-repository", str(repository), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def struck_server() -> Iterator[Server]:
    """The demo model, for tests whose victims are replaced."""
    with serve("--model", str(CHECKPOINT), "--name", MODEL) as running:
        yield running


def get(address: str, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://{address}{path}", data=data, timeout=60) as response:
        return str(response.read().decode())


class Counting(threading.Thread):
    """A streamed request in flight."""

    def __init__(self, server: Server, count: int) -> None:
        super().__init__()
        self.address, self.count = server.http, count
        self.started_answering = threading.Event()
        self.lines: list[str] = []

    def run(self) -> None:
        url = f"http://{self.address}/v2/models/echo/generate_stream"
        body = json.dumps({"count": self.count}).encode()
        try:
            with urllib.request.urlopen(url, data=body, timeout=60) as response:
                for line in response:
                    if line.strip():
                        self.lines.append(line.decode())
                    self.started_answering.set()
        except OSError:
            pass  # cut off, as some tests want it

    @classmethod
    def answer(cls, server: Server, count: int) -> list[str]:
        """The lines of a request that runs to its end."""
        request = cls(server, count)
        request.run()
        return request.lines

    @classmethod
    def begin(cls, server: Server, count: int) -> "Counting":
        request = cls(server, count)
        request.start()
        assert request.started_answering.wait(30)
        return request


def test_is_ready_where_it_says_so(echo_server: Server) -> None:
    assert get(echo_server.http, "/v2/health/ready") == ""
    assert "nv_cpu_utilization" in get(echo_server.metrics, "/metrics")
    for endpoint in (echo_server.grpc, echo_server.http, echo_server.metrics):
        host, port = endpoint.split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=60).close()
        with pytest.raises(ConnectionRefusedError):  # another address of the loopback device
            socket.create_connection(("127.0.0.2", int(port)), timeout=60)
    assert echo_server.run_id.directories()[0].stat().st_mode & 0o777 == 0o700


def test_a_host_by_name_a_response_cache_and_the_log_level_for_who_has_the_header(echo: str) -> None:
    """The cache's library is in the wheel, where the server would not look."""
    flags = ("--cache-config=local,size=1048576", "--http-restricted-api=logging:admin=open sesame")
    with serve("--host", "localhost", "--model-repository", echo, "--", *flags) as server:
        assert server.http.startswith("127.0.0.1:")
        assert len(Counting.answer(server, count=1)) == 1
        assert "InferResponseSend" not in server.log()
        request = urllib.request.Request(f"http://{server.http}/v2/logging", data=b'{"log_verbose_level": 1}')
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=60)
        request.add_header("admin", "open sesame")
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["log_verbose_level"] == 1
        assert len(Counting.answer(server, count=1)) == 1
        wait_until(lambda: "infer_request.cc" in server.log(), "the log says more than before")


def test_draining_lets_a_running_request_finish(echo: str, start: Start) -> None:
    server = start("--model-repository", echo)
    request = Counting.begin(server, count=20)
    assert server.stop() == 0, server.log()
    request.join(30)
    assert len(request.lines) == 20
    server.assert_nothing_left()


def test_draining_ends_with_its_timeout(echo: str, start: Start) -> None:
    server = start("--model-repository", echo, "--drain-timeout", "1")
    request = Counting.begin(server, count=300)
    assert server.stop() == 1
    assert server.log().splitlines()[-1].startswith("quire: not drained within 1 s")
    request.join(30)
    server.assert_nothing_left()


def test_second_signal_stops_at_once(echo: str, start: Start) -> None:
    server = start("--model-repository", echo, "--drain-timeout", "600")
    request = Counting.begin(server, count=3000)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "quire: draining" in server.log(), "draining")
    assert server.stop() == 1
    assert server.log().splitlines()[-1].startswith("quire: stopped at once")
    request.join(30)
    server.assert_nothing_left()


def test_its_ports_are_kept_while_a_model_loads_and_it_can_be_stopped(tmp_path: Path, start: Start) -> None:
    """Or the system could give a port to another connection, before tritonserver listens there."""
    repository = write_echo(tmp_path / "slow", at_start="print('loading slowly', file=sys.stderr); time.sleep(600)")
    server = start("--model-repository", str(repository), "--verbose", ready=False)
    wait_until(lambda: "loading slowly" in server.log(), "loading")
    command = Path(f"/proc/{find_server(server)}/cmdline").read_text().replace("\0", " ")
    ports = [int(found) for found in re.findall(r"--(?:grpc|http|metrics)-port[= ](\d+)", command)]
    assert len(ports) == 3, command
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    assert server.stop(signal.SIGINT) == 0, server.log()


def test_a_model_at_any_path_is_served_without_a_repository_and_its_stubs_end_cleanly(tmp_path: Path) -> None:
    """They are tritonserver's children, and its log says nothing of how they end: the shell that starts them does."""
    record = tmp_path / "ends"
    (tmp_path / "bash").write_text(f'#!/bin/sh\n/bin/bash "$@"\necho $? >> {record}\n')
    (tmp_path / "bash").chmod(0o755)
    env = {"LC_ALL": "C", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "mödel ключ").symlink_to(CHECKPOINT)
    with serve("--model", str(tmp_path / "mödel ключ"), "--name", "mine", "--verbose", env=env) as server:
        answer = json.loads(get(server.http, "/v2/models/mine/generate", {"text_input": "def add(a, b):"}))
    assert answer["model_name"] == "mine"
    assert answer["text_output"]
    # One completes the model's configuration, the other serves it. That one has answered that it is done,
    # and when it ends says 1 if it sees that the server has gone before.
    configures, serves = record.read_text().split()
    assert configures == "0"
    assert serves in ("0", "1")
    assert "egmentation" not in server.log()


def find_server(server: Server) -> int:
    return _find(server, "tritonserver")


def find_stub(server: Server) -> int:
    return _find(server, "triton_python_backend_stub")


def find_serve(server: Server) -> int:
    return server.process.pid


def _find(server: Server, name: str) -> int:
    stats = ((pid, process_state.process_stat(pid)) for pid in server.run_id.processes())
    return next(pid for pid, stat in stats if stat and stat.name == name[:15])


@pytest.mark.parametrize("victim", [find_server, find_stub])
def test_death_of_the_server_or_a_stub_is_a_pause(echo: str, victim: Callable[[Server], int], start: Start) -> None:
    server = start("--model-repository", echo)
    request = Counting.begin(server, count=3000)
    old = set(server.run_id.processes())
    memory = set(server.run_id.shared_memory())
    os.kill(victim(server), signal.SIGKILL)
    server.wait_for_ready_line()
    request.join(30)
    assert not request.is_alive(), "a client that was cut off is not told"
    assert "starting the server again now, on the same ports" in server.log()
    assert not old & set(server.run_id.processes())
    assert not memory & set(server.run_id.shared_memory())
    assert len(Counting.answer(server, count=3)) == 3
    assert "nv_cpu_utilization" in get(server.metrics, "/metrics")
    assert server.stop() == 0, server.log()
    server.assert_nothing_left()


def test_streams_over_grpc_end_with_an_error_when_the_stub_dies_and_the_next_request_works(
    struck_server: Server,
) -> None:
    server = struck_server
    answers: list[Answer] = []
    first = threading.Event()
    client = threading.Thread(
        target=lambda: answers.append(run(server, **STREAM, on_response=lambda response: first.set()))
    )
    client.start()
    assert first.wait(30)
    os.kill(find_stub(server), signal.SIGKILL)
    died = time.monotonic()
    client.join(30)
    told = time.monotonic()
    assert answers[0].error is not None
    assert answers[0].error.status() == "StatusCode.UNAVAILABLE"
    server.wait_for_ready_line()
    print(f"the client was told after {told - died:.2f} s, the server was ready after {time.monotonic() - died:.2f} s")
    assert run(server, text_input="x", max_tokens=1).text != ""


def test_death_of_the_engine_is_the_backends_affair(struck_server: Server) -> None:
    """Serve goes on: the stub that lost its engine decides what becomes of it."""
    server = struck_server
    stub = find_stub(server)
    (engine,) = (pid for pid in server.run_id.processes() if "quire_engine.core.core_process" in command_line(pid))
    os.kill(engine, signal.SIGKILL)
    assert run(server, text_input="x", max_tokens=4).text, "the request waits for the next engine"
    assert "was killed by SIGKILL; it is being started again" in server.log()
    assert server.process.poll() is None, server.log()
    assert find_stub(server) == stub


def test_draining_lets_a_running_stream_finish_and_refuses_new_requests(start: Start, tmp_path: Path) -> None:
    put_fault(tmp_path / "slow.json", action="slow", rank=0, seconds=0.01)  # it goes on until the signal has been heard
    server = start("--drain-timeout", "60", env={"QUIRE_FAULT_INJECTION": str(tmp_path / "slow.json")})

    async def work(client: grpc_aio.InferenceServerClient) -> tuple[Answer, Answer]:
        first = asyncio.Event()
        running = asyncio.create_task(ask(client, on_response=lambda response: first.set(), **STREAM))
        await first.wait()
        server.process.send_signal(signal.SIGTERM)
        # tritonserver takes a moment to hear of it.
        while (refused := await ask(client, text_input="x", max_tokens=1)).error is None:
            assert not running.done()
        assert not running.done()
        return await running, refused

    whole, refused = asyncio.run(with_client(server, work))
    assert server.wait() == 0, server.log()
    assert "quire: draining" in server.log()
    assert len(whole.token_ids) == STREAM["max_tokens"]
    assert whole.responses[-1]["finish_reason"] == ["length"]
    assert whole.num_final_flags == 1
    assert refused.error is not None
    assert refused.responses == []
    server.assert_nothing_left()


def test_a_killed_run_is_removed_by_the_next(echo: str, echo_server: Server, start: Start) -> None:
    before = set(echo_server.run_id.processes())
    killed = start("--model-repository", echo)
    with no_sweeps():
        # All at once, so that no process cleans up: the child of the stub is left, shared memory, and the directory.
        for pid in [find_serve(killed), find_server(killed), find_stub(killed)]:
            os.kill(pid, signal.SIGKILL)
        killed.wait()
        assert killed.run_id.processes()
        assert killed.run_id.shared_memory()
        assert killed.run_id.directories()
        following = start("--model-repository", echo, ready=False)
        assert "quire: removed what an earlier run left behind" in following.log()
        killed.assert_nothing_left()
    following.wait_for_ready_line()
    assert following.stop() == 0, following.log()
    following.assert_nothing_left()
    assert set(echo_server.run_id.processes()) == before, "a living run was touched"


def test_a_killed_engine_is_removed_by_the_next_run(start: Start) -> None:
    killed = start("--model", str(CHECKPOINT))
    with no_sweeps():
        for pid in [find_serve(killed), find_server(killed), find_stub(killed)]:
            os.kill(pid, signal.SIGKILL)
        killed.wait()
        sweep()
    killed.assert_nothing_left()


def test_orphaned_server_ends_by_itself(echo: str, start: Start) -> None:
    server = start("--model-repository", echo)
    with no_sweeps():
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not server.run_id.processes(), "the processes of a killed quire serve end")
        sweep()
    server.assert_nothing_left()


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str, code: int = 1) -> None:
    """The command failed with one line on stderr."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("quire: loading ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("quire: ")
    for part in parts:
        assert part in lines[0]


def copy_of_demo(folder: Path) -> Path:
    """A repository of the demo model at an odd place."""
    version = folder / "tinypy" / "1"
    version.mkdir(parents=True)
    (version / "model").symlink_to(CHECKPOINT)
    (version / "model.json").write_text('{"model": "model"}')
    (version.parent / "config.pbtxt").write_text('backend: "quire"\n')
    return folder


def test_any_path_can_be_served(tmp_path: Path) -> None:
    repository = copy_of_demo(tmp_path / "with a space" / "$HOME;'(" / "mödel ключ")
    with serve("--model-repository", str(repository), env={"LC_ALL": "C"}) as server:
        assert run(server, text_input="x", max_tokens=1).text != ""


def test_places_that_cannot_be_used_are_refused_by_name(tmp_path: Path, echo: str) -> None:
    (tmp_path / "a b").mkdir()
    result = run_cli("serve", *ANY_PORTS, "--model-repository", echo, env={"TMPDIR": str(tmp_path / "a b")})
    assert_one_line(result, str(tmp_path / "a b"), "TMPDIR")
    repository = write_echo(tmp_path / "repository")
    (repository / "echo").rename(repository / "my echo")
    assert_one_line(run_cli("serve", *ANY_PORTS, "--model-repository", str(repository)), "my echo", "give it a name")
    file = repository / "my echo" / "config.pbtxt"
    assert_one_line(run_cli("serve", *ANY_PORTS, "--model-repository", str(file)), "is a file")
    result = run_cli("serve", *ANY_PORTS, "--", f"--model-repository={tmp_path / 'a b'}")
    assert_one_line(result, "--model-repository", code=2)


def test_no_path_is_enough(echo: str) -> None:
    with serve("--model-repository", echo, env={"PATH": ""}) as server:
        assert len(Counting.answer(server, count=2)) == 2


def test_a_first_stub_that_is_killed_ends_the_start(tmp_path: Path) -> None:
    """It completes the model's configuration, and tritonserver would wait for it for ever."""
    (tmp_path / "bash").write_text("#!/bin/sh\necho 'no more memory' >&2\nkill -9 $$\n")
    (tmp_path / "bash").chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = run_cli("serve", *ANY_PORTS, env=env)
    assert_one_line(result, "was killed by SIGKILL while it started, saying 'no more memory'", "--verbose")


def test_port_in_use(echo: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_cli("serve", *ANY_PORTS, "--model-repository", echo, "--http-port", port)
    assert_one_line(result, port, "in use", "--http-port")


def test_model_that_does_not_load_is_named_in_one_line(tmp_path: Path) -> None:
    repository = write_echo(tmp_path / "broken", at_start="raise ValueError('the weights are gone; bring them back')")
    result = run_cli("serve", *ANY_PORTS, "--model-repository", str(repository))
    assert_one_line(result, "model 'echo' did not load", "the weights are gone; bring them back")


def test_unknown_server_flag(echo: str) -> None:
    result = run_cli("serve", *ANY_PORTS, "--model-repository", echo, "--", "--nonsense")
    assert_one_line(result, "unrecognized option '--nonsense'")


def test_flags_for_tritonserver_win(echo_server: Server) -> None:
    assert "exit_timeout                     | 33 " in echo_server.log()


def test_missing_model_folder(tmp_path: Path) -> None:
    assert_one_line(run_cli("serve", *ANY_PORTS, "--model", str(tmp_path / "nowhere")), str(tmp_path / "nowhere"))
    assert_one_line(
        run_cli("serve", *ANY_PORTS, "--model-repository", str(tmp_path / "nowhere")), str(tmp_path / "nowhere")
    )
    assert_one_line(
        run_cli("serve", *ANY_PORTS, "--model-repository", str(tmp_path)), "holds no model", "quire model add"
    )


def test_truncated_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    assert_one_line(run_cli("serve", *ANY_PORTS, "--model", str(folder)), "model.safetensors")
