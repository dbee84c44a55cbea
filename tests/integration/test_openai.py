"""The OpenAI gateway as OpenAI's own client sees it, in front of a real tritonserver with the demo model."""

import base64
import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from quire_cli.process import listens
from safetensors.torch import load_file, save
from support.clients import metric, run
from support.ports import free_port
from support.processes import children, command_line
from support.serving import ROOT, Server, serve, wait_until

pytestmark = pytest.mark.server

PROMPT = "def fibonacci(n):"
MODEL = "tinypy"
WITH_GATEWAY = ("--openai", "--openai-port", "0")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(gateway_server: Server) -> Server:
    return gateway_server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.openai}/v1", api_key=key, max_retries=0, timeout=60)


def post(
    server: Server, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON and headers of what no client of OpenAI's would send."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        f"http://{server.openai}{path}", data=data, headers={"content-type": "application/json"} | names
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def get(server: Server, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.openai}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# -- models and health ------------------------------------------------------------------------------------------------


def test_models_are_those_of_the_server(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert model.id == MODEL
    # As old as the gateway has known it, whoever asks.
    assert time.time() - 3600 < model.created <= time.time()
    assert model == client.models.retrieve(MODEL) == next(iter(client.models.list()))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_health(server: Server) -> None:
    assert get(server, "/health") == (200, '{"status":"ok"}')


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_a_probe_may_ask_for_the_head_alone(server: Server, path: str) -> None:
    request = urllib.request.Request(f"http://{server.openai}{path}", method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert (answer.status, answer.read()) == (200, b"")


# -- completions ------------------------------------------------------------------------------------------------------


def test_completion_is_what_tritonserver_says(server: Server, client: openai.OpenAI) -> None:
    expected = run(server, text_input=PROMPT, max_tokens=12, temperature=0, exclude_input_in_output=True,
                   return_num_input_tokens=True)  # fmt: skip
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.responses[0]["num_input_tokens"][0]
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12 + answer.usage.prompt_tokens)


def test_prompt_embeds_as_clients_of_vllm_send_them(server: Server, client: openai.OpenAI) -> None:
    path = ROOT / "model_repository" / "tinypy" / "1" / "model" / "model.safetensors"
    rows = load_file(path)["model.embed_tokens.weight"][[5, 66, 777, 8, 99]]
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    expected = client.completions.create(prompt=[5, 66, 777, 8, 99], **said)
    file = io.BytesIO()
    torch.save(rows, file)
    for data in (file.getvalue(), save({"rows": rows})):
        embeds = {"prompt_embeds": base64.b64encode(data).decode()}
        answer = client.completions.create(prompt=None, extra_body=embeds, **said)  # type: ignore[call-overload]
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.usage.total_tokens == expected.usage.total_tokens == 17
        chunks = client.completions.create(prompt="", extra_body=embeds, stream=True, **said)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.choices[0].text
    for data, message in (
        (b"x", "neither a file of torch.save nor"),
        (save({"rows": rows[:, 1:].contiguous()}), "has shape"),
    ):
        embeds = {"prompt_embeds": base64.b64encode(data).decode()}
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            client.completions.create(prompt="", extra_body=embeds, **said)
        assert raised.value.param == "prompt_embeds"


def test_stream_is_the_same_text_with_usage_at_its_end(client: openai.OpenAI) -> None:
    said: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**said)
    chunks = list(client.completions.create(**said, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len(chunks) > 3
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_several_prompts_with_several_sequences_each(client: openai.OpenAI, stream: bool) -> None:
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 5, "extra_body": {"ignore_eos": True}}
    prompts = ["import ", "class A:"]
    alone = [
        client.completions.create(prompt=prompt, **said | {"seed": seed}).choices[0].text
        for prompt in prompts for seed in (5, 6)
    ]  # fmt: skip
    texts = [""] * 4
    answers: Any = client.completions.create(prompt=prompts, n=2, stream=stream, **said)
    for answer in answers if stream else [answers]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    assert texts == alone


def test_prompts_as_token_ids(server: Server, client: openai.OpenAI) -> None:
    said: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    expected = [run(server, input_ids=ids, max_tokens=6, temperature=0).text for ids in ([50, 60, 70], [80, 90])]
    assert client.completions.create(prompt=[50, 60, 70], **said).choices[0].text == expected[0]
    answer = client.completions.create(prompt=[[50, 60, 70], [80, 90]], **said)
    assert [choice.text for choice in answer.choices] == expected


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    answers: Any = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2, stream=stream
    )
    text, tokens, offsets = "", [], []
    for answer in answers if stream else [answers]:
        (choice,) = answer.choices
        text += choice.text
        tokens += choice.logprobs.tokens
        offsets += choice.logprobs.text_offset
        assert all(top[token] == max(top.values()) for token, top in zip(
            choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True))  # fmt: skip
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
    assert "".join(tokens) == text
    assert [text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)] == [True] * 6


