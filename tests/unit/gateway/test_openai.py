"""The gateway in front of a fake server: what it asks, what becomes of errors, who gets in, who is slow or leaves."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from quire_cli.process import listens
from quire_gateway.__main__ import RepeatedWarnings
from quire_gateway.app import make_app
from quire_gateway.errors import ApiError
from quire_gateway.keys import parse_key
from quire_gateway.limits import Budget, RequestLimits
from quire_gateway.settings import GatewaySettings
from quire_gateway.triton_client import TritonClient
from quire_gateway.triton_messages import Delta
from support.gateway import Answer, FakeTriton, Gateway, ask, gateway, response, running, texts_of
from support.ports import free_port
from support.serving import wait_until

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": "Hi"}
DEADLINE_S = 20


async def hello(request: Any, context: Any) -> AsyncIterator[Any]:
    yield response("Hel")
    yield response("lo", "stop")


def fails_with(code: grpc.StatusCode, message: str, *first: Any) -> Any:
    async def fail(request: Any, context: Any) -> AsyncIterator[Any]:
        for item in first:
            yield item
        await context.abort(code, message)

    return fail


def run(
    serve: Callable[[Any, Any], AsyncIterator[Any]], work: Callable[[Gateway, FakeTriton], Awaitable[Any]],
    **settings: Any,
) -> Any:  # fmt: skip
    async def go() -> Any:
        async with gateway(serve, **settings) as (app, triton):
            return await asyncio.wait_for(work(app, triton), DEADLINE_S)

    return asyncio.run(go())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def call(serve: Any, body: Any = BODY, headers: Any = None, path: str = COMPLETIONS, **settings: Any) -> Answer:
    answer = run(serve, lambda app, _: app.call(path, body, headers), **settings)
    assert isinstance(answer, Answer)
    return answer


def events(answer: Answer) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message", "status", "kind", "param"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2; it must be in (0, 1]", 400, "invalid_request_error", "top_p"),
        (grpc.StatusCode.INVALID_ARGUMENT, "text_input is empty", 400, "invalid_request_error", "prompt"),
        (grpc.StatusCode.INVALID_ARGUMENT, "unknown sampling parameter 'top_p'", 400, "invalid_request_error", "top_p"),
        (grpc.StatusCode.INVALID_ARGUMENT, "something else", 400, "invalid_request_error", None),
        (grpc.StatusCode.UNAVAILABLE, "the queue is full; try again in about 2.5 s", 503, "server_error", None),
        (grpc.StatusCode.CANCELLED, "the request was cancelled", 503, "server_error", None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "too late", 504, "server_error", None),
        (grpc.StatusCode.INTERNAL, "top_p has killed it", 500, "server_error", "top_p"),
    ],
)
def test_statuses_of_the_server(code: Any, message: str, status: int, kind: str, param: str | None) -> None:
    answer = call(fails_with(code, message), BODY | {"top_p": 2})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (status, kind, param)
    assert error["message"] == message.replace("text_input", "prompt")
    assert answer.headers.get("retry-after") == (("3" if "2.5 s" in message else "5") if status == 503 else None)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("Request for unknown model: 'm' is not found", 404),
        ("unexpected inference input 'messages' for model 'm'", 400),
    ],
)
def test_what_the_server_refuses_itself_has_no_status(message: str, status: int) -> None:
    async def refuse(request: Any, context: Any) -> AsyncIterator[Any]:
        refusal = response("")
        refusal.infer_response.Clear()
        refusal.error_message = message
        yield refusal

    assert call(refuse).status == status


def unknown(request: Any, context: Any) -> AsyncIterator[Any]:
    return fails_with(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")(request, context)


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_draining_server_that_knows_no_model_any_more_is_unavailable(path: str) -> None:
    async def work(app: Gateway, triton: FakeTriton) -> None:
        assert (await app.call(path, BODY)).status == 404
        triton.is_draining = True
        answer = await app.call(path, BODY)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")

    run(unknown, work)


@pytest.mark.parametrize("is_draining", [True, False])
def test_a_chat_with_functions_is_answered_as_any_other_when_no_model_answers(is_draining: bool) -> None:
    """Not as one whose model calls functions in no known form."""

    async def work(app: Gateway, triton: FakeTriton) -> None:
        triton.is_draining, triton.chat_format = is_draining, None
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        for more in ({}, {"tools": tools}):
            assert (await app.call("/v1/chat/completions", body | more)).status == (503 if is_draining else 404)

    run(unknown, work)


def test_a_draining_gateway_finishes_what_runs_and_takes_nothing_else() -> None:
    may_end = asyncio.Event()

    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("Hel")
        await may_end.wait()
        yield response("lo", "stop")

    async def work(app: Gateway, triton: FakeTriton) -> None:
        triton.models["m"] = "quire"
        answer = Answer()
        stream = asyncio.create_task(app.call(COMPLETIONS, BODY | {"stream": True}, answer=answer))
        await until(lambda: answer.num_sent)
        app.drain()
        for path, body in (
            (COMPLETIONS, BODY),
            ("/v1/chat/completions", BODY),
            ("/v1/models", None),
            ("/health", None),
        ):
            refused = await app.call(path, body)
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert (await app.call("/metrics")).status == 200
        may_end.set()
        await stream
        assert [event["choices"][0]["text"] for event in events(answer)] == ["Hel", "lo"]
        assert len(triton.requests) == 1

    run(wait, work)


def test_a_malformed_request_is_logged_once_a_minute() -> None:
    """By a gateway as a process of its own: the filter has to survive what uvicorn does to its loggers."""
    with free_port() as port:
        command = [sys.executable, "-m", "quire_gateway", json.dumps({"port": port, "drain_timeout_s": 0})]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: listens(process.pid, port), "it listens")
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
                    connection.sendall(b"malformed\r\n\r\n")
                    assert b"400 Bad Request" in b"".join(iter(lambda: connection.recv(4096), b""))
        finally:
            process.terminate()
            _, log = process.communicate(timeout=DEADLINE_S)
    assert log.count("Invalid HTTP request received") == 1


def test_repeated_warnings_are_counted() -> None:
    now = 0.0
    kept = RepeatedWarnings(lambda: now)

    def log(text: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("x", level, "", 0, text, None, None)
        return record.getMessage() if kept.filter(record) else None

    assert [log("a"), log("a"), log("a"), log("b")] == ["a", None, None, "b"]
    assert [log("a", logging.ERROR), log("a", logging.ERROR)] == ["a", "a"]
    now = 61.0
    assert [log("a"), log("a"), log("b")] == ["a (2 more in the last minutes)", None, "b"]


def test_a_stream_that_fails_later_ends_with_the_error() -> None:
    answer = call(fails_with(grpc.StatusCode.UNAVAILABLE, "unloaded", response("Hel")), BODY | {"stream": True})
    first, error = events(answer)
    assert (answer.status, first["choices"][0]["text"], error["error"]["message"]) == (200, "Hel", "unloaded")


@pytest.mark.parametrize("said", [[], [response("Hel")]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_an_end_is_no_answer(said: list[Any], stream: bool) -> None:
    """The model ends with the flag alone where not even an error found room in the server's memory."""

    async def cut_off(request: Any, context: Any) -> AsyncIterator[Any]:
        for item in said:
            yield item

    answer = call(cut_off, BODY | {"stream": stream})
    if stream and said:
        _, error = events(answer)
    else:
        assert answer.status == 500
        error = answer.json
    assert "has no end" in error["error"]["message"]


