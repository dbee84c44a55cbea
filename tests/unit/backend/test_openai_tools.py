"""Chats with functions in front of a fake server: what the model is asked, and what becomes of its text."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from support import gateway
from support.gateway import Answer, texts_of

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"],
    "$defs": {"Place": {"type": "string"}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant"}
BODY: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS}
TEXT = """I look.
<tool_call>{"name": "weather", "arguments": {"at": "é"}}</tool_call>
<tool_call>{"name": "now"}</tool_call>"""
HERMES = {"tool_call_parser": "hermes"}


def ask(body: Any, parts: Iterable[str] = ("ok",), chat_format: Any = HERMES) -> tuple[Answer, list[Any]]:
    return gateway.ask(CHAT, body, parts, chat_format)


def message_of(answer: Answer) -> dict[str, Any]:
    """The message, whose chunks are put together if it was streamed."""
    if not answer.body.startswith(b"data: "):
        (choice,) = answer.json["choices"]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    message: dict[str, Any] = {"content": "", "refusal": None, "tool_calls": []}
    for choice in [json.loads(line)["choices"][0] for line in lines]:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            index = call.pop("index")
            if "id" in call:
                assert index == len(message["tool_calls"])
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][index]["function"]["arguments"] += call["function"]["arguments"]
        message |= {"role": delta.get("role", message.get("role")), "finish_reason": choice["finish_reason"]}
    if not message["tool_calls"]:
        del message["tool_calls"]
    elif not message["content"]:
        message["content"] = None
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    for call in message.get("tool_calls", []):
        assert (len(call["id"]), call["type"]) == (9, "function")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_calls_that_the_model_chooses_to_make(stream: bool, is_parallel: bool) -> None:
    parts = [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)] if stream else [TEXT]
    answer, (request,) = ask(BODY | {"stream": stream, "parallel_tool_calls": is_parallel}, parts)
    message = message_of(answer)
    assert (message["content"], message["finish_reason"]) == ("I look.", "tool_calls")
    assert calls_of(message) == [("weather", '{"at": "é"}'), ("now", "{}")][: 1 + is_parallel]
    inputs = texts_of(request)
    assert json.loads(inputs["messages"]) == {"messages": [USER], "tools": TOOLS}
    assert json.loads(inputs["sampling_parameters"]) == {"skip_special_tokens": False}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("choice", "text", "calls", "reason"),
    [
        ("required", '[{"name": "now", "parameters": {}}]', [("now", "{}")], "tool_calls"),
        ({"type": "function", "function": {"name": "now"}}, '{"a": 1}', [("now", '{"a": 1}')], "stop"),
    ],
)
def test_a_call_that_has_to_be_made_needs_no_parser(
    stream: bool, choice: Any, text: str, calls: Any, reason: str
) -> None:
    parts = [text[:9], text[9:]] if stream else [text]
    answer, (request,) = ask(BODY | {"stream": stream, "tool_choice": choice}, parts, {})
    message = message_of(answer)
    assert (calls_of(message), message["content"], message["finish_reason"]) == (calls, None, reason)
    sampling = json.loads(texts_of(request)["sampling_parameters"])
    assert sampling.keys() == {"structured_outputs"}
    assert sampling["structured_outputs"]["disable_any_whitespace"] is True


def test_the_grammar_of_calls_keeps_references_within_a_functions_schema() -> None:
    _, (request,) = ask(BODY | {"tool_choice": "required", "parallel_tool_calls": False})
    schema = json.loads(texts_of(request)["sampling_parameters"])["structured_outputs"]["json"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    weather, now = schema["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "weather"}
    reference = weather["properties"]["parameters"]["properties"]["at"]["$ref"]
    part = schema
    for name in reference.split("/")[1:]:
        part = part[int(name)] if isinstance(part, list) else part[name]
    assert part == {"type": "string"}
    assert now["properties"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_reasoning(stream: bool, is_wanted: bool) -> None:
    parts = ["<th", "ink>Hm.</thi", "nk>\n\nYes."]
    body = {"model": "m", "messages": [USER], "stream": stream, "include_reasoning": is_wanted}
    body |= {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}
    answer, (request,) = ask(body, parts if stream else ["".join(parts)], {"reasoning_parser": "qwen3"})
    message = message_of(answer)
    assert (message["content"], message["finish_reason"]) == ("Yes.", "stop")
    assert message.get("reasoning_content") == ("Hm." if is_wanted else None)
    variables = {"enable_thinking": True, "reasoning_effort": "low"}
    assert json.loads(texts_of(request)["messages"]) == {"messages": [USER], "chat_template_kwargs": variables}


def test_gpt_oss_is_read_without_functions_too() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    answer, (request,) = ask(
        {"model": "m", "messages": [USER]}, [text],
        {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"},
    )  # fmt: skip
    message = message_of(answer)
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert json.loads(texts_of(request)["sampling_parameters"]) == {"skip_special_tokens": False}


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"response_format": {"type": "json_object"}}])
def test_text_that_is_no_call_stays_as_it_is(more: dict[str, Any]) -> None:
    answer, (request,) = ask(BODY | more, [TEXT])
    assert message_of(answer)["content"] == TEXT
    assert ("tools" in json.loads(texts_of(request)["messages"])) == ("tool_choice" not in more)


def test_earlier_calls_reach_the_template_as_objects() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"at": [1]}'}}
    said = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "assistant", "content": "Noon.", "tool_calls": []},
    ]  # fmt: skip
    _, (request,) = ask(BODY | {"messages": said})
    messages = json.loads(texts_of(request)["messages"])["messages"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {"at": [1]}}
    assert messages[2] == {"role": "tool", "tool_call_id": "a", "content": "12:00"}
    assert messages[3] == {"role": "assistant", "content": "Noon."}


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"tools": {}}, None, None),
        ({"tools": "x"}, "tools", "tools must be a list of up to 128 functions"),
        ({"tools": [NAMED] * 129}, "tools", "tools must be a list of up to 128 functions"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] must be"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name must be"),
        ({"tools": [NAMED, NAMED]}, "tools", "tools[1].function.name is 'now'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools",
         "parameters must be"),
        ({"tool_choice": "some"}, "tool_choice", "tool_choice must be none, auto, required"),
        ({"tool_choice": "named"}, "tool_choice", "tool_choice must be none, auto, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "one of the tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "one of the tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        ({"tool_choice": "required", "guided_regex": "x"}, "guided_regex", "asks for a call"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
        ({"reasoning_effort": 1}, "reasoning_effort", "must be a string"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages", "messages[0].tool_calls must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages",
         "messages[1].tool_calls[0].function must be"),
        ({"messages": [ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages",
         "is not JSON"),
        ({"messages": [ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}, "messages",
         "of an object"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(more: dict[str, Any], param: str | None, message: str | None) -> None:
    answer, requests = ask(BODY | more)
    if param is None:
        assert answer.status == 200
        return
    error = answer.json["error"]
    assert (answer.status, error["param"], requests) == (400, param, [])
    assert message is not None
    assert message in error["message"]


def test_who_may_call_but_cannot_be_understood_hears_it() -> None:
    answer, requests = ask(BODY, chat_format={"tool_call_parser": "of a later version"})
    assert (answer.status, answer.json["error"]["param"], requests) == (400, "tools", [])
    assert "set its tool_call_parser" in answer.json["error"]["message"]