@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_has_log_probabilities_of_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    """As lm-eval asks for them: for several prompts of token ids, of which each has its text and no output."""
    prompts = [[50, 60, 70], [80, 90]]
    said: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 1, "stream": stream}
    expected = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    )
    answers: Any = client.completions.create(prompt=prompts, echo=True, max_tokens=0, **said)
    choices = [choice for answer in (answers if stream else [answers]) for choice in answer.choices]
    for number, ids in enumerate(prompts):
        own = [choice for choice in choices if choice.index == number]
        scored = own[0].logprobs
        assert "".join(scored.tokens) == "".join(choice.text for choice in own)
        assert scored.text_offset == [len("".join(scored.tokens[:i])) for i in range(len(ids))]
        assert own[-1].finish_reason == "length"
        wanted: Any = expected.choices[number]
        assert wanted.prompt_token_ids == ids
        entries = [entry[str(token_id)] for entry, token_id in zip(wanted.prompt_logprobs[1:], ids[1:], strict=True)]
        assert scored.token_logprobs == [None, *(entry["logprob"] for entry in entries)]
        assert scored.top_logprobs[0] is None
        for top, entry in zip(scored.top_logprobs[1:], entries, strict=True):
            assert (max(top.values()) == entry["logprob"]) == (entry["rank"] == 1)


def test_characters_of_several_tokens(client: openai.OpenAI) -> None:
    """This model has no token for them: each is three of one byte."""
    text = "日本 = 1"
    said: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "extra_body": {"guided_choice": [text]}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=1, **said)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens[:3] == [r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5"]
    assert logprobs.text_offset[:7] == [0, 0, 0, 1, 1, 1, 2]
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, **said)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert bytes(byte for item in content for byte in item.bytes or ()).startswith(text.encode())


@pytest.mark.parametrize("stream", [True, False])
def test_stop_echo_bias_and_vllms_parameters(client: openai.OpenAI, stream: bool) -> None:
    def text(**said: Any) -> tuple[str, str]:
        answers: Any = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, stream=stream, **said)
        choices = [choice for answer in (answers if stream else [answers]) for choice in answer.choices]
        return "".join(choice.text for choice in choices), choices[-1].finish_reason

    whole, _ = text(max_tokens=20)
    stop = whole[8:11]
    assert text(max_tokens=20, stop=[stop, "never"]) == (whole[: whole.index(stop)], "stop")
    assert text(max_tokens=20, echo=True)[0] == PROMPT + whole
    assert text(max_tokens=20, extra_body={"repetition_penalty": 10.0})[0] != whole
    assert (
        text(max_tokens=4, logit_bias={"77": 100})[0] == text(max_tokens=4, extra_body={"allowed_token_ids": [77]})[0]
    )


