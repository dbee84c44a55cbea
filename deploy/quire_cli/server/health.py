"""The health address: `GET /health` of `quire serve` itself, which answers in every state of tritonserver.

    200   {"status": "ok", "problems": [], "models": […]}           requests are served
    503   {"status": "unavailable", "problems": ["…", …], …}        they are not, or not all of them

`GET /health/details` is for the dashboard and `quire top`: the problems of now and of before, whose `/metrics` they are
about, and the pressure on the host.

Clients on other machines only get the status: problems name files, and the names of models are not public.

It runs in a thread with an event loop of its own, so that a slow or hostile client only takes one connection for some
seconds: connections are few and short, and the oldest is closed for a new one.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec
from quire_backend.status_page import StubState, StubStatus
from quire_client.health_details import HealthDetails, Host, Problem
from quire_client.symptoms import SYMPTOMS

from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint, is_loopback

STALE_S = SYMPTOMS["not_served"].limits["stale"].begins
"""`Health` that was not written for so long is stale."""
_MOST_PAST = 32
"""Problems that are over, and are remembered."""
_REQUEST_S = 5.0
_MOST_CONNECTIONS = 64
_MOST_BYTES = 8192
_MOST_DROPPED_BYTES = 64 * 2**10
"""Bytes that may follow a request and are dropped; a client that sends more is cut off."""


class Health:
    """The state of the server; written by its supervisor, read from any thread.

    Args:
        clock: seconds, monotonic.
        metrics: HOST:PORT of the server's /metrics; empty: it has none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, metrics: str = "") -> None:
        self._clock = clock
        self._metrics = metrics
        self._lock = threading.Lock()
        self._written_at = clock()
        self._problems: list[str] = ["the server is being started"]
        self._models: list[dict[str, object]] = []
        self._host = Host()
        self._began: dict[str, float] = {}
        """The problems of now, in seconds since the epoch."""
        self._past: deque[Problem] = deque(maxlen=_MOST_PAST)

    def write(self, problems: Sequence[str], models: Sequence[StubStatus] = (), host: Host | None = None) -> None:
        """Replace the state.

        Args:
            problems: why requests are not served.
            models: the status pages. One that is up and has a reason serves without one of its engines.
            host: None: as before.
        """
        present = [*problems, *(one.problem for one in models if one.state is StubState.UP and one.reason)]
        shown: list[dict[str, object]] = [
            {"name": one.model, "version": one.version, "instance": one.instance, "pid": one.pid,
             "state": one.state.name.lower(), "requests_in_flight": one.num_in_flight}
            for one in models
        ]  # fmt: skip
        with self._lock:
            self._written_at, self._problems, self._models = self._clock(), list(problems), shown
            self._host = self._host if host is None else host
            if present or self._began:
                self._remember(present)

    def _remember(self, present: Sequence[str]) -> None:
        now = time.time()
        over = {problem: began for problem, began in self._began.items() if problem not in present}
        self._past.extend(Problem(problem=problem, since=began, until=now) for problem, began in over.items())
        self._began = {problem: self._began.get(problem, now) for problem in present}

    def details(self) -> HealthDetails:
        """The body of `/health/details`."""
        with self._lock:
            now = (Problem(problem=problem, since=began) for problem, began in self._began.items())
            return HealthDetails(
                problems=self._present(), history=(*self._past, *now), host=self._host, metrics=self._metrics
            )

    def answer(self) -> tuple[int, dict[str, object]]:
        """Status code and body."""
        with self._lock:
            problems, models = list(self._present()), self._models
        status = "unavailable" if problems else "ok"
        return 503 if problems else 200, {"status": status, "problems": problems, "models": models}

    def _present(self) -> tuple[str, ...]:
        age_s = self._clock() - self._written_at
        is_stale = not self._problems and age_s > STALE_S
        return (f"quire serve has not looked at its server for {age_s:.0f} s",) if is_stale else tuple(self._problems)


class HealthServer:
    """Serves one `Health` over HTTP while the context lasts.

    Args:
        endpoint: where it listens; a port that is free.
        health: what it answers with.

    Raises:
        CommandError: it cannot listen there, or cannot start.
    """

    def __init__(self, endpoint: Endpoint, health: Health) -> None:
        self._health = health
        self._socket = _listen(endpoint)
        self.endpoint = Endpoint(endpoint.host, self._socket.getsockname()[1])
        self._ends = asyncio.Event()
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        """In the order in which they came."""
        self._thread = threading.Thread(target=self._work, name="health", daemon=True)

    def __enter__(self) -> "HealthServer":
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise CommandError(f"cannot answer /health on {self.endpoint}: {self._failure}")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # for example if no descriptor is left for the event loop
            if self._started.is_set():
                raise
            self._failure = error
        finally:
            self._socket.close()
            self._started.set()  # the caller waits with its signals blocked: it must not wait for ever

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=_MOST_BYTES)
        self._started.set()
        await self._ends.wait()
        server.close()
        while self._connections:
            for writer in self._connections:
                writer.transport.abort()
            await asyncio.wait(self._connections.values())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio would log a traceback for a task of its own making that is cancelled.
        self._connections[writer] = asyncio.create_task(self._serve(reader, writer))
        if len(self._connections) > _MOST_CONNECTIONS:
            next(iter(self._connections)).transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # One request per connection, which has to be complete within some seconds.
            await asyncio.wait_for(self._answer(reader, writer), _REQUEST_S)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            del self._connections[writer]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        code: int
        body: object
        if method not in (b"GET", b"HEAD"):
            code, body = 405, {"error": "only GET and HEAD"}
        elif path in (b"/health", b"/health/details"):
            code, answer = self._health.answer()
            peer = writer.get_extra_info("peername")  # None if it has disconnected already
            body = answer
            if peer is None or not is_loopback(peer[0]):
                body = {"status": answer["status"]}
            elif path != b"/health":
                code, body = 200, self._health.details()
        else:
            code, body = 404, {"error": "there are only /health and /health/details"}
        writer.write(_response(code, body, with_body=method != b"HEAD"))
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            # Until the other side has closed: what it has not read yet is not cut off.
            num_dropped = 0
            while num_dropped <= _MOST_DROPPED_BYTES and (dropped := await reader.read(_MOST_BYTES)):
                num_dropped += len(dropped)


def _response(code: int, body: object, *, with_body: bool) -> bytes:
    content = json.dumps(msgspec.to_builtins(body)).encode() + b"\n"
    head = (
        f"HTTP/1.1 {code} {HTTPStatus(code).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nCache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (content if with_body else b"")


def _listen(endpoint: Endpoint) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((endpoint.host, endpoint.port))
        listening.listen(_MOST_CONNECTIONS)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise CommandError(f"cannot listen on {endpoint} for /health: {error.strerror}") from None
    return listening
