"""What holds for every request, before and after its route: its name, its key and that key's budget, sizes, the count.

Plain ASGI, so that streams pass through as they are.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_gateway import operations
from quire_gateway.errors import ApiError, UnavailableError, messages_error
from quire_gateway.keys import KeyRing
from quire_gateway.limits import Budget
from quire_gateway.settings import GatewaySettings

MAX_REQUEST_ID = 128
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID}}}")
_OPEN_ROUTES = ("/health", "/ping", *operations.ROUTES)
"""Those that need no key; the last ones need the model's token."""
_LEFT = 499
"""What is counted for a client that left before it was answered; nginx's number."""
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Of a request's seconds."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # of each counter, when it was made: no board asks for it


class _KeyCollector(Collector):
    """The figures of API keys.

    Args:
        budgets: of all keys.
    """

    def __init__(self, budgets: Collection[Budget]) -> None:
        self._budgets = budgets

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """As they are now."""
        labels = ["key"]
        requests = CounterMetricFamily("quire_openai_key_requests_total", "Requests that were let in.", labels=labels)
        tokens = CounterMetricFamily("quire_openai_key_tokens_total", "Tokens of prompts and answers.", labels=labels)
        in_flight = GaugeMetricFamily(
            "quire_openai_key_requests_in_flight", "Requests that are being served.", labels=labels
        )
        refused = CounterMetricFamily(
            "quire_openai_key_refused_total", "Requests that a limit has refused (429).", labels=["key", "limit"]
        )
        for budget in self._budgets:
            name = budget.key.name
            requests.add_metric([name], budget.num_requests)
            tokens.add_metric([name], budget.num_tokens)
            in_flight.add_metric([name], budget.num_in_flight)
            for limit, number in budget.num_refused.items():
                refused.add_metric([name, limit], number)
        return iter((requests, tokens, in_flight, refused))


class Gatekeeper:
    """Stands before an application.

    Args:
        app: what it stands before.
        settings: whom it lets in.
        routes: paths that are counted by name; all others are counted together.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings, routes: Collection[str]) -> None:
        self._app = app
        self._settings = settings
        self._routes = routes
        self.registry = CollectorRegistry()
        """The gateway's own metrics."""
        self._requests = Counter(
            "quire_openai_requests_total", "Requests that were answered, or whose client has left (499).",
            ("route", "status"), registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "quire_openai_request_seconds", "From a request's arrival to the end of its answer.", ("route",),
            registry=self.registry, buckets=_BUCKETS,
        )  # fmt: skip
        self._in_flight = Gauge(
            "quire_openai_requests_in_flight", "Requests that are being served.", registry=self.registry
        )
        self._num_body_bytes = 0
        """Of the requests in flight."""
        self._is_draining = False
        self._keys = KeyRing(settings.api_keys)
        self._budgets = {key.name: Budget(key) for key in self._keys.keys}
        if self._budgets:
            self.registry.register(_KeyCollector(self._budgets.values()))
        self._serve: ASGIApp = self._count
        if settings.cors_origins:  # a preflight shows no key
            self._serve = CORSMiddleware(
                self._count, allow_origins=settings.cors_origins, allow_methods=("GET", "HEAD", "POST"),
                allow_headers=("*",), expose_headers=("retry-after", "x-request-id"),
            )  # fmt: skip

    def drain(self) -> None:
        """Reject new requests; those in flight go on."""
        self._is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._serve(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None

        def named_send(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if _is_anthropics(scope):
                    MutableHeaders(scope=message)["request-id"] = request_id
            return send(message)

        start = time.perf_counter()
        self._in_flight.inc()
        try:
            await self._guarded(scope, receive, named_send)
        except ApiError as error:
            if status is not None:
                raise
            await error_response(error, scope)(scope, receive, named_send)
        finally:
            self._in_flight.dec()
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._requests.labels(route, str(_LEFT if status is None else status)).inc()
            self._seconds.labels(route).observe(time.perf_counter() - start)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, max_bytes = self._settings.limits, self._max_body_bytes(scope)
        num_bytes = 0

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self._num_body_bytes += size
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            if size and self._num_body_bytes > limits.max_total_body_bytes:
                raise UnavailableError(
                    f"all bodies together are larger than {limits.max_total_body_bytes} bytes, the most that is taken "
                    "here; try again later"
                )
            return message

        budget: Budget | None = None
        try:
            budget = self._let_in(scope)
            await self._app(scope, bounded_receive, send)
        finally:
            self._num_body_bytes -= num_bytes
            if budget is not None:
                budget.leave()

    def _max_body_bytes(self, scope: Scope) -> int:
        limit = self._settings.limits.max_body_bytes
        return min(limit, operations.MAX_BODY_BYTES) if scope["path"] in operations.ROUTES else limit

    def _let_in(self, scope: Scope) -> Budget | None:
        """The budget that a request has to give back; None: it needs none.

        Raises:
            ApiError: it is not let in.
        """
        if self._is_draining and scope["path"] != "/metrics":
            raise UnavailableError("the server is draining and takes no new requests; try again later")
        limits, headers = self._settings.limits, Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.max_header_bytes:
            raise ApiError(
                431, f"the headers are larger than {limits.max_header_bytes} bytes, the most that is taken here"
            )
        length, max_bytes = headers.get("content-length", ""), self._max_body_bytes(scope)
        if length.isdecimal() and int(length) > max_bytes:
            raise _too_large(max_bytes)
        if scope["path"] in _OPEN_ROUTES or not self._budgets:
            return None
        key = self._keys.find(headers.get("authorization", "")) or self._keys.find(
            f"Bearer {headers.get('x-api-key', '')}"  # where Anthropic's clients show it
        )
        if key is None:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if scope["method"] != "POST":
            return None
        budget = self._budgets[key.name]
        budget.enter()
        scope["state"]["charge"] = budget.charge
        return budget


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The answer that an error is to a request."""
    body = messages_error(error, request_id_of(scope)) if _is_anthropics(scope) else error.body
    challenge = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    return JSONResponse(body, error.status, headers={**challenge, **error.headers})


def charge_of(scope: Any) -> Callable[[int], None] | None:
    """What counts the tokens of a request; None: they are not counted."""
    charge: Callable[[int], None] | None = scope["state"].get("charge")
    return charge


def request_id_of(scope: Any) -> str:
    """The name of a request: the client's, else one of ours."""
    return str(scope["state"]["request_id"])


def _is_anthropics(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/v1/messages")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, the most that is taken here")
