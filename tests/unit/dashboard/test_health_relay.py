"""What the dashboard's port says of the server's health."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from quire_cli.ports import Endpoint
from quire_cli.server.health import Health, HealthServer
from quire_dashboard import health_relay
from quire_dashboard.health_relay import HealthRelay, health
from quire_dashboard.settings import Settings, to_environment
from starlette.requests import Request

TOKEN = "open sesame, please"
KNOWN = Health()


@pytest.fixture
def served() -> Iterator[str]:
    """The health address of a `quire serve`."""
    with HealthServer(Endpoint("127.0.0.1", 0), KNOWN) as server:
        yield f"127.0.0.1:{server.endpoint.port}"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ask(settings: Settings) -> tuple[int, dict[str, object]]:
        for name, value in to_environment([settings]).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(health_relay, "_relays", {})
        response = asyncio.run(health(Request({"type": "http", "method": "GET", "headers": []})))
        return response.status_code, json.loads(bytes(response.body))

    return ask


def test_it_is_what_quire_serve_says(served: str, ask: Any) -> None:
    KNOWN.write([])
    assert ask(Settings(health=served)) == KNOWN.answer()
    KNOWN.write(["the engine is down"])
    assert ask(Settings(health=served)) == KNOWN.answer()
    assert KNOWN.answer()[0] == 503


def test_without_the_token_a_stranger_hears_only_whether_all_is_well(served: str, ask: Any) -> None:
    KNOWN.write(["the engine is down"])
    assert ask(Settings(health=served, token=TOKEN)) == (503, {"status": "unavailable"})


def test_alone_it_does_not_know(ask: Any) -> None:
    assert ask(Settings())[0] == 404


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\n[]", b"HTTP/1.1 404 Not Found\r\n\r\n{}", b"\0"])
def test_what_is_no_answer_is_not_well(answer: bytes) -> None:
    async def work() -> tuple[int, Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await HealthRelay(f"127.0.0.1:{port}").answer()

    code, body = asyncio.run(work())
    assert code == 503
    assert body["problems"][0].startswith("quire serve does not answer at 127.0.0.1:")


def test_a_silent_one_holds_up_nobody_and_all_who_ask_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_relay, "_ANSWER_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        async def work() -> list[tuple[int, Any]]:
            relay = HealthRelay(f"127.0.0.1:{listening.getsockname()[1]}")
            return await asyncio.gather(*(relay.answer() for _ in range(100)))

        assert {code for code, _ in asyncio.run(work())} == {503}
        listening.settimeout(10)
        listening.accept()[0].close()
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
