"""Anthropic's /v1/messages in front of a fake server: what the model is asked, and the blocks that its text becomes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.gateway import Answer, accepts, ask, gateway, response, texts_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object"}}
QWEN3 = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
PARTS = ["<think>Hm", ".</think>", "I look. ", '<tool_call>{"name": "now", "argu', 'ments": {"a', '": 1}}</tool_call>']
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def events(answer: Answer) -> list[dict[str, Any]]:
    found = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def accumulated(said: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, as Anthropic's clients put it together."""
    start, ping, *others, delta, stop = said
    assert [event["type"] for event in (start, ping, delta, stop)] == [
        "message_start", "ping", "message_delta", "message_stop"
    ]  # fmt: skip
    message: dict[str, Any] = start["message"] | delta["delta"] | {"usage": delta["usage"], "content": []}
    open_block = False
    arguments = ""
    for event in others:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert not open_block
            open_block, arguments = True, ""
            content.append(event["content_block"])
        elif kind == "content_block_delta":
            (name,) = set(event["delta"]) - {"type"}
            arguments += event["delta"].get("partial_json", "")
            if name != "partial_json":
                content[-1][name] += event["delta"][name]
        else:
            assert (kind, open_block) == ("content_block_stop", True)
            open_block = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(arguments)
        assert event["index"] == len(content) - 1
    assert not open_block
    return message


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "now", "input": {"a": 1}},
]


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_are_blocks(stream: bool) -> None:
    body = BODY | THINKING | {"tools": [TOOL], "system": "Be short.", "stream": stream}
    answer, (request,) = ask(MESSAGES, body, PARTS if stream else ["".join(PARTS)], QWEN3)
    message = accumulated(events(answer)) if stream else answer.json
    assert without_ids(message["content"]) == BLOCKS
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": len("".join(PARTS)),
    }  # fmt: skip
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    inputs = texts_of(request)
    assert json.loads(inputs["messages"]) == {
        "messages": [{"role": "system", "content": "Be short."}, USER],
        "tools": [{"type": "function", "function": {
            "name": "now", "description": "The time.", "parameters": {"type": "object"}}}],
    }  # fmt: skip
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 9, "skip_special_tokens": False}


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}])
def test_without_thinking_reasoning_is_not_shown(thinking: dict[str, Any]) -> None:
    answer, (request,) = ask(MESSAGES, BODY | thinking, ["<think>Hm.</think>Hello"], QWEN3)
    assert answer.json["content"] == [{"type": "text", "text": "Hello"}]
    told = json.loads(texts_of(request)["messages"]).get("chat_template_kwargs")
    assert told == ({"enable_thinking": False} if thinking else None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "stop_reason", "expected"),
    [("length", None, ("max_tokens", None)), ("stop", None, ("end_turn", None)), ("stop", 7, ("end_turn", None)),
     ("stop", "END", ("stop_sequence", "END"))],
)  # fmt: skip
def test_why_an_answer_ends(end: str, stop_reason: Any, expected: Any, stream: bool) -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        assert "return_stop_reason" in {item.name for item in request.inputs}
        assert json.loads(texts_of(request)["sampling_parameters"]) == {"max_tokens": 9, "stop": ["END"]}
        yield response("Hello", end, stop_reason=stop_reason)

    async def go() -> Answer:
        async with gateway(serve) as (app, _):
            return await app.call(MESSAGES, BODY | {"stop_sequences": ["END"], "stream": stream})

    answer = asyncio.run(asyncio.wait_for(go(), 20))
    message = accumulated(events(answer)) if stream else answer.json
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["content"] == [{"type": "text", "text": "Hello"}]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", ""])
def test_arguments_that_are_no_object_are_empty(arguments: str) -> None:
    body = BODY | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}}
    answer, _ = ask(MESSAGES, body, [arguments], end="length")
    assert without_ids(answer.json["content"]) == [{"type": "tool_use", "name": "now", "input": {}}]


@pytest.mark.parametrize("choice", ["any", "tool"])
def test_a_call_that_must_be_made_is_held_to_its_schema(choice: str) -> None:
    said = {"type": choice, "disable_parallel_tool_use": True} | ({"name": "now"} if choice == "tool" else {})
    body = BODY | {"tools": [TOOL], "tool_choice": said}
    text = '[{"name": "now", "parameters": {"a": 1}}]' if choice == "any" else '{"a": 1}'
    answer, (request,) = ask(MESSAGES, body, [text])
    assert without_ids(answer.json["content"]) == [BLOCKS[2]]
    assert answer.json["stop_reason"] == "tool_use"
    structure = json.loads(texts_of(request)["sampling_parameters"])["structured_outputs"]
    assert accepts(structure, text)
    assert not accepts(structure, f"[{text[1:-1]}, {text[1:-1]}]"), "two calls"


