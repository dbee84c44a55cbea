"""Log-probabilities and token ids in OpenAI's shapes: the tokens' own bytes, and offsets that the text has."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from support.gateway import gateway, response, texts_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": "a日", "logprobs": 2}
MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BROKEN = "\N{REPLACEMENT CHARACTER}"
PROMPT = [
    None,
    {"1": {"logprob": -0.5, "rank": 1, "decoded_token": BROKEN, "bytes": [0xE6]}},
    {"2": {"logprob": -1.5, "rank": 2, "decoded_token": BROKEN, "bytes": [0x97, 0xA5]},
     "1": {"logprob": -0.25, "rank": 1, "decoded_token": BROKEN, "bytes": [0xE6]}},
]  # fmt: skip


def at(
    offset: int, text: str, own: Sequence[int] | None = None, token_id: int = 7, **others: str
) -> dict[str, dict[str, Any]]:
    """The log-probabilities of one output token."""
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": text, "text_offset": offset}
    position = {str(token_id): entry if own is None else entry | {"bytes": list(own)}}
    return position | {name[1:]: {"logprob": -2.0, "rank": 2, "decoded_token": other} for name, other in others.items()}


def ask(path: str, body: dict[str, Any], *responses: Any) -> tuple[list[Any], list[Any]]:
    """The answer, or the chunks of a stream; and what the server was asked to generate. It knows the text of tokens."""

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        if request.parameters["task"].string_param == "detokenize":
            ids = list(memoryview(request.raw_input_contents[0]).cast("i"))
            text = BROKEN if ids[0] == 5 else "a" if len(ids) == 1 else "a日"
            yield response(json.dumps({"prompt": text}))
            return
        for item in responses:
            yield item

    async def go() -> tuple[list[Any], list[Any]]:
        async with gateway(serve) as (app, triton):
            answer = await app.call(path, body)
            assert answer.status == 200, answer.body
            asked = [request for request in triton.requests if not request.parameters["task"].string_param]
            if not body.get("stream"):
                return [answer.json], asked
            events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n")]
            return [json.loads(event) for event in events if event and event != "[DONE]"], asked

    return asyncio.run(asyncio.wait_for(go(), 20))


def listed(chunks: list[Any], name: str) -> list[Any]:
    found = [(chunk["choices"][0]["logprobs"] or {}).get(name, []) for chunk in chunks]
    return [item for items in found for item in items]


def flags(request: Any) -> set[str]:
    return {item.name for item in request.inputs if item.name.startswith("return_")}


# -- parts of characters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_a_character_are_named_by_their_bytes_and_stand_at_its_place(stream: bool) -> None:
    positions = [at(0, BROKEN, [0xE6]), at(0, BROKEN, [0x97]), at(0, BROKEN, [0xA5]), at(1, "x")]
    responses = [
        response("", token_ids=[7, 7], logprobs=positions[:2]),
        response("日x", "length", token_ids=[7, 7], logprobs=positions[2:]),
    ]
    if not stream:
        responses = [response("日x", "length", token_ids=[7] * 4, logprobs=positions)]
    chunks, _ = ask(COMPLETIONS, BODY | {"stream": stream}, *responses)
    assert listed(chunks, "tokens") == [r"bytes:\xe6", r"bytes:\x97", r"bytes:\xa5", "x"]
    assert listed(chunks, "text_offset") == [0, 0, 0, 1]
    text = ""
    for chunk in chunks:
        text += chunk["choices"][0]["text"]
        assert all(offset < len(text) for offset in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", []))


def test_a_chat_has_the_bytes_of_parts_of_characters() -> None:
    positions = [at(0, BROKEN, [0xE6], _8=BROKEN), at(0, "é")]
    positions[0]["8"]["bytes"] = [0x97]
    body = MESSAGES | {"logprobs": True, "top_logprobs": 2}
    (answer,), _ = ask(CHAT, body, response("日", "stop", token_ids=[7, 7], logprobs=positions))
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], second["bytes"]) == (BROKEN, [0xE6], [0xC3, 0xA9])
    assert [top["bytes"] for top in first["top_logprobs"]] == [[0xE6], [0x97]]


def test_tokens_of_the_same_text_are_all_among_the_most_likely() -> None:
    position = at(0, "x", _8="x", _9="y")
    (answer,), _ = ask(COMPLETIONS, BODY, response("x", "stop", token_ids=[7], logprobs=[position]))
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5, "token_id:8": -2.0, "y": -2.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_no_offset_is_beyond_the_text_where_a_stop_string_cut_it_off(stream: bool) -> None:
    positions = [at(0, "ab"), at(2, "STO"), at(5, "P")]
    responses = [
        response("ab", token_ids=[7], logprobs=positions[:1]),
        response("", token_ids=[7], logprobs=positions[1:2]),  # it may be the beginning of the stop string
        response("", "stop", token_ids=[7], logprobs=positions[2:]),
    ]
    if not stream:
        responses = [response("ab", "stop", token_ids=[7] * 3, logprobs=positions)]
    chunks, _ = ask(COMPLETIONS, BODY | {"stop": "STOP", "stream": stream}, *responses)
    assert listed(chunks, "tokens") == ["ab", "STO", "P"]
    assert listed(chunks, "text_offset") == [0, 2, 2]


def test_held_back_tokens_come_with_their_text() -> None:
    responses = [
        response("ab", token_ids=[7], logprobs=[at(0, "ab")]),
        response("", token_ids=[7], logprobs=[at(2, "STO")]),
        response("STOx", "length", token_ids=[7], logprobs=[at(5, "x")]),
    ]
    chunks, _ = ask(COMPLETIONS, BODY | {"stop": "STOP", "stream": True}, *responses)
    said = [(chunk["choices"][0]["text"], chunk["choices"][0]["logprobs"]["text_offset"]) for chunk in chunks]
    assert said == [("ab", [0]), ("STOx", [2, 5])]


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned(path: str, stream: bool) -> None:
    body = (BODY if path == COMPLETIONS else MESSAGES) | {"return_token_ids": True, "stream": stream}
    body.pop("logprobs", None)
    responses = [
        response("a", token_ids=[7], prompt_token_ids=[1, 2]),
        response("bc", "stop", token_ids=[8, 9], prompt_token_ids=[]),
    ]
    if not stream:
        responses = [response("abc", "stop", token_ids=[7, 8, 9], prompt_token_ids=[1, 2])]
    chunks, (asked,) = ask(path, body, *responses)
    assert {"return_token_ids", "return_prompt_token_ids"} <= flags(asked)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [7, 8, 9]
    places = [chunk["choices"][0] if path == COMPLETIONS else chunk for chunk in chunks]
    assert places[0]["prompt_token_ids"] == [1, 2]
    assert ["prompt_token_ids" in place for place in places[1:]] == [False] * len(places[1:])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_that_a_request_does_not_ask_for_are_not_computed(path: str, stream: bool) -> None:
    """A whole answer has null in their place: clients of vLLM read them unasked."""
    body = BODY if path == COMPLETIONS else MESSAGES
    (*_, answer), (asked,) = ask(path, {**body, "logprobs": None, "stream": stream}, response("a", "stop"))
    assert not flags(asked) & {"return_token_ids", "return_prompt_token_ids", "return_stop_reason"}
    (choice,) = answer["choices"]
    assert choice.get("token_ids", "absent") == ("absent" if stream else None)
    place = choice if path == COMPLETIONS else answer
    assert place.get("prompt_token_ids", "absent") == ("absent" if stream else None)


def test_tokens_may_be_named_by_their_ids() -> None:
    entries = [at(0, "x", _8="x")]
    said = {"return_tokens_as_token_ids": True}
    (answer,), _ = ask(COMPLETIONS, BODY | said, response("x", "stop", token_ids=[7], logprobs=entries))
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:7"]
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:7": -0.5, "token_id:8": -2.0}]
    body = MESSAGES | said | {"logprobs": True}
    (answer,), _ = ask(CHAT, body, response("x", "stop", token_ids=[7], logprobs=entries))
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:7", [0x78])


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [None, 0, 1])
def test_a_completion_has_the_log_probabilities_of_the_prompt_in_each_choice(number: int | None) -> None:
    said = {} if number is None else {"prompt_logprobs": PROMPT}
    body = {"model": "m", "prompt": ["a", "b"], "prompt_logprobs": number}
    (answer,), asked = ask(COMPLETIONS, body, response("a", "stop", **said))
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [said.get("prompt_logprobs")] * 2
    assert ["return_prompt_logprobs" in flags(request) for request in asked] == [number is not None] * 2


@pytest.mark.parametrize("number", [None, 0, 1])
def test_a_chat_has_the_log_probabilities_of_the_prompt_beside_its_choices(number: int | None) -> None:
    said = {} if number is None else {"prompt_logprobs": PROMPT}
    (answer,), _ = ask(CHAT, MESSAGES | {"prompt_logprobs": number}, response("a", "stop", **said))
    assert answer["prompt_logprobs"] == said.get("prompt_logprobs")
    assert "prompt_logprobs" not in answer["choices"][0]


def test_a_stream_has_the_log_probabilities_of_the_prompt_once() -> None:
    body = MESSAGES | {"prompt_logprobs": 1, "stream": True}
    chunks, _ = ask(CHAT, body, response("a", prompt_logprobs=PROMPT), response("b", "stop"))
    assert [chunk.get("prompt_logprobs") for chunk in chunks] == [PROMPT] + [None] * (len(chunks) - 1)
    assert not any("prompt_logprobs" in chunk["choices"][0] for chunk in chunks)


# -- prompts that are repeated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a日", [0, 1, 2]])
def test_an_echo_has_the_log_probabilities_of_the_prompt(prompt: Any, stream: bool) -> None:
    body = BODY | {"prompt": prompt, "echo": True, "stream": stream}
    said = {"prompt_token_ids": [0, 1, 2], "prompt_logprobs": PROMPT}
    chunks, (asked,) = ask(COMPLETIONS, body, response("xy", "length", token_ids=[7], logprobs=[at(0, "xy")], **said))
    assert json.loads(texts_of(asked)["sampling_parameters"]) == {"logprobs": 2, "prompt_logprobs": 2}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a日xy"
    assert listed(chunks, "tokens") == ["a", r"bytes:\xe6", r"bytes:\x97\xa5", "xy"]
    assert listed(chunks, "token_logprobs") == [None, -0.5, -1.5, -0.5]
    assert listed(chunks, "text_offset") == [0, 1, 1, 2]
    tops = [None, {r"bytes:\xe6": -0.5}, {r"bytes:\x97\xa5": -1.5, r"bytes:\xe6": -0.25}, {"xy": -0.5}]
    assert listed(chunks, "top_logprobs") == tops
    assert not any(chunk["choices"][0].get("prompt_logprobs") for chunk in chunks), "the client did not ask for them"


@pytest.mark.parametrize("zero", [0, 0.0, "0"])
@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_ends_with_the_prompt(stream: bool, zero: Any) -> None:
    body = BODY | {"echo": True, "max_tokens": zero, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    said = {"prompt_token_ids": [0, 1, 2], "prompt_logprobs": PROMPT}
    chunks, (asked,) = ask(COMPLETIONS, body, response("xy", "stop", token_ids=[7], logprobs=[at(0, "xy")], **said))
    assert json.loads(texts_of(asked)["sampling_parameters"])["max_tokens"] == 1
    usage = chunks.pop()["usage"] if stream else chunks[0]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a日"
    assert listed(chunks, "token_logprobs") == [None, -0.5, -1.5]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_echo_of_token_ids_is_their_text() -> None:
    body = {"model": "m", "prompt": [0, 1, 2], "echo": True}
    (answer,), _ = ask(COMPLETIONS, body, response("x", "stop", prompt_token_ids=[0, 1, 2]))
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("a日x", None)


def test_the_prompts_log_probabilities_come_first_even_if_another_sequence_is_faster() -> None:
    """The model says them with the first output of the first sequence."""
    slow = response("", token_ids=[7], logprobs=[at(0, "b")])
    first = response("a", "length", token_ids=[7], logprobs=[at(0, "a")], prompt_token_ids=[0, 1, 2],
                     prompt_logprobs=PROMPT)  # fmt: skip
    chunks, _ = ask(COMPLETIONS, BODY | {"echo": True, "stream": True}, slow, first)
    assert chunks[0]["choices"][0]["text"] == "a日"
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -1.5]
    assert [chunk["choices"][0]["text"] for chunk in chunks[1:]] == ["a"]


def test_special_tokens_take_no_place_in_the_prompt() -> None:
    entries = [None, {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "<|x|>"}},
               {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "日"}}]  # fmt: skip
    said = {"prompt_token_ids": [0, 1, 2], "prompt_logprobs": entries}
    body = BODY | {"echo": True, "max_tokens": 0}
    (answer,), _ = ask(COMPLETIONS, body, response("x", "stop", token_ids=[7], logprobs=[at(0, "x")], **said))
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1]


def test_the_first_token_may_be_a_part_of_a_character() -> None:
    """Alone it has no text, so its bytes are those that the others leave."""
    entries = [None, {"3": {"logprob": -0.5, "rank": 1, "decoded_token": BROKEN, "bytes": [0xA5]}},
               {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]  # fmt: skip
    said = {"prompt_token_ids": [5, 3, 4], "prompt_logprobs": entries}
    body = BODY | {"prompt": "日x", "echo": True, "max_tokens": 0}
    (answer,), _ = ask(COMPLETIONS, body, response("y", "stop", token_ids=[7], logprobs=[at(0, "y")], **said))
    logprobs = answer["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == ([r"bytes:\xe6\x97", r"bytes:\xa5", "x"], [0, 0, 1])
