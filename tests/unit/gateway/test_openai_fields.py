"""Fields that ask for nothing, what an absent model means, and how what does not fit is said."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from support.gateway import Answer, FakeTriton, ask, gateway, response, texts_of

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "Hi"}, CHAT: {"model": "m", "messages": [USER]},
    RESPONSES: {"model": "m", "input": "Hi"},
}  # fmt: skip


def sampling(path: str, more: dict[str, Any]) -> Any:
    answer, requests = ask(path, BODIES[path] | more)
    assert answer.status == 200, answer.json
    return json.loads(texts_of(requests[0])["sampling_parameters"])


def call(body: Any, *, path: str = COMPLETIONS, models: Any = (), error: str = "") -> Answer:
    """The answer of a gateway in front of some models, which fail if they are to."""

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        if error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error)
        yield response('{"tokens": [1], "token_strs": ["a"], "max_model_len": 9}', "stop")

    async def go() -> Answer:
        async with gateway(serve) as (app, triton):
            assert isinstance(triton, FakeTriton)
            triton.models.update(models)
            return await app.call(path, body)

    return asyncio.run(asyncio.wait_for(go(), 20))


# -- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"verbosity": "low", "prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k"}),
        (CHAT, {"prompt_cache_options": {"ttl": "1h"}, "safety_identifier": "me", "service_tier": "auto"}),
        (COMPLETIONS, {"prompt_cache_key": "k", "user": "me"}),
        (COMPLETIONS, {"guided_decoding_backend": "guidance", "echo": False}),
        (CHAT, {"guided_decoding_backend": "xgrammar", "echo": False}),
        (RESPONSES, {"truncation": "auto", "max_tool_calls": 3, "text": {"verbosity": "low"}, "prompt_cache_key": "k"}),
    ],
)
def test_fields_that_ask_for_nothing_are_taken(path: str, more: dict[str, Any]) -> None:
    assert sampling(path, more) == {}


@pytest.mark.parametrize("path", BODIES)
def test_fields_may_be_ignored_by_a_setting(path: str) -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        assert texts_of(request)["sampling_parameters"] == "{}"
        yield response("ok", "stop")

    async def go() -> Answer:
        async with gateway(serve, ignored_fields=("num_ctx", "keep_alive")) as (app, _):
            return await app.call(path, BODIES[path] | {"num_ctx": 4096, "keep_alive": "5m"})

    assert asyncio.run(asyncio.wait_for(go(), 20)).status == 200


@pytest.mark.parametrize(
    ("more", "structure"),
    [
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}, "guided_choice": ["x"]}, {"regex": "a"}),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, {"json": {"type": "object"}}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_object", "schema": None}}, {"json_object": True}),
    ],
)
def test_formats_of_the_text(more: dict[str, Any], structure: Any) -> None:
    assert sampling(CHAT, more) == {"structured_outputs": structure}


@pytest.mark.parametrize(
    ("path", "more", "param", "message"),
    [
        (CHAT, {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages", "messages[0].role is 'wizard'"),
        (RESPONSES, {"input": [{"role": "wizard", "content": "Hi"}]}, "input", "role is 'wizard'"),
        (CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages", "messages[1].content[0]: image_url is 'x'; it must be a data: URL"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
         "messages", "messages[0].content[1]: input_audio parts are not offered by this model"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input", "input[0].content[0]: input_image is 'x'; it must be a data: URL"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages", 'must be {"type": "text"'),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", 'must be {"type": "text"'),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content must be"),
        (CHAT, {"response_format": {"type": "json_object", "schema": 5}}, "response_format", "must be a JSON schema"),
        (CHAT, {"guided_json": {}, "guided_choice": ["x"]}, "guided_json", "given together"),
        (CHAT, {"echo": "yes"}, "echo", "echo must be true or false"),
        (RESPONSES, {"echo": True}, "echo", "echo is not offered"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_named(path: str, more: dict[str, Any], param: str, message: str) -> None:
    answer, requests = ask(path, BODIES[path] | more)
    error = answer.json["error"]
    assert (answer.status, error["param"], requests) == (400, param, [])
    assert message in error["message"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, {}),
        ({"add_generation_prompt": True, "continue_final_message": False}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False},
         {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)  # fmt: skip
def test_how_a_conversation_ends(more: dict[str, Any], told: dict[str, Any]) -> None:
    for path in (CHAT, "/tokenize"):
        _, (request,) = ask(path, BODIES[CHAT] | more, ['{"tokens": [1], "token_strs": ["a"], "max_model_len": 9}'])
        assert json.loads(texts_of(request)["messages"]) == {"messages": [USER]} | told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("last", "more", "begins"),
    [
        ({"role": "assistant", "content": "Well"}, {"continue_final_message": True}, "Well"),
        ({"role": "assistant", "content": "Well"}, {}, "Well"),
        ({"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]},
         {"continue_final_message": True, "add_generation_prompt": False}, "a\nb"),
        ({"role": "user", "content": "Well"}, {"add_generation_prompt": False}, "Well"),
        ({"role": "user", "content": "Well"}, {}, ""),
        ({"role": "assistant", "tool_calls": []}, {"add_generation_prompt": False}, ""),
    ],
)  # fmt: skip
def test_an_echo_begins_with_the_last_message(last: Any, more: dict[str, Any], begins: str, stream: bool) -> None:
    body = BODIES[CHAT] | {"messages": [USER, last], "echo": True, "stream": stream, "n": 1} | more
    answer, (request,) = ask(CHAT, body, [" then"])
    assert json.loads(texts_of(request)["sampling_parameters"]) == {"n": 1}
    if not stream:
        assert answer.json["choices"][0]["message"]["content"] == begins + " then"
        return
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line[6:] not in ("", "[DONE]")]
    said = [event["choices"][0]["delta"].get("content") for event in events]
    assert said[:3] == ["", begins, " then"] if begins else ["", " then"]
    assert "role" in events[0]["choices"][0]["delta"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_conversation_does_not_end_in_both_ways(path: str) -> None:
    answer, requests = ask(path, BODIES[CHAT] | {"continue_final_message": True, "add_generation_prompt": True})
    error = answer.json["error"]
    assert (answer.status, error["param"], requests) == (400, "continue_final_message", [])
    assert error["message"] == "Cannot set both `continue_final_message` and `add_generation_prompt` to True."


def test_a_chat_is_tokenized_without_more_special_tokens() -> None:
    said = ['{"tokens": [1], "token_strs": ["a"], "max_model_len": 9}']
    assert ask("/tokenize", BODIES[CHAT] | {"add_special_tokens": False}, said)[0].status == 200
    answer, _ = ask("/tokenize", BODIES[CHAT] | {"add_special_tokens": True}, said)
    assert (answer.status, answer.json["error"]["param"]) == (400, "add_special_tokens")


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*BODIES, "/tokenize"])
def test_the_one_model_need_not_be_named(path: str) -> None:
    body = {"prompt": "Hi"} if path == "/tokenize" else {k: v for k, v in BODIES[path].items() if k != "model"}
    served = call(body, path=path, models={"only": "quire", "other": "onnx"})
    assert (served.status, served.json.get("model", "only")) == (200, "only")
    several = call(body, path=path, models={"only": "quire", "second": "quire"})
    assert (several.status, several.json["error"]["param"]) == (400, "model")


# -- what does not fit ------------------------------------------------------------------------------------------------


TOKENS = "{} has 70 tokens; with max_model_len=64 it must have fewer than that"


@pytest.mark.parametrize(
    ("path", "name", "said", "number"),
    [
        (COMPLETIONS, "text_input", TOKENS, "70 tokens"),
        (CHAT, "messages", TOKENS, "70 tokens"),
        (RESPONSES, "messages", TOKENS, "70 tokens"),
        (COMPLETIONS, "text_input", "{} has 9000 characters; it cannot fit max_model_len=64 tokens", "9000 characters"),
        (CHAT, "messages", "{} has more than 900 characters, which cannot fit max_model_len=64 tokens",
         "more than 900 characters"),
        (CHAT, "messages", "{} has 99 messages, which cannot fit; with max_model_len=64 it must", "99 messages"),
    ],
)  # fmt: skip
def test_a_prompt_that_does_not_fit_is_said_as_openai_says_it(path: str, name: str, said: str, number: str) -> None:
    error = call(BODIES[path], path=path, error=said.format(name)).json["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["param"] == {COMPLETIONS: "prompt", CHAT: "messages", RESPONSES: "input"}[path]
    assert error["message"] == (
        f"This model's maximum context length is 64 tokens. However, your {error['param']} resulted in {number}. "
        f"Please reduce the length of the {error['param']}."
    )
