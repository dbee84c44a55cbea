"""What bodies may say: which name of a field decides, what is missing or odd, and how much of a stream has usage."""

import json
from typing import Any

import pytest
from support.gateway import Answer, ask, texts_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Hi"}
MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def sampling(path: str, body: Any) -> Any:
    """What the model is asked for."""
    answer, (request,) = ask(path, body)
    assert answer.status == 200
    return json.loads(texts_of(request)["sampling_parameters"])


def chunks(answer: Answer) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"model": "m"}, "prompt"),
        (COMPLETIONS, {"prompt": "Hi"}, "model"),
        (COMPLETIONS, PROMPT | {"model": ""}, "model"),
        (COMPLETIONS, PROMPT | {"model": ["m"]}, "model"),
        (COMPLETIONS, PROMPT | {"model": "m\0x"}, "model"),  # tritonserver would take it for m
        (COMPLETIONS, PROMPT | {"prompt": []}, "prompt"),
        (COMPLETIONS, PROMPT | {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, PROMPT | {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, PROMPT | {"prompt": [True]}, "prompt"),
        (COMPLETIONS, PROMPT | {"stream": "yes"}, "stream"),
        (COMPLETIONS, PROMPT | {"echo": 1}, "echo"),
        (CHAT, {}, "messages"),
        (CHAT, {"model": "m"}, "messages"),
        (CHAT, {"messages": MESSAGES["messages"]}, "model"),
        (CHAT, MESSAGES | {"messages": []}, "messages"),
        (CHAT, MESSAGES | {"messages": "Hi"}, "messages"),
        (CHAT, MESSAGES | {"messages": [{}]}, "messages"),
        (CHAT, MESSAGES | {"messages": [{"content": "Hi"}]}, "messages"),
        (CHAT, MESSAGES | {"messages": [{"role": 5, "content": "Hi"}]}, "messages"),
        (CHAT, MESSAGES | {"logprobs": 1}, "logprobs"),
        (CHAT, MESSAGES | {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, MESSAGES | {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, MESSAGES | {"add_special_tokens": True}, "add_special_tokens"),
        (COMPLETIONS, PROMPT | {"add_special_tokens": False}, "add_special_tokens"),
        (COMPLETIONS, {"model": "m", "prompt": [[1]], "add_special_tokens": "no"}, "add_special_tokens"),
        ("/v1/responses", {"model": "m"}, "input"),
        ("/tokenize", {}, "model"),
        ("/detokenize", {"model": "m"}, "tokens"),
        ("/v1/embeddings", {}, "model"),
    ],
)
def test_what_is_missing_or_odd_is_named(path: str, body: Any, param: str) -> None:
    answer, requests = ask(path, body)
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param in error["message"]
    assert not requests


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 50, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 3, "max_completion_tokens": None}, {"max_tokens": 3}),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0, "add_special_tokens": False}, {}),
        ({"n": 2, "seed": 7, "stop": "x"}, {"n": 2, "seed": 7, "stop": "x"}),
        ({"stop": ["x", "y"], "logit_bias": {"5": -100}}, {"stop": ["x", "y"], "logit_bias": {"5": -100}}),
        ({"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "user": "me"}, {}),
    ],
)
def test_fields_of_a_chat_are_the_models_parameters(said: dict[str, Any], asked: dict[str, Any]) -> None:
    assert sampling(CHAT, MESSAGES | said) == asked


def test_a_completion_has_a_number_of_logprobs_and_no_newer_name_of_its_length() -> None:
    """What is no field of the route goes to the model, which refuses it by its name."""
    assert sampling(COMPLETIONS, PROMPT | {"logprobs": 0, "best_of": 1}) == {"logprobs": 0, "best_of": 1}
    assert sampling(COMPLETIONS, PROMPT | {"max_completion_tokens": 5}) == {"max_completion_tokens": 5}


@pytest.mark.parametrize("prompt", ["Hi", [5, 6]])
def test_a_completion_may_name_the_special_tokens_that_it_has_anyhow(prompt: Any) -> None:
    for adds in (True,) if isinstance(prompt, str) else (True, False):
        assert sampling(COMPLETIONS, PROMPT | {"prompt": prompt, "add_special_tokens": adds}) == {}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_a_seed_is_an_integer_of_64_bits_with_or_without_a_sign(path: str, body: dict[str, Any]) -> None:
    seeds = {-2: 2**64 - 2, -(2**63): 2**63, 2**64 - 1: 2**64 - 1, 0: 0}
    assert {seed: sampling(path, body | {"seed": seed})["seed"] for seed in seeds} == seeds
    for seed in (-1, -(2**63) - 1, 2**64, -2.5, "-2"):  # none at all, or the model says what is wrong
        assert sampling(path, body | {"seed": seed}) == {"seed": seed}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_without_a_user_goes_to_the_template_as_it_is(role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}]
    _, (request,) = ask(CHAT, MESSAGES | {"messages": messages})
    assert json.loads(texts_of(request)["messages"]) == {"messages": messages}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_usage_in_a_stream(path: str, body: dict[str, Any]) -> None:
    def usages(options: Any) -> list[Any]:
        answer, _ = ask(path, body | {"stream": True, "stream_options": options}, ["a", "bc"])
        usages = [chunk.get("usage", "absent") for chunk in chunks(answer)]
        return [usage["completion_tokens"] if isinstance(usage, dict) else usage for usage in usages]

    num_chunks = len(usages(None))
    assert usages(None) == usages({"include_usage": False}) == ["absent"] * num_chunks
    assert usages({"include_obfuscation": False, "continuous_usage_stats": True}) == ["absent"] * num_chunks
    assert usages({"include_usage": True}) == [None] * num_chunks + [3]
    # As with vLLM, the chunk with the role comes before any token.
    first = [0] if path == CHAT else []
    assert usages({"include_usage": True, "continuous_usage_stats": True}) == [*first, 1, 3, 3]


@pytest.mark.parametrize(
    "options", [{"include_usage": "yes"}, {"include_usages": True}, [], {"include_obfuscation": 1}]
)
def test_options_of_a_stream_are_known_and_true_or_false(options: Any) -> None:
    answer, requests = ask(COMPLETIONS, PROMPT | {"stream": True, "stream_options": options})
    assert (answer.status, answer.json["error"]["param"], requests) == (400, "stream_options", [])


def test_a_body_of_too_many_values_is_not_read() -> None:
    """No stream of others goes on while it is: 16 MB of small ones took 4 s."""
    for said, what in (
        (MESSAGES | {"messages": [{"role": "user", "content": "x"}] * 90_000}, "90000"),
        (PROMPT | {"prompt": [0] * 300_000}, "299999"),
    ):
        answer, requests = ask(COMPLETIONS if "prompt" in said else CHAT, said)
        assert answer.status == 400
        assert "commas and brackets; at most 262144 are taken" in answer.json["error"]["message"], what
        assert requests == []