def texts_of(answers: Any) -> list[str]:
    """The text of each choice, whole or streamed, of a chat or a completion."""
    texts: dict[int, str] = {}
    for answer in answers:
        for choice in answer.choices:
            said = choice.text if hasattr(choice, "text") else getattr(choice, "delta", None) or choice.message
            texts[choice.index] = texts.get(choice.index, "") + (said if isinstance(said, str) else said.content or "")
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_seed_decides_streamed_or_not(client: openai.OpenAI, is_chat: bool) -> None:
    def texts(seed: int, stream: bool) -> list[str]:
        said: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": seed, "n": 2, "stream": stream}
        create: Any = client.chat.completions.create if is_chat else client.completions.create
        answers = create(**said, **({"messages": MESSAGES} if is_chat else {"prompt": PROMPT}))
        return texts_of(answers if stream else [answers])

    first = texts(1, False)
    assert first == texts(1, False) == texts(1, True)
    assert len(set(first)) == 2
    assert texts(2, True)[1] != first[1]


@pytest.mark.parametrize("as_list", [True, False])
def test_a_chat_stops_at_a_string_and_takes_biases(client: openai.OpenAI, as_list: bool) -> None:
    def text(stream: bool, **said: Any) -> str:
        answers: Any = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0, stream=stream, **said
        )
        return texts_of(answers if stream else [answers])[0]

    whole = text(False)
    stop = whole[6:9]
    for stream in (True, False):
        assert text(stream, stop=[stop, "never"] if as_list else stop) == whole[: whole.index(stop)]
    assert len(set(text(True, logit_bias={"77": 100}))) == 1


def test_the_context_bounds_max_tokens(client: openai.OpenAI) -> None:
    """A client need not know how long the context is."""
    prompt = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).usage
    (model,) = (found for found in client.models.list() if found.id == MODEL)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10**6, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert prompt is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == model.max_model_len - prompt.prompt_tokens  # type: ignore[attr-defined]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "param", "message"),
    [
        ({"top_p": 2}, "top_p", "top_p is 2"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": [1, 99999999]}, "prompt", "prompt"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": 2**63}, "max_tokens", "at least 1"),
        ({"logprobs": 99}, "logprobs", "from 0 to 20"),
        ({"extra_body": {"logprobs": False}}, "logprobs", "must be an integer"),
        ({"best_of": 2}, "best_of", "not offered here"),
        ({"frequency_penalty": 3}, "frequency_penalty", "in [-2, 2]"),
        ({"logit_bias": {"10000000": 1}}, "logit_bias", "ids must be in"),
        ({"extra_body": {"tempereture": 1}}, "tempereture", "did you mean 'temperature'"),
        ({"extra_body": {"guided_regex": "foo**("}}, "guided_regex", "guided_regex"),
        ({"extra_body": {"echo": 5}}, "echo", "echo must be true or false"),
        ({"echo": True, "logprobs": 99}, "logprobs", "from 0 to 20"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_bad_value_is_named(
    client: openai.OpenAI, said: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, "stream": stream} | said)
    assert raised.value.param == param
    assert message in str(raised.value)
    assert raised.value.type == "invalid_request_error"


def test_options_of_a_stream_need_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="without stream"):
        client.completions.create(model=MODEL, prompt=PROMPT, stream_options={"include_usage": True})