def test_a_server_that_is_away_is_not_named() -> None:
    async def go(port: int) -> None:
        async with running(make_app(GatewaySettings(url=f"127.0.0.1:{port}"))) as app:
            answer = await app.call(COMPLETIONS, BODY)
            assert (answer.status, "127.0.0.1" in answer.body.decode()) == (503, False)
            assert (await app.call("/v1/models")).status == 503
            assert (await app.call("/health")).status == 503

    with free_port() as port:
        asyncio.run(asyncio.wait_for(go(port), DEADLINE_S))


# -- what is passed on ------------------------------------------------------------------------------------------------


def test_parameters_name_and_trace_are_passed_on() -> None:
    async def work(app: Gateway, triton: FakeTriton) -> Any:
        body = BODY | {"temperature": 0.1, "slo_class": "chat", "user": "me", "top_k": None, "guided_choice": ["a"]}
        answer = await app.call(COMPLETIONS, body, {"x-request-id": "mine", "traceparent": "00-1-2-01"})
        assert answer.headers["x-request-id"] == "mine"
        return triton.requests, answer.json["id"]

    (request,), answer_id = run(hello, work)
    assert request.id == "mine"
    inputs = texts_of(request)
    assert inputs["text_input"] == "Hi"
    assert json.loads(inputs["sampling_parameters"]) == {
        "temperature": 0.1, "slo_class": "chat", "traceparent": "00-1-2-01", "structured_outputs": {"choice": ["a"]},
    }  # fmt: skip
    assert request.parameters["response_id"].string_param == answer_id


