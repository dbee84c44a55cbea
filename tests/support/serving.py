"""A real tritonserver for tests, started by `quire serve` as a user would, and proof that nothing is left of it."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_cli.server.run_directory import RunId
from support.faults import put_fault
from support.processes import eventually
from support.sweeps import sweeping

__all__ = [
    "ANY_PORTS", "CHECKPOINT", "ROOT", "SMALL", "Server", "add_model", "health", "run_cli", "serve", "start",
    "wait_until",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "tinypy" / "1" / "model"
"""The demo model."""
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
"""Settings of a model that starts fast."""
READY_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
_READY = re.compile(
    r"quire: ready grpc=(\S+) http=(\S+) metrics=(\S+) health=(\S+)(?: openai=(\S+))?(?: .*?dashboard=(\S+))?(?: .*)?\n"
)
ANY_PORTS = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--health-port", "0", "--no-dashboard",
             "--no-openai")  # fmt: skip


@dataclass(kw_only=True)
class Server:
    """A running `quire serve`. The endpoints are `host:port`."""

    process: subprocess.Popen[bytes]
    run_id: RunId
    log_file: Path
    grpc: str = ""
    http: str = ""
    metrics: str = ""
    health: str = ""
    dashboard: str = ""
    openai: str = ""

    def log(self) -> str:
        """All it has written to stderr so far."""
        return self.log_file.read_text(errors="replace")

    def wait_for_ready_line(self) -> tuple[str, str, str]:
        """Wait until it says that it is ready, once more if it was started again; returns the three endpoints."""
        return _wait_for_ready_line(self)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"quire serve did not stop; its log:\n{self.log()}") from None
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def assert_nothing_left(self) -> None:
        """Fail when a process, a shared memory file or a directory of this run is left."""
        assert not self.run_id.processes(), self.log()
        assert not self.run_id.shared_memory(), self.log()
        assert not self.run_id.directories(), self.log()


@contextmanager
def serve(*args: str, env: Mapping[str, str] | None = None, step_seconds: float = 0.0) -> Iterator[Server]:
    """A server that is ready, on free ports; afterwards it is stopped, and nothing of it may be left.

    Args:
        args: further arguments of `quire serve`.
        env: further environment variables.
        step_seconds: how much longer every step takes than the demo model needs, as a larger model's would: for tests
            that do something while requests run.
    """
    with tempfile.TemporaryDirectory(prefix="quire-slow-") as folder:
        environment = dict(env or {})
        if step_seconds:
            fault = Path(folder, "fault.json")
            put_fault(fault, action="slow", rank=0, seconds=step_seconds)
            environment["QUIRE_FAULT_INJECTION"] = str(fault)
        server = start(*args, env=environment)
        try:
            yield server
        finally:
            code = server.stop()
    assert code == 0, f"quire serve ended with {code}; its log:\n{server.log()}"
    server.assert_nothing_left()


def start(*args: str, env: Mapping[str, str] | None = None, ready: bool = True, within: Sequence[str] = ()) -> Server:
    """Start a server, and unless told otherwise wait until it is ready. The caller stops it.

    Args:
        args: further arguments of `quire serve`.
        env: further environment variables.
        ready: whether to wait.
        within: a command that the server's own is appended to, and that becomes the server.
    """
    handle, log = tempfile.mkstemp(prefix="quire-serve-", suffix=".log")
    with sweeping():
        try:
            process = subprocess.Popen(
                [*within, sys.executable, "-m", "quire_cli", "serve", *ANY_PORTS, *args],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=handle, cwd=ROOT,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        finally:
            os.close(handle)
        server = Server(process=process, run_id=RunId.of(process.pid), log_file=Path(log))
        weakref.finalize(server, Path(log).unlink, missing_ok=True)
        # It sweeps before it makes a folder of its own.
        wait_until(lambda: server.run_id.directories() or process.poll() is not None, "it has begun", READY_DEADLINE_S)
    if ready:
        try:
            server.grpc, server.http, server.metrics = server.wait_for_ready_line()
        except BaseException:
            server.stop(signal.SIGKILL)
            raise
    return server


def add_model(repository: Path, name: str, settings: Mapping[str, Any], config: str = "") -> Path:
    """Add a model to a model repository; returns the folder of its version 1.

    Args:
        repository: the folder of the models.
        name: of the model.
        settings: of its `model.json`; the checkpoint is the demo model's unless they name one.
        config: further lines of its `config.pbtxt`.
    """
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'backend: "quire"\n{config}')
    (version / "model.json").write_text(json.dumps({"model": str(CHECKPOINT), **settings}))
    return version


def run_cli(
    *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `quire` to its end."""
    with sweeping() if args[0] == "serve" else nullcontext():
        return subprocess.run(
            [sys.executable, "-m", "quire_cli", *args],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s,
            env={**os.environ, **(env or {})}, check=False,
        )  # fmt: skip


def health(server: Server) -> tuple[int, dict[str, Any]]:
    """Status and body of `/health` of `quire serve`."""
    try:
        with urllib.request.urlopen(f"http://{server.health}/health", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def wait_until(is_true: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    """Poll until something holds; fail when the deadline passes first."""
    assert eventually(lambda: bool(is_true()), deadline_s), f"{what}: not within {deadline_s} s"


def _wait_for_ready_line(server: Server) -> tuple[str, str, str]:
    assert server.process.stdout is not None
    text, end = "", time.monotonic() + READY_DEADLINE_S
    while not (match := _READY.match(text)):
        readable, _, _ = select.select([server.process.stdout], [], [], max(0.0, end - time.monotonic()))
        chunk = os.read(server.process.stdout.fileno(), 4096).decode() if readable else ""
        assert chunk, f"no ready line, stdout is {text!r}; the log:\n{server.log()}"
        text += chunk
    server.health, server.openai, server.dashboard = match[4], match[5] or "", match[6] or ""
    return match[1], match[2], match[3]