@pytest.mark.parametrize("name", ["nope", f"{MODEL}:adapter", f"{MODEL}/adapter"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_unknown_model_is_not_found_nor_an_adapter_of_one(client: openai.OpenAI, name: str, stream: bool) -> None:
    for ask in (
        lambda: client.completions.create(model=name, prompt=PROMPT, stream=stream),
        lambda: client.chat.completions.create(model=name, messages=MESSAGES, stream=stream),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            ask()
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("length", ["x", "-1", "1.5", ""])
def test_a_length_that_is_none_is_a_bad_request_at_once(server: Server, length: str) -> None:
    connection = http.client.HTTPConnection(server.openai, timeout=30)
    headers = {"content-type": "application/json", "content-length": length}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", b"{}", headers)
        assert connection.getresponse().status == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "tinypy", "prompt": "\\ud800"}'])
def test_what_is_no_json_is_a_bad_request(server: Server, body: bytes) -> None:
    status, answer, _ = post(server, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_other_routes_methods_and_types_have_errors_of_the_same_shape(server: Server) -> None:
    assert post(server, {}, "/v1/nothing")[:2][0] == 404
    assert json.loads(get(server, "/v1/completions")[1])["error"]["message"] == "Method Not Allowed"
    assert post(server, {"model": MODEL, "prompt": "x"}, content_type="text/plain")[0] == 415


# -- chat -------------------------------------------------------------------------------------------------------------

MESSAGES: list[Any] = [
    {"role": "user", "content": "add two numbers"},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
    {"role": "user", "content": [{"type": "text", "text": "subtract"}, {"type": "text", "text": "them"}]},
]
RENDERED = "# add two numbers\ndef add(a, b):\n    return a + b\n# subtract\n# them\n"


def test_chat_renders_the_checkpoints_template(server: Server, client: openai.OpenAI) -> None:
    expected = run(server, text_input=RENDERED, max_tokens=16, temperature=0, exclude_input_in_output=True,
                   return_num_input_tokens=True)  # fmt: skip
    said: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}
    answer = client.chat.completions.create(**said)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.responses[0]["num_input_tokens"][0]
    chunks = list(client.chat.completions.create(**said, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x" * 40}], extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(item.token for item in choice.logprobs.content) == choice.message.content
    for item in choice.logprobs.content:
        assert [top.logprob for top in item.top_logprobs] == sorted(top.logprob for top in item.top_logprobs)[::-1]
        assert len(item.top_logprobs) == 2
        assert (item.token, item.logprob) == (item.top_logprobs[0].token, item.top_logprobs[0].logprob)
        assert bytes(item.bytes or []).decode() == item.token
    only = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert only.choices[0].logprobs is not None
    assert [item.top_logprobs for item in only.choices[0].logprobs.content or []] == [[], []]


@pytest.mark.parametrize(
    "said",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}},
        {"extra_body": {"guided_json": SCHEMA}},
    ],
)
def test_structured_outputs(client: openai.OpenAI, said: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=120, temperature=0, **said)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_choices_and_regular_expressions(client: openai.OpenAI) -> None:
    def text(**extra: Any) -> str:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, extra_body=extra)
        return answer.choices[0].message.content or ""

    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(guided_regex="[0-9]{3}").isdecimal()


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "register", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_asked_for_is_one_of_the_functions(client: openai.OpenAI, stream: bool) -> None:
    """With the messages of an earlier call."""
    earlier = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages: list[Any] = [
        *MESSAGES, {"role": "assistant", "content": "", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]  # fmt: skip
    said: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 200, "temperature": 0}
    for choice in ("required", {"type": "function", "function": {"name": "register"}}):
        answer: Any
        if stream:
            with client.chat.completions.stream(**said, tool_choice=choice) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**said, tool_choice=choice)
        (call, *_) = answer.choices[0].message.tool_calls
        assert call.function.name in ("register", "now")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "register" else {})
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"tools": TOOLS}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
          "tool_choice": "required"}, "tools"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format"),
    ],
)  # fmt: skip
def test_a_bad_value_of_a_chat_is_named(client: openai.OpenAI, said: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | said)
    assert raised.value.param == param


# -- other routes -----------------------------------------------------------------------------------------------------


def test_responses_are_what_the_chat_says(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "add two numbers"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    said: dict[str, Any] = {"model": MODEL, "input": "add two numbers", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**said)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete"
    with client.responses.stream(**said) as stream:
        *events, last = stream
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.type == "response.incomplete"
    assert text == last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**said | {"max_output_tokens": -1})
    assert raised.value.param == "max_output_tokens"