def test_a_chat_passes_its_messages_on() -> None:
    async def work(app: Gateway, triton: FakeTriton) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": "é"}], "max_completion_tokens": 7}
        answer = await app.call("/v1/chat/completions", body)
        assert answer.json["choices"][0]["message"]["content"] == "Hel"  # of the fake's first response alone
        return triton.requests, answer.json["id"]

    async def one(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("Hel", "length")

    (request,), answer_id = run(one, work)
    inputs = texts_of(request)
    assert json.loads(inputs["messages"]) == {"messages": [{"role": "user", "content": "é"}]}
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 7}
    assert request.parameters["response_id"].string_param == answer_id
    assert answer_id.startswith("chatcmpl-")


# -- who gets in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "status"),
    [("Bearer sesam", 200), ("bearer other", 200), ("Bearer sesa", 401), ("Bearer ", 401), ("Basic sesam", 401),
     ("", 401), ("Bearer sés", 401)],
)  # fmt: skip
def test_keys(shown: str, status: int) -> None:
    answer = call(hello, headers={"authorization": shown}, api_keys=("sesam", "other"))
    assert answer.status == status
    if status == 401:
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert call(hello, None, path="/metrics", api_keys=("sesam",)).status == 401
        assert call(hello, None, path="/health", api_keys=("sesam",)).status == 503  # the fake has no models


@pytest.mark.parametrize("headers", [{}, {"content-length": "2000"}])
def test_a_body_that_is_too_large(headers: dict[str, str]) -> None:
    answer = call(hello, [b"{" + b" " * 600, b" " * 600], headers, limits=RequestLimits(max_body_bytes=1000))
    assert (answer.status, answer.json["error"]["type"]) == (413, "invalid_request_error")


def test_all_bodies_together_have_a_limit() -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        entered.set()
        await may_end.wait()
        yield response("x", "stop")

    async def work(app: Gateway, triton: FakeTriton) -> None:
        body = BODY | {"prompt": "x" * 600}
        first = asyncio.create_task(app.call(COMPLETIONS, body))
        await entered.wait()
        refused = await app.call(COMPLETIONS, body)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert "all bodies" in refused.json["error"]["message"]
        may_end.set()
        assert (await first).status == 200
        assert (await app.call(COMPLETIONS, body)).status == 200

    run(wait, work, limits=RequestLimits(max_body_bytes=1000, max_total_body_bytes=1000))


def test_headers_that_are_too_large() -> None:
    answer = call(hello, headers={"x-much": "x" * 2000}, limits=RequestLimits(max_header_bytes=2000))
    assert (answer.status, answer.json["error"]["type"]) == (431, "invalid_request_error")