def test_an_answer_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {}}
    _, (request,) = ask(MESSAGES, BODY | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert json.loads(texts_of(request)["sampling_parameters"])["structured_outputs"] == {"json": schema}


# -- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_with_calls_is_a_chat() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "12:00"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
             "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"type": "tool_result", "tool_use_id": "c3"},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    body = BODY | {"messages": messages, "metadata": {"user_id": "u"}, "service_tier": "auto", "top_k": 5}
    body |= {"system": [{"type": "text", "text": "S"}], "temperature": 0.5}
    _, (request,) = ask(MESSAGES, body)
    assert json.loads(texts_of(request)["messages"])["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A\nB"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: x\ny"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip
    assert json.loads(texts_of(request)["sampling_parameters"]) == {"max_tokens": 9, "top_k": 5, "temperature": 0.5}


def test_turns_of_one_role_are_one() -> None:
    messages = [USER, USER, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}, USER]
    _, (request,) = ask(MESSAGES, BODY | {"messages": messages})
    contents = [message["content"] for message in json.loads(texts_of(request)["messages"])["messages"]]
    assert contents == ["Hi\nHi", "A\nB", "Hi"]


def test_an_answer_goes_on_where_the_assistants_last_turn_ends() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is ("}]
    answer, (request,) = ask(MESSAGES, BODY | {"messages": messages}, ["B)"])
    assert answer.json["content"] == [{"type": "text", "text": "B)"}]
    assert json.loads(texts_of(request)["messages"]) == {"messages": messages, "continue_final_message": True}


def test_an_answer_is_taken_in_the_next_turn() -> None:
    answer, _ = ask(MESSAGES, BODY | THINKING | {"tools": [TOOL]}, PARTS, QWEN3)
    content = answer.json["content"]
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "1"}
    messages = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    again, (request,) = ask(MESSAGES, BODY | {"messages": messages, "tools": [TOOL]}, chat_format=QWEN3)
    assert again.status == 200
    roles = [message["role"] for message in json.loads(texts_of(request)["messages"])["messages"]]
    assert roles == ["user", "assistant", "tool"]


def test_an_answer_without_content_is_taken_in_the_next_turn() -> None:
    answer, _ = ask(MESSAGES, BODY, [""])
    assert answer.json["content"] == []
    messages = [USER, {"role": "assistant", "content": answer.json["content"]}, USER]
    again, (request,) = ask(MESSAGES, BODY | {"messages": messages})
    assert again.status == 200
    (_, turn, _) = json.loads(texts_of(request)["messages"])["messages"]
    assert turn == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("system", [None, "", []])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    answer, (request,) = ask(MESSAGES, BODY | {"system": system})
    assert answer.status == 200
    assert json.loads(texts_of(request)["messages"]) == {"messages": [USER]}


def test_tokens_are_counted_without_generating() -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        assert request.parameters["task"].string_param == "tokenize"
        assert json.loads(texts_of(request)["messages"]) == {"messages": [USER]}
        yield response(json.dumps({"tokens": [1, 2, 3], "token_strs": [], "max_model_len": 9}))

    async def go() -> Answer:
        async with gateway(serve) as (app, _):
            return await app.call(COUNT, {"model": "m", "messages": [USER]})

    assert asyncio.run(asyncio.wait_for(go(), 20)).json == {"input_tokens": 3}


# -- errors -----------------------------------------------------------------------------------------------------------


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content must be a list of one or more"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: the image is not base64"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document blocks are not offered"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
         "messages[0].content[0].content[0]: the image is not base64"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c"}]}]}, "tool_use blocks are not"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": 5}]}, USER]},
         "messages[1].content[0] must have an id, a name, and an object as input"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}, USER]},
         "messages[1].content[0] must have an id, a name, and an object as input"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
         "messages ends with a tool_use"),
        ({"system": 5}, "system must be a list"),
        ({"system": [IMAGE]}, "system[0]: image blocks are not offered"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of the type web_search_2025"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [TOOL | {"input_schema": 5}]}, "tools[0].input_schema must be a JSON schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "y"}}, "tool_choice.name must be that of one"),
        ({"thinking": 5}, "thinking must be an object"),
        ({"stop": ["x"]}, "stop is a chat's name: give stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers is not offered"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(said: dict[str, Any], message: str) -> None:
    answer, requests = ask(MESSAGES, BODY | said)
    assert (answer.status, requests) == (400, [])
    error = answer.json
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("settings", "headers", "status", "kind"),
    [
        ({"api_keys": ("key",)}, {"x-api-key": "other"}, 401, "authentication_error"),
        ({}, {"content-type": "text/plain"}, 415, "invalid_request_error"),
    ],
)
def test_errors_before_the_route_have_anthropics_shape(
    settings: dict[str, Any], headers: dict[str, str], status: int, kind: str
) -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("x", "stop")

    async def go() -> tuple[Answer, Answer]:
        async with gateway(serve, **settings) as (app, _):
            return await app.call(MESSAGES, BODY, headers), await app.call("/v1/chat/completions", BODY, headers)

    answer, chat = asyncio.run(asyncio.wait_for(go(), 20))
    assert (answer.status, chat.status) == (status, status)
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
    assert "param" in chat.json["error"]


def test_a_stream_that_fails_says_so() -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield response("Hel")
        await context.abort(14, "the queue is full")

    async def go() -> Answer:
        async with gateway(serve) as (app, _):
            return await app.call(MESSAGES, BODY | {"stream": True})

    last = events(asyncio.run(asyncio.wait_for(go(), 20)))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
