"""The health address: what it says, and that nobody keeps it from saying it."""

import asyncio
import contextlib
import errno
import http.client
import json
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from quire_backend.status_page import StubState, StubStatus
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.server.health import STALE_S, Health, HealthServer
from quire_client.health_details import HealthDetails, Host
from support.virtual_clock import Clock

STUB = StubStatus(
    pid=7, start_time=1, model="m", version="1", instance="m_0_0", beats=3, state=StubState.UP, reason="",
    num_in_flight=2, sending=0, num_instances=1,
)  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock, metrics="127.0.0.1:8002")


@pytest.fixture
def server(health: Health) -> Iterator[HealthServer]:
    with HealthServer(Endpoint("127.0.0.1", 0), health) as running:
        yield running


def ask(server: HealthServer, path: str = "/health", method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.endpoint.port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content else None
    finally:
        connection.close()


def test_it_names_what_is_wrong_until_nothing_is(server: HealthServer, health: Health) -> None:
    assert ask(server) == (
        503, {"status": "unavailable", "problems": ["the server is being started"], "models": []},
    )  # fmt: skip
    health.write([], [STUB])
    status, body = ask(server)
    assert (status, body["status"], body["problems"]) == (200, "ok", [])
    assert body["models"] == [
        {"name": "m", "version": "1", "instance": "m_0_0", "pid": 7, "state": "up", "requests_in_flight": 2}
    ]
    health.write(["a", "b"])
    assert ask(server)[1]["problems"] == ["a", "b"]
    assert ask(server, method="HEAD") == (503, None)


def test_another_machine_learns_no_more_than_the_status(
    server: HealthServer, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def is_loopback(host: str) -> bool:
        asked.append(host)
        return False

    monkeypatch.setattr("quire_cli.server.health.is_loopback", is_loopback)
    health.write(["there is no /home/somebody/model.safetensors"], [STUB])
    assert ask(server) == (503, {"status": "unavailable"})
    health.write([], [STUB])
    assert ask(server) == (200, {"status": "ok"})
    assert asked == ["127.0.0.1"] * 2
    assert ask(server, "/health/details") == (200, {"status": "ok"})


def test_the_details_name_what_was_wrong_before_and_the_host(server: HealthServer, health: Health) -> None:
    health.write(["a", "b"], host=Host(cpus=2))
    health.write(["b"])
    degraded = replace(STUB, reason="engine 1: the engine process was killed by SIGKILL; it is being started again")
    health.write([], [degraded])
    status, body = ask(server, "/health/details")
    details = msgspec.convert(body, HealthDetails)
    assert (status, details.problems, details.host, details.metrics) == (200, (), Host(cpus=2), "127.0.0.1:8002")
    assert body["host"] == {"cpus": 2}, "what is not known is left out"
    assert [one.problem for one in details.history] == [
        "a", "b",
        "model 'm' version 1: engine 1: the engine process was killed by SIGKILL; it is being started again",
    ]  # fmt: skip
    assert [one.until is None for one in details.history] == [False, False, True]
    assert ask(server)[0] == 200, "the others serve"
    for number in range(100):
        health.write([str(number)])
    assert len(ask(server, "/health/details")[1]["history"]) == 33


def test_what_is_old_is_not_believed(health: Health, clock: Clock) -> None:
    health.write([])
    assert health.answer()[0] == 200
    clock.now += STALE_S + 1
    status, body = health.answer()
    assert status == 503
    assert body["problems"] == ["quire serve has not looked at its server for 6 s"]


def test_there_is_nothing_else(server: HealthServer) -> None:
    assert ask(server, "/")[0] == 404
    assert ask(server, "/health?verbose=1")[0] == 503
    assert ask(server, method="POST")[0] == 405


def test_slow_and_hostile_clients_keep_nobody_waiting(
    server: HealthServer, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_cli.server.health._REQUEST_S", 600.0)  # longer than the others wait for an answer
    health.write([])
    address = ("127.0.0.1", server.endpoint.port)
    clients = [socket.create_connection(address, timeout=60) for _ in range(200)]
    try:
        for number, client in enumerate(clients):
            with contextlib.suppress(OSError):  # it has been thrown out already
                client.sendall((b"GET /health HTTP/1.1\r\n", b"\xff" * 100_000, b"\r\n\r\n", b"")[number % 4])
        assert ask(server)[0] == 200
    finally:
        for client in clients:
            client.close()


def test_what_follows_a_request_is_not_kept(server: HealthServer) -> None:
    much = bytes(50 * 2**20)
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            with pytest.raises(ConnectionError):  # cut off
                client.sendall(much)
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()


def test_a_thread_that_cannot_start_is_told_of(health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "start_server", no_descriptor_left)
    with (
        pytest.raises(CommandError, match=r"cannot answer /health on 127\.0\.0\.1:\d+: .*Too many open files"),
        HealthServer(Endpoint("127.0.0.1", 0), health),
    ):
        pass


def test_a_connection_that_is_open_at_the_end_is_no_news(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    with HealthServer(Endpoint("127.0.0.1", 0), health) as running:
        client = socket.create_connection(("127.0.0.1", running.endpoint.port), timeout=60)
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.recv(8) == b"HTTP/1.1", "it is open, and served"
    with client, contextlib.suppress(ConnectionResetError):
        while client.recv(2**16):
            pass
    assert caplog.text == ""


def test_a_port_that_is_taken_is_named(server: HealthServer, health: Health) -> None:
    with pytest.raises(CommandError, match=f"cannot listen on 127.0.0.1:{server.endpoint.port} for /health"):
        HealthServer(server.endpoint, health)
