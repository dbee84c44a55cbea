"""An answer of the gateway is part of the next request: each kind of template takes what the turn before gave."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from quire_backend.chat_format import chat_format
from quire_backend.request import parse_prompt
from quire_engine.frontend.chat_template import ChatTemplateRenderer, Conversation
from support.chat_templates import HERMES, LLAMA3, MISTRAL, QWEN3
from support.gateway import Answer, ask, texts_of

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
USER = {"role": "user", "content": "What time?"}
ARGUMENTS = '{"at": "é"}'
HERMES_CALL = f'<tool_call>{{"name": "now", "arguments": {ARGUMENTS}}}</tool_call>'
PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>{% endfor %}"  # SmolLM2's
# A template, what a model says in its form, and whether a text may come before a call.
FORMS = {
    "hermes": (HERMES, HERMES_CALL),
    "hermes with text": (HERMES, f"I look.\n{HERMES_CALL}"),
    "qwen": (QWEN3, HERMES_CALL),
    "qwen that reasons": (QWEN3, f"<think>Hm.</think>\n{HERMES_CALL}"),
    "llama": (LLAMA3, f'{{"name": "now", "parameters": {ARGUMENTS}}}'),
    "mistral": (MISTRAL, f'[TOOL_CALLS][{{"name": "now", "arguments": {ARGUMENTS}}}]'),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[ChatTemplateRenderer]:
    made = ChatTemplateRenderer()
    yield made
    made.shutdown()


def rendered(renderer: ChatTemplateRenderer, template: str, request: Any, request_of: Any) -> str:
    prompt = parse_prompt(request_of(messages=texts_of(request)["messages"]))
    assert isinstance(prompt, Conversation)
    return renderer.render(template, prompt, {"eos_token": "</s>"})


def message_of(answer: Answer) -> dict[str, Any]:
    """As OpenAI's client keeps it, whose accumulated streams have null for what never came."""
    if not answer.body.startswith(b"data: "):
        message: dict[str, Any] = answer.json["choices"][0]["message"]
        return message
    message = {"role": "assistant", "content": None, "refusal": None}
    for line in answer.body.decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", FORMS)
def test_a_chat_goes_on_after_a_call(
    form: str, choice: str, stream: bool, renderer: ChatTemplateRenderer, request_of: Any
) -> None:
    template, text = FORMS[form]
    text = text if choice == "auto" else f'[{{"name": "now", "parameters": {ARGUMENTS}}}]'
    tools = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
    body = {"model": "m", "messages": [USER], "tools": tools, "tool_choice": choice, "stream": stream}
    said = chat_format(template, "auto", "auto")
    formats = {name: value for name, value in said.items() if value is not None}
    answer, _ = ask(CHAT, body, [text[:9], text[9:]] if stream else [text], formats)
    message = message_of(answer)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}
    answer, (request,) = ask(CHAT, body | {"messages": [USER, message, result]}, ["ok"], formats)
    assert answer.status == 200
    prompt = rendered(renderer, template, request, request_of)
    assert ARGUMENTS in prompt
    assert "12:00" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_responses_go_on_after_a_call(form: str, stream: bool, renderer: ChatTemplateRenderer, request_of: Any) -> None:
    template, text = FORMS[form]
    tools = [{"type": "function", "name": "now", "parameters": PARAMETERS}]
    said = chat_format(template, "auto", "auto")
    formats = {name: value for name, value in said.items() if value is not None}
    body: dict[str, Any] = {"model": "m", "input": [USER], "tools": tools, "stream": stream}
    answer, _ = ask(RESPONSES, body, [text[:9], text[9:]] if stream else [text], formats)
    if stream:
        last = answer.body.decode().removesuffix("\n\n").split("\n\n")[-1]
        output = json.loads(last.partition("data: ")[2])["response"]["output"]
    else:
        output = answer.json["output"]
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "12:00"}
    _, (request,) = ask(RESPONSES, body | {"input": [USER, *output, result]}, ["ok"], formats)
    prompt = rendered(renderer, template, request, request_of)
    assert ARGUMENTS in prompt
    assert "12:00" in prompt


@pytest.mark.parametrize("template", [PLAIN, HERMES, QWEN3, LLAMA3, MISTRAL])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_an_answer_without_text_is_taken_too(
    path: str, template: str, renderer: ChatTemplateRenderer, request_of: Any
) -> None:
    """One that ended at its first token, or that another server gave."""
    name = "messages" if path == CHAT else "input"
    answer, _ = ask(path, {"model": "m", name: [USER]}, [""])
    said = [message_of(answer), {"role": "assistant", "content": None}] if path == CHAT else answer.json["output"]
    for message in said:
        _, (request,) = ask(path, {"model": "m", name: [USER, message, USER]})
        assert rendered(renderer, template, request, request_of).count("What time?") == 2


@pytest.mark.parametrize("arguments", ["{", "[1]", "", "null", '{"a": 1} and more', 5, None, ["a"]])
def test_malformed_arguments_of_an_earlier_call_are_empty_ones(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may write what is no JSON; the conversation goes on all the same."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "abcdefghi", "name": "f", "arguments": arguments}
    for path, body in (
        (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}),
        (RESPONSES, {"input": [USER, item]}),
    ):
        caplog.clear()
        _, (request,) = ask(path, {"model": "m"} | body)
        (_, message) = json.loads(texts_of(request)["messages"])["messages"]
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
        is_said = any("arguments" in record.getMessage() for record in caplog.records)
        assert is_said == (arguments not in ("", None))
