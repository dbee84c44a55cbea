"""Bad requests, one by one: the error names what is wrong, and the next request works."""

import asyncio
import json
from typing import Any

import pytest
from support.clients import Answer, ask, http, run, with_client
from support.serving import Server
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

PROMPT = "def fibonacci(n):"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "text_input is missing"),
    "two prompts": ({"text_input": PROMPT, "input_ids": [1]}, "text_input and input_ids"),
    "empty text": ({"text_input": ""}, "text_input is empty"),
    "no ids": ({"input_ids": []}, "input_ids is empty"),
    "negative id": ({"input_ids": [5, -1]}, "input_ids holds token id -1"),
    "id outside the vocabulary": ({"input_ids": [5, 4096]}, "input_ids holds token id 4096"),
    "too many ids": ({"input_ids": [5] * 1024}, "input_ids has 1024 tokens"),
    "text of too many tokens": ({"text_input": "word " * 2000}, "text_input has"),
    "text of a million characters": ({"text_input": "x" * 10**6}, "text_input has 1000000 characters"),
    "invalid UTF-8": ({"text_input": b"abc\xff"}, "text_input is not valid UTF-8 at byte 3"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens is 0"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens is -1"),
    "max_tokens huge": ({"sampling_parameters": {"max_tokens": 2**63}}, "max_tokens is 9223372036854775808"),
    "max_tokens a word": ({"sampling_parameters": {"max_tokens": "many"}}, "max_tokens is 'many'"),
    "min_tokens above max_tokens": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9"),
    "temperature -1": ({"temperature": -1.0}, "temperature is -1"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature is nan"),
    "temperature inf": ({"temperature": float("inf")}, "temperature is inf"),
    "temperature NaN in JSON": ({"sampling_parameters": '{"temperature": NaN}'}, "temperature is nan"),
    "top_p -0.1": ({"top_p": -0.1}, "top_p is -0.1"),
    "top_p 2": ({"top_p": 2.0}, "top_p is 2"),
    "top_k -2": ({"top_k": -2}, "top_k is -2"),
    "min_p 2": ({"min_p": 2.0}, "min_p is 2"),
    "seed 2**64": ({"sampling_parameters": {"seed": 2**64}}, "seed is 18446744073709551616"),
    "logprobs 1000": ({"logprobs": 1000}, "logprobs is 1000"),
    "10,000 stop strings": ({"stop_words": ["x"] * 10_000}, "stop is 10000 strings"),
    "empty stop string": ({"stop_words": ["a", ""]}, "stop is a string of 0 characters"),
    "stop token outside the vocabulary": ({"stop_token_ids": [4096]}, "stop_token_ids holds 4096"),
    "not JSON": ({"sampling_parameters": "{'top_p': 1}"}, "sampling_parameters is not JSON"),
    "not an object": ({"sampling_parameters": "[1, 2]"}, "sampling_parameters must be a JSON object"),
    "nested for ever": ({"sampling_parameters": "[" * 50_000}, "sampling_parameters is not JSON"),
    "unknown key": ({"sampling_parameters": {"temprature": 1}}, "'temprature'; did you mean 'temperature'?"),
    "unknown request parameter": ({"parameters": {"max_token": 1}}, "'max_token'; did you mean 'max_tokens'?"),
    "unknown SLO class": ({"parameters": {"slo_class": "gold"}}, "slo_class is 'gold'; this model has default"),
    "JSON and parameter disagree": (
        {"sampling_parameters": {"max_tokens": "3"}, "max_tokens": 4},
        "max_tokens is 3 in sampling_parameters but 4 in the request parameters",
    ),
    "parameter and input disagree": (
        {"parameters": {"stop": "a"}, "stop_words": ["b"]}, "stop is [\"a\"] in the request parameters",
    ),
    "stream with the input": (
        {"stream": True, "exclude_input_in_output": False}, "`exclude_input_in_output` = False is not allowed",
    ),
    "unknown LoRA": ({"parameters": {"lora_name": "x"}}, "LoRA feature is not enabled."),
    "an image": ({"parameters": {"image": "aGk="}}, "image is not supported as a parameter"),
    "an image of a model of text": ({"image": ["aGk="]}, "image holds images; this model takes text alone"),
    "an image that is no base64": ({"image": ["a"]}, "image: the image is not base64"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_request_is_refused_and_the_next_one_works(server: Server, case: str) -> None:
    said, message = BAD[case]
    if not {"text_input", "input_ids"} & said.keys() and case != "no prompt":
        said = {"text_input": PROMPT, **said}

    async def work(client: grpc_aio.InferenceServerClient) -> tuple[Answer, Answer]:
        return await ask(client, **said), await ask(client, text_input=PROMPT, max_tokens=1)

    refused, served = asyncio.run(with_client(server, work))
    assert message in refused.message
    assert "\n" not in refused.message
    assert refused.responses == []
    assert served.text.startswith(PROMPT)


@pytest.mark.parametrize("said", [{"top_k": 10**9}, {"text_input": "a\0b"}, {"top_p": 1.0, "seed": 2**64 - 1}], ids=str)
def test_odd_but_right(server: Server, said: dict[str, Any]) -> None:
    answer = run(server, **{"text_input": PROMPT, "max_tokens": 2, **said})
    assert answer.text != ""


def test_bad_requests_among_good_ones(server: Server) -> None:
    """A hundred at once, every other one bad; nobody gets another's answer."""

    async def work(client: grpc_aio.InferenceServerClient) -> list[Answer]:
        requests = [
            ask(client, text_input=PROMPT, max_tokens=0 if i % 2 else 1 + i % 7, return_num_output_tokens=True,
                ignore_eos=True)
            for i in range(100)
        ]  # fmt: skip
        return list(await asyncio.gather(*requests))

    answers = asyncio.run(with_client(server, work))
    for i, answer in enumerate(answers):
        if i % 2:
            assert answer.message.startswith("max_tokens is 0")
        else:
            assert answer.responses[0]["num_output_tokens"] == [1 + i % 7]


def test_sampling_parameters_survive_a_round_trip(server: Server) -> None:
    """The whole JSON of a client that sends every parameter it knows."""
    said = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.0, "seed": 1, "max_tokens": 4, "min_tokens": 1,
            "stop": ["zzz"], "stop_token_ids": [3], "ignore_eos": False, "include_stop_str_in_output": False,
            "skip_special_tokens": True, "logprobs": None}  # fmt: skip
    answer = run(server, text_input=PROMPT, sampling_parameters=json.dumps(said))
    assert answer.text.startswith(PROMPT)


GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "a fraction": ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be an integer"),
    "a negative seed": ({"seed": -2}, "seed is -2"),
    "an integer of more than 32 bits": ({"min_tokens": 2**32 + 8}, "min_tokens is 4294967304"),
    "an id of more than 32 bits": ({"stop_token_ids": [2**32 + 8]}, "stop_token_ids holds 4294967304"),
    "an integer of more than 63 bits": ({"seed": 2**63 + 12345}, "seed is 9.22"),
    "a list in the place of a number": ({"top_k": [1]}, "'top_k'"),
    "a word": ({"parameters": {"temperature": "hot"}}, "temperature is 'hot'; it must be a number"),
    "twice": ({"max_tokens": 8, "parameters": {"max_tokens": 9}}, "max_tokens is said twice in the request parameters"),
    "a long name": ({"x" * 100_000: 1}, "unknown sampling parameter 'xxx"),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_names_what_is_wrong(server: Server, case: str) -> None:
    said, message = GENERATE[case]
    status, answer = http(server, "/v2/models/tinypy/generate", {"text_input": PROMPT, **said})
    assert status == 400
    assert message in answer["error"]
    assert len(answer["error"]) < 1000


@pytest.mark.parametrize("body", [b'{"text_input": "a", "max_tokens": "\xff"}', b'{"text_input": "a", "\xff": "1"}'])
def test_parameters_that_are_no_text_are_refused(server: Server, body: bytes) -> None:
    status, answer = http(server, "/v2/models/tinypy/generate", body)
    assert (status, answer["error"]) == (400, "parameters: a name or a value in them is not valid UTF-8")


BODIES: dict[str, bytes] = {
    "text of 20 MB": json.dumps({"text_input": "x" * 20_000_000}).encode(),
    "20 MB in a field that nobody knows": json.dumps({"text_input": PROMPT, "junk": "x" * 20_000_000}).encode(),
    "20 MB of numbers": json.dumps({"input_ids": [5] * 5_000_000}).encode(),
    "20 MB that are no JSON": b"x" * 20_000_000,
    "lists in lists": b'{"text_input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects in objects": b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    "lists that never end": b"[" * 400_000,
}


@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
@pytest.mark.parametrize("case", BODIES)
def test_http_body_that_is_large_or_deep_is_refused_and_the_next_one_works(
    server: Server, case: str, path: str
) -> None:
    status, content = http(server, f"/v2/models/tinypy/{path}", BODIES[case])
    assert status >= 400 or "error" in str(content), str(content)[:200]
    assert run(server, text_input=PROMPT, max_tokens=1).text.startswith(PROMPT)