def test_langchain_talks_to_it(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=MODEL, base_url=f"http://{server.openai}/v1", api_key="none", temperature=0, max_retries=0, max_tokens=200
    )
    whole = chat.invoke("add two numbers")
    assert "".join(str(chunk.content) for chunk in chat.stream("add two numbers")) == whole.content
    assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"]
    (call,) = chat.bind_tools(TOOLS, tool_choice="register").invoke("who?").tool_calls
    assert call["name"] == "register"
    jsonschema.validate(call["args"], SCHEMA)
    person = {"title": "person", "description": "Somebody.", **SCHEMA}
    found = chat.with_structured_output(person, method="json_schema").invoke("who?")
    jsonschema.validate(found, SCHEMA)


def test_tokens_and_their_text(server: Server) -> None:
    status, answer, _ = post(server, {"model": MODEL, "prompt": PROMPT, "return_token_strs": True}, "/tokenize")
    assert (status, answer["count"], answer["max_model_len"]) == (200, len(answer["tokens"]), 1024)
    assert len(answer["token_strs"]) == answer["count"] > 1
    back = post(server, {"model": MODEL, "tokens": answer["tokens"]}, "/detokenize")
    assert back[:2] == (200, {"prompt": PROMPT})
    chat = post(server, {"model": MODEL, "messages": MESSAGES}, "/tokenize")[1]
    assert chat["tokens"] == post(server, {"model": MODEL, "prompt": RENDERED}, "/tokenize")[1]["tokens"]
    status, answer, _ = post(server, {"model": MODEL, "tokens": [10**9]}, "/detokenize")
    assert (status, answer["error"]["param"]) == (400, "tokens")
    assert post(server, {"model": "nope", "prompt": "x"}, "/tokenize")[0] == 404


def test_a_model_without_a_task_says_what_it_can_do(server: Server, client: openai.OpenAI) -> None:
    status, answer, _ = post(server, {"model": MODEL, "input": "Hi"}, "/classify")
    assert (status, answer["error"]["param"]) == (400, "model")
    assert answer["error"]["message"].startswith("task is 'classify'; this model offers embed")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="Hi")


# -- clients that leave, and headers ----------------------------------------------------------------------------------


def leave(server: Server, body: dict[str, Any], *, path: str = "/v1/completions", after_bytes: int = 0) -> None:
    """Send a request, read so many bytes of its answer, and be gone once the engine knows of it."""
    connection = http.client.HTTPConnection(server.openai, timeout=30)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    try:
        if after_bytes:
            assert connection.getresponse().read(after_bytes)
        wait_until(lambda: metric(server, "quire_kv_blocks", state="used") > 0, "it runs")
    finally:
        assert connection.sock is not None or after_bytes
        connection.close()


