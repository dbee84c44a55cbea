"""What is large is read and written beside the event loop, which goes on with all other requests."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from quire_gateway import app, triton_client
from quire_gateway.answers import Answer
from support.gateway import Answer as HttpAnswer
from support.gateway import ask, gateway, response

TEXT = "x" * 100_000
POSITION = {str(i): {"logprob": -1.0, "rank": i + 1, "decoded_token": "x"} for i in range(21)}
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/completions": lambda text: {"model": "m", "prompt": text, "logprobs": 20},
    "/v1/chat/completions": lambda text: {
        "model": "m", "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 20,
    },
    "/v1/responses": lambda text: {"model": "m", "input": text, "top_logprobs": 20},
    "/v1/messages": lambda text: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}]},
}  # fmt: skip
READING = {"parse_object", "parse", "generation_request"}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Name of a function → the threads that have called it."""
    seen: dict[str, set[str]] = {}

    def watch(owner: Any, name: str, shown: str = "") -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(shown or name, set()).add(threading.current_thread().name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for name in ("parse_completion", "chat_request", "parse_responses", "parse_messages"):
        watch(app, name, "parse")
    watch(app, "parse_object")
    watch(triton_client, "generation_request")
    watch(triton_client, "delta_of")
    watch(Answer, "frame")
    return seen


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_body_is_read_beside_the_loop(path: str, stream: bool, threads: dict[str, set[str]]) -> None:
    body = {**BODIES[path](TEXT), "stream": stream}
    answer, _ = ask(path, body, ["a", "b"])
    assert answer.status == 200, answer.body
    assert {name: threads[name] for name in READING} == {name: {"gateway-large_0"} for name in READING}
    assert threads["delta_of"] == {threading.current_thread().name}


@pytest.mark.parametrize("path", BODIES)
def test_a_small_one_costs_no_thread(path: str, threads: dict[str, set[str]]) -> None:
    for stream in (False, True):
        assert ask(path, {**BODIES[path]("x"), "stream": stream}, ["a", "b"])[0].status == 200
    assert threads.keys() == READING | {"delta_of", "frame"}
    assert set().union(*threads.values()) == {threading.current_thread().name}


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_read_and_written_beside_the_loop(
    path: str, stream: bool, threads: dict[str, set[str]]
) -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("ab", "stop", logprobs=[POSITION] * 200)

    async def go() -> HttpAnswer:
        async with gateway(serve) as (app, _):
            return await app.call(path, {**BODIES[path]("x"), "stream": stream})

    answer = asyncio.run(asyncio.wait_for(go(), 20))
    assert answer.status == 200, answer.body
    assert answer.body.decode().count("-1.0") >= 200 * 21
    assert threads["parse_object"] == {threading.current_thread().name}
    assert threads["delta_of"] == {"gateway-large_0"}
    assert threads.get("frame", set()) == ({"gateway-large_0"} if stream else set())


def test_a_task_of_a_large_prompt_is_read_and_written_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, threads: dict[str, set[str]]
) -> None:
    tokens = json.dumps({"tokens": [1] * 30_000, "token_strs": ["x"] * 30_000, "max_model_len": 9})
    answer, _ = ask("/tokenize", {"model": "m", "prompt": TEXT}, [tokens])
    assert answer.json["count"] == 30_000
    assert threads["parse_object"] == {"gateway-large_0"}
