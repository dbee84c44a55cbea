"""The OpenAI gateway: beside a server as a process of its own, or alone in front of one that runs already.

Its packages may be missing. Nothing here imports them: its settings are arguments, and the hashes of its keys are in
the environment.
"""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from quire_engine.system.crash_loop import STABLE_SECONDS, CrashLoop
from quire_engine.system.extras import missing_package
from quire_gateway.keys import KeyRing
from quire_gateway.settings import API_KEYS_VARIABLE, GatewaySettings

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError
from quire_cli.ports import Endpoint, ReservedPorts, is_loopback, resolve
from quire_cli.server.companion import Companion

_NEEDS = ("starlette", "uvicorn", "tritonclient", "prometheus_client")
_DRAIN_S = 1
"""For a gateway beside a server: what its requests wait for has been drained before."""
_NICENESS = 3
"""Large bodies hold up no step of the engine. On two cores beside a client that sends as much as the limits allow, the
longest gap between two responses of others grew by 1.1 s at 0, by 0.3 to 0.5 s at 3; at 10 those over OpenAI starve."""


def how_to_install() -> str:
    """What is missing to start the gateway, and how to install it; empty if nothing is."""
    return missing_package("openai", *_NEEDS)


def gateway_command(settings: GatewaySettings) -> list[str]:
    """The command; keys are passed by environment, as every user can see a command line."""
    return [sys.executable, "-m", "quire_gateway", msgspec.json.encode(replace(settings, api_keys=())).decode()]


def gateway_environment(settings: GatewaySettings) -> dict[str, str]:
    """Its variables."""
    # Never import from the working directory, which may be a downloaded folder.
    return {**os.environ, API_KEYS_VARIABLE: "\n".join(settings.api_keys), "PYTHONSAFEPATH": "1"}


def read_api_keys(keys: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """All keys that are given, as their names, hashes and limits: as options, in a file, and in the environment.

    Raises:
        UsageError: the file cannot be read or holds none, no header can carry one of them, or two are the same.
    """
    found = [*keys, *os.environ.get(API_KEYS_VARIABLE, "").splitlines()]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            lines = [line for line in lines if line and not line.startswith("#")]
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {file} cannot be read: {error}") from None
        if not lines:
            raise UsageError(f"--api-key-file {file} holds no key; it must hold one a line")
        found += lines
    try:
        return tuple(key.line() for key in KeyRing(tuple(dict.fromkeys(found))).keys)
    except ValueError as error:
        raise UsageError(str(error)) from None


def run_gateway(settings: GatewaySettings) -> int:
    """`quire openai`: this process becomes the gateway.

    Raises:
        CommandError: something it needs is missing, or its port is taken.
    """
    missing = how_to_install()
    if missing:
        raise CommandError(f"the OpenAI gateway cannot be started: {missing}")
    host = resolve(settings.host)
    if not is_loopback(host) and not settings.api_keys:
        print(f"quire: on {host} others reach the models without a key; --api-key asks for one", file=sys.stderr)
    with ReservedPorts(inheritable=True) as ports:
        endpoint = ports.take({"port": Endpoint(host, settings.port)})["port"]
        print(f"quire: OpenAI gateway at http://{endpoint}/v1", flush=True)
        settings = replace(settings, host=host, port=endpoint.port)
        return os.execve(sys.executable, gateway_command(settings), gateway_environment(settings))


class Gateway(Companion):
    """The gateway of one `quire serve`. It is started again when it dies, and ends with the context.

    Args:
        endpoint: where it listens.
        grpc: the server's gRPC.
        api_keys: the keys that it accepts; empty: it needs none.
        console: shows that it has died.
    """

    def __init__(self, endpoint: Endpoint, grpc: Endpoint, api_keys: tuple[str, ...], console: Console) -> None:
        self._console = console
        self._crash_loop = CrashLoop()
        self._url = f"{grpc.client_host}:{grpc.port}"
        settings = GatewaySettings(
            url=self._url, host=endpoint.host, port=endpoint.port, api_keys=api_keys,
            drain_timeout_s=_DRAIN_S,
        )  # fmt: skip
        super().__init__("openai", endpoint, gateway_command(settings), gateway_environment(settings), _NICENESS)

    def drain(self) -> None:
        """Have it reject new requests with 503; those that run go on."""
        self._popen.send_signal(signal.SIGURG)  # no effect on one that has ended

    def on_end(self, served_s: float) -> float | None:
        """Start it again, unless it has died too often."""
        delay_s = self._crash_loop.delay_after_death(served_s >= STABLE_SECONDS)
        if self._crash_loop.is_tripped:
            self._console.line(
                "quire: the OpenAI gateway has died too often, and is not started again; the server goes on, and "
                f"another one starts with: quire openai --url {self._url}"
            )
            return None
        self._console.line("quire: the OpenAI gateway has died, and is started again; the server goes on")
        return delay_s