def is_idle(server: Server) -> bool:
    return metric(server, "quire_kv_blocks", state="used") == 0 and metric(server, "quire_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool, path: str) -> None:
    wait_until(lambda: is_idle(server), "it is idle")
    aborted = metric(server, "quire_requests_total", outcome="abort")
    body = {"model": MODEL, "stream": stream, "max_tokens": 900, "ignore_eos": True}
    body |= {"messages": MESSAGES} if "chat" in path else {"prompt": ["import ", "class "]}
    leave(server, body, path=path, after_bytes=200 if stream else 0)
    wait_until(lambda: is_idle(server), "its blocks are free")
    num_prompts = 1 if "chat" in path else 2
    wait_until(lambda: metric(server, "quire_requests_total", outcome="abort") == aborted + num_prompts, "all aborted")


def test_the_clients_names_for_its_request_and_its_trace_are_passed_on(server: Server) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    status, _, headers = post(server, body, x_request_id="mine-1", traceparent=trace)
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    _, _, headers = post(server, body, x_request_id="no name of one")
    assert len(headers["x-request-id"]) == 32


def test_metrics_count_by_route_and_status(server: Server) -> None:
    def count(route: str, status: int) -> float:
        name = f'quire_openai_requests_total{{route="{route}",status="{status}"}} '
        lines = get(server, "/metrics")[1].splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = count("/v1/completions", 400), count("other", 404)
    post(server, b"{")
    get(server, "/nothing/of/the/kind")
    assert (count("/v1/completions", 400), count("other", 404)) == (before[0] + 1, before[1] + 1)


# -- processes --------------------------------------------------------------------------------------------------------


def find(processes: Iterable[int], module: str) -> int:
    return next(pid for pid in processes if module in command_line(pid))


def gateway_of(server: Server) -> int | None:
    """The process that listens, if one does."""
    with contextlib.suppress(StopIteration):
        pid = find(children(server.process.pid), "quire_gateway")
        return pid if listens(pid, int(server.openai.rpartition(":")[2])) else None
    return None


def test_health_tells_of_an_engine_that_died_and_requests_wait_for_the_next(
    server: Server, client: openai.OpenAI
) -> None:
    os.kill(find(server.run_id.processes(), "quire_engine.core.core_process"), signal.SIGKILL)
    wait_until(lambda: get(server, "/health") == (503, '{"status":"unavailable"}'), "it is known")
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3).choices[0].text
    wait_until(lambda: get(server, "/health")[0] == 200, "it runs again")


def test_a_gateway_that_dies_is_started_again_on_its_port(server: Server) -> None:
    pid = gateway_of(server)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: gateway_of(server) not in (None, pid), "there is another one")
    wait_until(lambda: get(server, "/health")[0] == 200, "it serves")
    assert "the OpenAI gateway has died, and is started again" in server.log()


@contextlib.contextmanager
def gateway_alone(*args: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """`quire openai`; its address."""
    command = [sys.executable, "-m", "quire_cli", "openai", "--port", "0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.removeprefix("quire: OpenAI gateway at http://").removesuffix("/v1\n")
        wait_until(lambda: listens(process.pid, int(address.rpartition(":")[2])), "it listens")
        yield address
    finally:
        process.terminate()
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stdout is not None
        process.stdout.close()


def test_a_gateway_alone_asks_for_a_key_and_bounds_bodies(server: Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesam\n\nother\n")
    arguments = ("--url", server.grpc, "--api-key", "third", "--api-key-file", str(keys), "--max-body-bytes", "2000")
    with gateway_alone(*arguments, env={"QUIRE_OPENAI_API_KEYS": "fourth"}) as address:
        alone = replace(server, openai=address)
        for key in ("sesam", "other", "third", "fourth"):
            with client_of(alone, key) as made:
                assert made.completions.create(model=MODEL, prompt="x", max_tokens=1).choices[0].finish_reason
        with client_of(alone, "fifth") as made, pytest.raises(openai.AuthenticationError) as raised:
            made.models.list()
        assert raised.value.code == "invalid_api_key"
        assert get(alone, "/health")[0] == 200
        status, answer, _ = post(alone, b" " * 2001, authorization="Bearer sesam")
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


def test_a_draining_server_takes_nothing_new_over_http_and_finishes_streams() -> None:
    with serve(*WITH_GATEWAY, "--drain-timeout", "60", step_seconds=0.02) as server, client_of(server) as client:
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "quire: draining" in server.log(), "it drains")
        wait_until(lambda: get(server, "/health")[0] == 503, "the gateway drains")
        for _ in range(20):
            status, answer, headers = post(server, {"model": MODEL, "prompt": "x"})
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "service_unavailable", "5")
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert server.wait() == 0, server.log()


def test_a_gateway_without_a_server_says_so() -> None:
    with free_port() as port, gateway_alone("--url", f"127.0.0.1:{port}") as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model=MODEL, prompt=PROMPT)
        assert raised.value.status_code == 503
