"""What `quire serve` does with its server, against a stand-in for tritonserver."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_cli.ports import Endpoint, reserve
from quire_cli.run_directory import RunId
from support import fake_server
from support.serving import wait_until

SERVICES = ("grpc", "http", "metrics")
SUPERVISE = """
import json, os, sys
from quire_cli.console import Console
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.run_directory import RunDirectory
from quire_cli.supervisor import Supervisor, blocked_signals

folder, fake, ports = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    with blocked_signals(), RunDirectory() as run:
        sys.exit(Supervisor(
            command=[sys.executable, fake, folder, *(f"{name}={port}" for name, port in ports.items())],
            environment={**os.environ, **run.environment},
            endpoints={name: Endpoint("127.0.0.1", port) for name, port in ports.items()},
            ready_line="ready", drain_timeout_s=5, console=Console(), what="loading",
        ).run())
except CommandError as error:
    print(f"quire: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Supervised:
    """A supervisor in a process of its own, as it takes over signals and orphans."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder = folder
        (folder / "plan.json").write_text(json.dumps(plan))
        # A program of the stub's name; what is started by a link has the link's name.
        (folder / "triton_python_backend_stub").symlink_to(str(shutil.which("sleep")))
        reserved = reserve({service: Endpoint("127.0.0.1", 0) for service in SERVICES})
        self.ports = {service: endpoint.port for service, endpoint in reserved.items()}
        self.log_file = folder / "log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, str(folder), str(fake_server.__file__), json.dumps(self.ports)],
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.run_id = RunId.of(self.process.pid)

    def log(self) -> list[str]:
        """What it has written to stderr so far."""
        return self.log_file.read_text().splitlines()

    def is_announced(self, within_s: float) -> bool:
        """Whether the ready line comes in time."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], within_s)
        return bool(readable) and os.read(self.process.stdout.fileno(), 100) == b"ready\n"

    def starts(self) -> list[int]:
        """The processes that have been this run's server."""
        file = self.folder / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

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


@pytest.mark.parametrize("late", SERVICES)
def test_ready_means_that_every_port_answers(supervise: Callable[..., Supervised], late: str) -> None:
    supervised = supervise(delayed=[late])
    for service in set(SERVICES) - {late}:
        wait_until(lambda service=service: accepts(supervised.ports[service]), f"{service} is open")
    assert not supervised.is_announced(within_s=0.5)
    (supervised.folder / "open").touch()
    assert supervised.is_announced(within_s=30)
    assert accepts(supervised.ports[late])
    assert supervised.stop() == 0, supervised.log()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except ConnectionRefusedError:
        return False