@pytest.mark.parametrize(
    ("limits", "more", "param"),
    [
        ({"max_n": 2}, {"n": 3}, "n"),
        ({"max_n": 2}, {"n": "3"}, "n"),
        ({"max_n": 2}, {"n": 3.0}, "n"),
        ({"max_logprobs": 59}, {"logprobs": 2, "max_tokens": 10, "n": 2}, "logprobs"),
        ({"max_logprobs": 59}, {"logprobs": "2", "max_tokens": " 10", "n": 2.0}, "logprobs"),
        ({"max_logprobs": 59}, {"logprobs": 2.0, "max_tokens": 1e1, "n": "2"}, "logprobs"),
        ({"max_logprobs": 59}, {"logprobs": 2, "max_tokens": 10, "prompt": ["a", "b"]}, "logprobs"),
        ({"max_logprobs": 59}, {"logprobs": 3}, "logprobs"),  # of the model's default of 16 tokens
    ],
)
def test_a_request_that_asks_for_too_much_names_what(limits: Any, more: Any, param: str) -> None:
    answer = call(hello, BODY | more, limits=RequestLimits(**limits))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert f"at most {next(iter(limits.values()))} are taken here" in answer.json["error"]["message"]
    roomy = dict.fromkeys(limits, 1000)
    assert call(hello, BODY | more, limits=RequestLimits(**roomy)).status == 200
    with pytest.raises(ValueError, match=next(iter(limits))):
        RequestLimits(**dict.fromkeys(limits, 0))


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({"n": "2", "max_tokens": 3.0, "logprobs": "5"}, {"n": 2, "max_tokens": 3, "logprobs": 5}),
        ({"n": "two"}, "n is 'two'; it must be an integer"),
        ({"logprobs": True}, "logprobs is true; it must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be an integer"),
    ],
)
def test_the_model_gets_the_numbers_that_were_checked(more: Any, asked: Any) -> None:
    answer, requests = ask(COMPLETIONS, BODY | more)
    if isinstance(asked, str):
        assert (answer.status, answer.json["error"]["message"], requests) == (400, asked, [])
    else:
        assert json.loads(texts_of(requests[0])["sampling_parameters"]) == asked


KEY = {"authorization": "Bearer sesam"}


def key_line(**limits: int) -> str:
    line = parse_key("sesam").line().replace(parse_key("sesam").name, "batch")
    return " ".join([line, *(f"{name}={value}" for name, value in limits.items())])


def test_a_key_has_so_many_requests_at_a_time() -> None:
    entered, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        entered.set()
        await may_end.wait()
        yield response("x", "stop")

    async def work(app: Gateway, triton: FakeTriton) -> None:
        first = asyncio.create_task(app.call(COMPLETIONS, BODY, KEY))
        await entered.wait()
        refused = await app.call(COMPLETIONS, BODY, KEY)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["error"]["code"] == "rate_limit_exceeded"
        assert (await app.call("/v1/models", headers=KEY)).status != 429
        may_end.set()
        assert (await first).status == 200
        assert (await app.call(COMPLETIONS, BODY, KEY)).status == 200
        metrics = (await app.call("/metrics", headers=KEY)).body.decode()
        assert 'quire_openai_key_requests_total{key="batch"} 2.0\n' in metrics
        assert 'quire_openai_key_requests_in_flight{key="batch"} 0.0\n' in metrics
        assert 'quire_openai_key_tokens_total{key="batch"} 8.0\n' in metrics  # prompts of 3, and a token each
        assert 'quire_openai_key_refused_total{key="batch",limit="max_concurrent"} 1.0\n' in metrics
        assert 'quire_openai_request_seconds_count{route="/v1/completions"} 3.0\n' in metrics

    run(wait, work, api_keys=(key_line(max_concurrent=1),))


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_count_when_they_are_there(stream: bool) -> None:
    async def work(app: Gateway, triton: FakeTriton) -> None:
        statuses = [(await app.call(COMPLETIONS, BODY | {"stream": stream}, KEY)).status for _ in range(3)]
        assert statuses == [200, 200, 429]  # 8 tokens each, of 10

    run(hello, work, api_keys=(key_line(tokens_per_minute=10),))


