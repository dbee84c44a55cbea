"""What `quire serve` does with its server, against a stand-in for tritonserver."""

import errno
import http.client
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_cli.console import Console
from quire_cli.errors import CommandError
from quire_cli.server import supervisor
from quire_cli.server.health import Health
from quire_cli.server.run_directory import RunId
from quire_cli.server.server_process import StartError, StartWatch
from quire_cli.server.supervisor import delay_after_death
from quire_engine.system import process_state
from quire_engine.system.crash_loop import MAX_DEATHS, CrashLoop
from support import fake_server
from support.ports import free_port
from support.processes import is_gone
from support.serving import wait_until

HUNG_S, LONG_S = 2.0, 120.0
"""What counts as hanging where something hangs, and where a busy machine must not look like it."""
DRAIN_TIMEOUT_S = 100
"""Longer than `Supervised.wait` waits: a drain that ends has ended for another reason."""
SERVICES = ("grpc", "http", "metrics")
EXPLICIT = ("--model-control-mode=explicit",)
SUPERVISE = """
import json, os, sys
from quire_cli.console import Console
from quire_cli.errors import CommandError
from quire_cli.server.health import Health, HealthServer
from quire_cli import process
from quire_cli.server.launch import ServerFlags
from quire_cli.server.loaded_models import LoadedModels
from quire_cli.ports import Endpoint
from quire_cli.server.run_directory import RunDirectory
from quire_cli.server.supervisor import Service, blocked_signals
from quire_cli.server.workarounds.triton_2_51 import Triton251

folder, fake, ports = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
own = [sys.executable, fake, folder, *(f"{name}={port}" for name, port in ports.items())]
given = ServerFlags(tuple(sys.argv[9:]))
is_off = given.is_off("exit-on-error")
models = LoadedModels(given.all_values("load-model"), may_miss_some=is_off) if given.tokens else None
try:
    health = Health()
    with blocked_signals(), RunDirectory() as run, HealthServer(Endpoint("127.0.0.1", int(sys.argv[5])), health):
        sys.exit(Service(
            command=lambda: own + list((models.flags(given) if models else given).tokens),
            environment={**os.environ, **run.environment},
            endpoints={name: Endpoint("127.0.0.1", port) for name, port in ports.items()},
            ready_line="ready", console=Console(), what="loading", run_directory=run, health=health,
            workarounds=Triton251(run.temporary) if sys.argv[8] == "2.51" else None,
            silence_s=float(sys.argv[4]), unnoticed_s=5.0, hung_s=float(sys.argv[6]), drain_timeout_s=int(sys.argv[7]),
            models=models,
        ).run())
except CommandError as error:
    print(f"quire: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Supervised:
    """A supervisor in a process of its own, as it takes over signals and orphans."""

    def __init__(
        self, folder: Path, silence_s: float = 600, hung_s: float = LONG_S, flags: tuple[str, ...] = (),
        release: str = "2.51", **plan: Any,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.plan(**plan)
        # A program of the stub's name; what is started by a link has the link's name.
        (folder / "triton_python_backend_stub").symlink_to(str(shutil.which("sleep")))
        self.held = ExitStack()
        self.ports = {service: self.held.enter_context(free_port()) for service in SERVICES}
        self.health_port = self.held.enter_context(free_port())
        self.log_file = folder / "log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, str(folder), str(fake_server.__file__), json.dumps(self.ports),
                 str(silence_s), str(self.health_port), str(hung_s), str(DRAIN_TIMEOUT_S), release,
                 *flags],
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.run_id = RunId.of(self.process.pid)

    def plan(self, **plan: Any) -> None:
        """How the servers that are started from now on behave."""
        new = self.folder / "plan.new"
        new.write_text(json.dumps(plan))
        new.rename(self.folder / "plan.json")  # the server reads it at any moment

    def stub(self) -> int:
        """The stub of the present server."""
        stats = ((pid, process_state.process_stat(pid)) for pid in self.run_id.processes())
        return next(pid for pid, stat in stats if stat and stat.name == "triton_python_b")

    def health(self) -> tuple[int, list[str]]:
        """What the health address says: the status, and what is wrong."""
        status, body = self._ask("/health")
        return status, body["problems"]

    def details(self) -> Any:
        """What it says to the dashboard."""
        return self._ask("/health/details")[1]

    def _ask(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def log(self) -> list[str]:
        """What it has written to stderr so far."""
        return self.log_file.read_text().splitlines()

    def is_announced(self, within_s: float) -> bool:
        """Whether the ready line comes in time."""
        assert self.process.stdout is not None
        end, text = time.monotonic() + within_s, b""
        while not text.endswith(b"\n"):
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 100) if readable else b""
            if not chunk:
                return False
            text += chunk
        assert text == b"ready\n"
        return True

    def starts(self) -> list[int]:
        """The processes that have been this run's server."""
        file = self.folder / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def flags(self) -> list[list[str]]:
        """The flags of each start, but for the first one's."""
        return [line.split() for line in (self.folder / "flags").read_text().splitlines()[1:]]

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end."""
        self.process.send_signal(signal_number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(60)
        assert not self.run_id.processes()
        assert not self.run_id.directories()
        return code


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervised]]:
    running: list[Supervised] = []

    def start(**plan: Any) -> Supervised:
        running.append(Supervised(tmp_path, **plan))
        return running[-1]

    yield start
    for supervised in running:
        supervised.process.terminate()
        supervised.process.wait(60)
        assert supervised.process.stdout is not None
        supervised.process.stdout.close()
        supervised.held.close()


@pytest.mark.parametrize("late", SERVICES)
def test_ready_means_that_every_port_answers(supervise: Callable[..., Supervised], late: str) -> None:
    supervised = supervise(delayed=[late])
    for service in set(SERVICES) - {late}:
        wait_until(lambda service=service: accepts(supervised.ports[service]), f"{service} is open")
    assert not supervised.is_announced(within_s=0.5)
    (supervised.folder / "open").touch()
    assert supervised.is_announced(within_s=60), supervised.log()
    assert accepts(supervised.ports[late])
    assert supervised.stop() == 0, supervised.log()


def test_a_dead_stub_has_the_server_started_again_on_the_same_ports(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60), supervised.log()
    os.kill(supervised.stub(), signal.SIGKILL)
    assert supervised.is_announced(within_s=60), supervised.log()
    first, second = supervised.starts()
    assert first not in supervised.run_id.processes()
    assert second in supervised.run_id.processes()
    assert all(accepts(port) for port in supervised.ports.values())
    (line,) = [line for line in supervised.log() if "again" in line]
    assert re.fullmatch(r"quire: the stub process \d+ of a model died; starting the server again now, .*", line)
    assert supervised.stop() == 0, supervised.log()


def test_a_server_that_a_signal_killed_is_started_again(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60), supervised.log()
    os.kill(supervised.starts()[0], signal.SIGSEGV)
    assert supervised.is_announced(within_s=60), supervised.log()
    assert "tritonserver was killed by SIGSEGV; starting the server again now" in "\n".join(supervised.log())
    assert supervised.stop() == 0, supervised.log()


def test_why_the_server_died_is_remembered_and_told_to_the_next(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60)
    (directory,) = supervised.run_id.directories()
    requests, other = directory / "t" / "1-0.requests", directory / "t" / "other"
    requests.touch()
    other.touch()
    os.kill(supervised.starts()[-1], signal.SIGKILL)
    assert supervised.is_announced(within_s=60)
    assert "tritonserver was killed by SIGKILL" in requests.read_text()
    assert not other.exists()
    details = supervised.details()
    assert details["problems"] == []
    died = "tritonserver was killed by SIGKILL; the server is being started again"
    assert [one["problem"] for one in details["history"]].count(died) == 1
    assert all(one["since"] <= one["until"] for one in details["history"])
    wait_until(lambda: supervised.details()["host"].get("cpus") == os.cpu_count(), "it looks at the host")


def test_a_server_that_dies_again_and_again_ends_it_all(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60), supervised.log()
    supervised.plan(log=["error: the disk is gone"], exit_code=1)
    os.kill(supervised.stub(), signal.SIGKILL)
    assert supervised.wait() == 1
    assert len(supervised.starts()) == 5
    assert supervised.log()[-1].startswith("quire: the disk is gone; that was death 5 in a row")


def test_a_stopped_server_is_noticed_and_started_again(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(hung_s=HUNG_S)
    assert supervised.is_announced(within_s=60), supervised.log()
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    os.kill(supervised.starts()[0], signal.SIGSTOP)
    wait_until(lambda: supervised.health() == (503, ["tritonserver has been stopped (SIGSTOP)"]), "the truth is told")
    wait_until(lambda: "starting the server again" in "".join(supervised.log()), "it is given up")
    assert supervised.is_announced(within_s=60), supervised.log()
    says = r"tritonserver has been stopped \(SIGSTOP\) for \d+ s; starting the server again now"
    assert re.search(says, "".join(supervised.log()))
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    assert supervised.stop() == 0, supervised.log()


def test_a_server_that_goes_on_in_time_is_left_alone(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60), supervised.log()
    os.kill(supervised.starts()[0], signal.SIGSTOP)
    wait_until(lambda: supervised.health()[0] == 503, "it is noticed")
    os.kill(supervised.starts()[0], signal.SIGCONT)
    wait_until(lambda: supervised.health()[0] == 200, "all is well again")
    assert len(supervised.starts()) == 1
    assert supervised.log()[-2:] == [
        "quire: tritonserver has been stopped (SIGSTOP)", "quire: no longer: tritonserver has been stopped (SIGSTOP)",
    ]  # fmt: skip
    assert supervised.stop() == 0, supervised.log()


def test_a_stopped_stub_is_noticed_and_the_server_started_again(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(hung_s=HUNG_S)
    assert supervised.is_announced(within_s=60), supervised.log()
    stub = supervised.stub()
    os.kill(stub, signal.SIGSTOP)
    says = f"the stub process {stub} of a model has been stopped (SIGSTOP)"
    wait_until(lambda: supervised.health() == (503, [says]), "the truth is told")
    assert supervised.is_announced(within_s=60), supervised.log()
    again = rf"quire: {re.escape(says)} for \d+ s; starting the server again now, on the same ports"
    assert any(re.fullmatch(again, line) for line in supervised.log())
    assert supervised.stop() == 0, supervised.log()


def test_a_stub_that_no_longer_moves_is_noticed(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(hung_s=HUNG_S, in_flight=0)
    assert supervised.is_announced(within_s=60), supervised.log()
    wait_until(lambda: supervised.health() == (200, []), "it moves")
    (supervised.folder / "hang").touch()
    says = f"the stub process {supervised.stub()} of model 'm' does not move"
    wait_until(lambda: supervised.health() == (503, [says]), "the truth is told")
    (supervised.folder / "hang").unlink()
    supervised.plan()
    wait_until(lambda: supervised.health()[0] == 200, "all is well, by itself or after a restart")
    assert supervised.stop() == 0, supervised.log()


def test_a_supervisor_without_descriptors_takes_nobody_for_dead(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(in_flight=0)
    assert supervised.is_announced(within_s=60), supervised.log()
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    pid = supervised.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    says = "quire serve cannot see how its server is: Too many open files"
    try:
        wait_until(lambda: f"quire: {says}" in supervised.log(), "the truth is told")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    wait_until(lambda: f"quire: no longer: {says}" in supervised.log(), "it sees again")
    wait_until(lambda: supervised.health() == (200, []), "all is well again")
    assert len(supervised.starts()) == 1
    assert supervised.stop() == 0, supervised.log()


def test_an_engine_that_is_down_is_told_of_and_waited_for(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(hung_s=HUNG_S, in_flight=0, outage="there is no model.safetensors")
    assert supervised.is_announced(within_s=60), supervised.log()
    says = "model 'm' version 1: there is no model.safetensors"
    wait_until(lambda: supervised.health() == (503, [says]), "the truth is told")
    assert not supervised.is_announced(within_s=HUNG_S + 1), "a new server would not have an engine either"
    assert supervised.stop() == 0, supervised.log()


def test_a_server_that_does_not_end_is_ended_once_nothing_is_in_flight(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(in_flight=0, models={"m": "READY"}, ends=False)
    assert supervised.is_announced(within_s=60), supervised.log()
    wait_until(lambda: supervised.health() == (200, []), "its stub shows itself")
    assert supervised.stop() == 0, supervised.log()


def test_it_is_not_while_something_is_in_flight(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(in_flight=1, models={"m": "READY"}, ends=False)
    assert supervised.is_announced(within_s=60), supervised.log()
    supervised.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any("draining" in line for line in supervised.log()), "it drains")
    with pytest.raises(subprocess.TimeoutExpired):  # twice as long as it waits for a server that has nothing in flight
        supervised.process.wait(3)
    assert supervised.stop() == 1
    assert supervised.log()[-1].startswith("quire: stopped at once by a second signal")


def test_the_stub_of_a_model_that_was_unloaded_is_ended_when_the_server_does_not(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise(hung_s=HUNG_S, flags=EXPLICIT, in_flight=0, models={"m": "UNLOADING"}, ends=False)
    assert supervised.is_announced(within_s=60), supervised.log()
    stub = supervised.stub()
    wait_until(lambda: is_gone(stub), "it is ended")
    wait_until(lambda: "was unloaded, and tritonserver does not end its stub" in supervised.log()[-1], "it is told")
    assert len(supervised.starts()) == 1
    assert supervised.stop() == 0, supervised.log()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_models_that_were_loaded_are_loaded_again(
    supervise: Callable[..., Supervised], signal_number: signal.Signals
) -> None:
    asked = ("--load-model=unloaded", "--load-model", "kept")
    loaded = {"m": "READY", "kept": "READY", "by-api": "READY", "unloaded": "UNAVAILABLE unloaded", "never": ""}
    supervised = supervise(hung_s=HUNG_S, flags=(*EXPLICIT, *asked), in_flight=0, models=loaded)
    assert supervised.is_announced(within_s=60), supervised.log()
    os.kill(supervised.stub(), signal_number)
    wait_until(lambda: supervised.health()[0] == 503, "it is told")
    assert supervised.is_announced(within_s=60), supervised.log()
    again = [f"--load-model={name}" for name in ("by-api", "kept", "m")]
    assert supervised.flags() == [[*EXPLICIT, *again, "--exit-on-error=false"]]
    wait_until(lambda: supervised.health() == (200, []), "all is well again")
    assert supervised.stop() == 0, supervised.log()


def test_descriptors_that_run_out_here_end_neither_a_start_nor_a_drain(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(in_flight=0, models={"m": "READY"}, delayed=["http"], ends=False)
    wait_until(lambda: len(supervised.starts()) == 1, "it is started")
    pid = supervised.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def limit(number: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (number, hard))

    limit(3)
    (supervised.folder / "open").touch()
    assert not supervised.is_announced(within_s=1.5)
    limit(soft)
    assert supervised.is_announced(within_s=60), supervised.log()
    limit(3)
    supervised.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any("draining" in line for line in supervised.log()), "it drains")
    with pytest.raises(subprocess.TimeoutExpired):
        supervised.process.wait(1.0)
    limit(soft)
    assert supervised.stop() == 1
    assert supervised.log()[-1].startswith("quire: stopped at once by a second signal")


def test_who_wants_to_be_served_without_a_broken_model_is_and_it_is_named(supervise: Callable[..., Supervised]) -> None:
    models = {"m": "READY", "broken": "UNAVAILABLE there is no model.json"}
    flags = (*EXPLICIT, "--load-model=m", "--load-model=broken", "--exit-on-error=false")
    supervised = supervise(flags=flags, in_flight=0, models=models, unready=True)
    assert supervised.is_announced(within_s=60), supervised.log()
    says = "model 'broken' is not loaded: there is no model.json"
    wait_until(lambda: supervised.health() == (503, [says]), "the truth is told")
    assert supervised.stop() == 0, supervised.log()


def test_a_model_that_cannot_be_loaded_again_is_named_until_it_is(supervise: Callable[..., Supervised]) -> None:
    plan: dict[str, Any] = {"in_flight": 0, "models": {"m": "READY", "other": "READY"}}
    supervised = supervise(flags=EXPLICIT, **plan)
    assert supervised.is_announced(within_s=60), supervised.log()
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    supervised.plan(**plan, delayed=["http"])
    os.kill(supervised.stub(), signal.SIGKILL)
    wait_until(lambda: len(supervised.starts()) == 2, "it is started again")
    gone = {"m": "READY", "other": "UNAVAILABLE there is no model.json"}
    supervised.plan(**{**plan, "models": gone, "unready": True})
    (supervised.folder / "open").touch()
    assert supervised.is_announced(within_s=60), supervised.log()
    says = "model 'other' is not loaded: there is no model.json"
    wait_until(lambda: supervised.health() == (503, [says]), "the truth is told")
    supervised.plan(**plan)
    wait_until(lambda: supervised.health() == (200, []), "it is loaded")
    assert supervised.log()[-2:] == [f"quire: {says}", f"quire: no longer: {says}"]
    assert supervised.stop() == 0, supervised.log()


@pytest.mark.parametrize(
    "plan", [{"models": {"m": "UNLOADING"}}, {"models": {"m": "READY"}, "is_ending": True}, {"is_ending": True}]
)
def test_the_stub_of_an_unloaded_model_may_be_killed(supervise: Callable[..., Supervised], plan: Any) -> None:
    """It has no requests left, which its death would keep from ever ending."""
    supervised = supervise(flags=EXPLICIT, in_flight=0, **plan)
    assert supervised.is_announced(within_s=60), supervised.log()
    stub = supervised.stub()
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    os.kill(stub, signal.SIGKILL)
    says = f"quire: the stub process {stub} of model 'm' died while its model was being unloaded"
    wait_until(lambda: says in supervised.log(), "it is told")
    wait_until(lambda: supervised.health() == (200, []), "nobody misses it")
    assert len(supervised.starts()) == 1
    assert supervised.stop() == 0, supervised.log()


def test_requests_of_a_stub_that_is_killed_during_an_unload_are_ended_by_another_start(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise(flags=EXPLICIT, in_flight=1, models={"m": "UNLOADING"})
    assert supervised.is_announced(within_s=60), supervised.log()
    stub = supervised.stub()
    wait_until(lambda: supervised.health() == (200, []), "all is well")
    os.kill(stub, signal.SIGKILL)
    says = f"{stub} of model 'm' died while its model was being unloaded; starting the server again"
    wait_until(lambda: any(says in line for line in supervised.log()), "it is told")
    assert supervised.stop() == 0, supervised.log()


def test_a_stub_that_dies_while_it_drains_ends_the_drain(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(in_flight=2, models={"m": "READY"}, ends=False)
    assert supervised.is_announced(within_s=60), supervised.log()
    stub = supervised.stub()
    supervised.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any("draining" in line for line in supervised.log()), "it drains")
    wait_until(lambda: supervised.health()[1] == ["the server is draining: it takes no new requests"], "it says so")
    os.kill(stub, signal.SIGKILL)
    assert supervised.wait() == 1
    assert f"the stub process {stub} of model 'm' died while the server drained" in supervised.log()[-1]


def test_another_server_on_its_ports_is_not_taken_for_it(supervise: Callable[..., Supervised]) -> None:
    """Of two that start at one moment, the one that gets no port must not call itself ready before it fails."""
    supervised = supervise(delayed=SERVICES)
    wait_until(supervised.starts, "the start")
    plan = supervised.folder / "another"
    plan.mkdir()
    (plan / "plan.json").write_text('{"no_stub": true}')
    ports = [f"{service}={port}" for service, port in supervised.ports.items()]
    another = subprocess.Popen([sys.executable, fake_server.__file__, str(plan), *ports])
    try:
        wait_until(lambda: all(map(accepts, supervised.ports.values())), "the other one answers")
        assert not supervised.is_announced(within_s=1)
    finally:
        another.terminate()
        another.wait()
    (supervised.folder / "open").touch()
    assert supervised.is_announced(within_s=60), supervised.log()
    assert supervised.stop() == 0


def test_the_first_start_must_succeed(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(log=["error: the disk is gone"], exit_code=1)
    assert supervised.wait() == 1
    assert len(supervised.starts()) == 1
    assert supervised.log()[-1] == "quire: the disk is gone"


def test_a_stop_signal_is_heeded_while_the_server_starts_again(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    assert supervised.is_announced(within_s=60), supervised.log()
    supervised.plan(delayed=["http"])
    os.kill(supervised.stub(), signal.SIGKILL)
    wait_until(lambda: len(supervised.starts()) == 2, "the second start")
    assert supervised.stop() == 0, supervised.log()
    assert not supervised.is_announced(within_s=0)


def test_a_stub_that_died_at_once_ends_the_start(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise(delayed=["http"], log=["terminate called", "  what():  stol"], stub_argument="nonsense")
    assert supervised.wait() == 1
    line = supervised.log()[-1]
    assert re.match(r"quire: a model's process ended with exit code \d+ while it started, saying .*, and", line), line


@pytest.mark.parametrize(("unnoticed_s", "ends"), [(0.0, True), (60.0, False)])
def test_a_death_that_tritonserver_may_still_notice_does_not_end_the_start(unnoticed_s: float, ends: bool) -> None:
    log = SimpleNamespace(last_words="", silent_s=lambda: 0.0)
    server: Any = SimpleNamespace(log=log, dead_children=lambda: {1: signal.SIGABRT}, stubs=set)
    watch = StartWatch(server, needs_stub=True, silence_s=1.0, unnoticed_s=unnoticed_s)
    with pytest.raises(StartError, match="was killed by SIGABRT while it started") if ends else nullcontext():
        watch.look()


@pytest.mark.parametrize("release", ["2.51", "2.70"])
def test_a_silent_start_without_a_stub_ends(supervise: Callable[..., Supervised], release: str) -> None:
    supervised = supervise(delayed=["http"], no_stub=True, silence_s=1, release=release)
    assert supervised.wait() == 1
    assert "has started no process for a model" in supervised.log()[-1]


def test_a_server_that_cannot_be_started_again_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a death, want of a descriptor or of a process is counted, and not the end of all."""
    failures = [OSError(errno.EAGAIN, "no process")]

    def start(*_: Any, **__: Any) -> str:
        if failures:
            raise failures.pop()
        return "server"

    monkeypatch.setattr(supervisor, "ServerProcess", start)
    dead: Any = SimpleNamespace(wait_for_signal=time.sleep)
    run: Any = SimpleNamespace(temporary=tmp_path)
    crash_loop = CrashLoop()
    with Console() as console:
        service = supervisor.Service(
            command=list, environment={}, endpoints={}, ready_line="", what="", drain_timeout_s=0, console=console,
            run_directory=run, health=Health(),
        )  # fmt: skip
        assert service._start_again(dead, crash_loop, 60.0, "it died") == "server"
        assert crash_loop.num_deaths == 1
        failures += [OSError(errno.EMFILE, "no descriptor")] * 5
        crash_loop.num_deaths = MAX_DEATHS - 2
        monkeypatch.setattr(supervisor.Service, "_pause", lambda *_: False)
        with pytest.raises(CommandError, match="cannot be started: no descriptor; that was death 5 in a row"):
            service._start_again(dead, crash_loop, 0.0, "it died")
    said = capsys.readouterr().err
    assert "quire: tritonserver cannot be started: no process; starting the server again now" in said


def test_pauses_grow_and_a_long_service_forgives() -> None:
    crash_loop = CrashLoop()
    assert [delay_after_death(crash_loop, served, "x") for served in (0, 1, 29, 0)] == [0, 1, 2, 4]
    assert delay_after_death(crash_loop, 30, "x") == 0
    for _ in range(4):
        delay_after_death(crash_loop, 0, "x")
    with pytest.raises(CommandError, match=r"^x; that was death 5 in a row"):
        delay_after_death(crash_loop, 0, "x")


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        return True
    except ConnectionRefusedError:
        return False