def test_what_a_key_has_comes_back_evenly() -> None:
    now = 0.0
    budget = Budget(parse_key(key_line(requests_per_minute=2, tokens_per_minute=600)), lambda: now)

    def refusal() -> tuple[str, str] | None:
        try:
            budget.enter()
        except ApiError as error:
            return error.headers["retry-after"], str(error)
        return None

    assert [refusal(), refusal()] == [None, None]
    assert refusal() == ("30", "the limit of this API key is reached: requests_per_minute is 2")
    now = 30.0
    assert refusal() is None
    budget.charge(900)  # more than there is: it has to be made up
    now = 59.0
    assert refusal() == ("1", "the limit of this API key is reached: tokens_per_minute is 600")
    now = 60.5
    assert refusal() is None
    assert sum(budget.num_refused.values()) == 2


# -- slow clients, and those that leave -------------------------------------------------------------------------------


class EndlessClient(TritonClient):
    """Its deltas come as fast as they are taken."""

    num_taken = 0

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Delta, None]:
        while True:
            self.num_taken += 1
            yield Delta(
                texts=["x"], finish_reasons=[None], num_output_tokens=[1], num_prompt_tokens=1,
                num_cached_tokens=None, logprobs=[None], prompt_logprobs=None,
            )  # fmt: skip


def test_what_a_slow_client_does_not_read_is_not_read_from_the_server() -> None:
    async def go() -> None:
        clients: list[EndlessClient] = []

        def make_client(url: str) -> TritonClient:
            clients.append(EndlessClient(url))
            return clients[0]

        async with running(make_app(GatewaySettings(), make_client)) as app:
            reads, left, answer = asyncio.Semaphore(3), asyncio.Event(), Answer()
            task = asyncio.create_task(
                app.call(COMPLETIONS, BODY | {"stream": True}, left=left, may_send=reads.acquire, answer=answer)
            )
            await until(lambda: answer.num_sent == 2)
            for _ in range(1000):  # turns of the loop, in which it could take as many
                await asyncio.sleep(0)
            assert clients[0].num_taken <= answer.num_sent + 3
            for _ in range(100):
                reads.release()
            await until(lambda: answer.num_sent == 102)
            left.set()
            await task

    asyncio.run(asyncio.wait_for(go(), DEADLINE_S))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 1])
def test_a_client_that_leaves_cancels_all_of_its_requests(stream: bool, after: int) -> None:
    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(after):
            yield response("x")
        await asyncio.Event().wait()

    async def work(app: Gateway, triton: FakeTriton) -> None:
        left = asyncio.Event()
        body = BODY | {"stream": stream, "prompt": ["a", "b", "c"]}
        task = asyncio.create_task(app.call(COMPLETIONS, body, left=left))
        await until(lambda: len(triton.requests) == 3)
        left.set()
        await task
        await until(lambda: triton.num_cancelled == 3)
        assert 'status="499"' in (await app.call("/metrics")).body.decode() or after

    run(wait, work)


def test_one_prompt_that_fails_cancels_the_others() -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        if texts_of(request)["text_input"] == "bad":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text_input is bad")
        await asyncio.Event().wait()
        yield

    async def work(app: Gateway, triton: FakeTriton) -> None:
        answer = await app.call(COMPLETIONS, BODY | {"prompt": ["good", "bad"]})
        assert answer.json["error"]["message"] == "prompt is bad"
        await until(lambda: triton.num_cancelled == 1)

    run(serve, work)


@pytest.mark.parametrize(("name", "value"), [("port", 65536), ("drain_timeout_s", -1), ("api_keys", ("a", ""))])
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        GatewaySettings(**{name: value})
