"""/v1/responses in front of a fake server: what the model is asked, and the items and events that its text becomes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.gateway import Answer, ask, gateway, response, texts_of

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": "m", "input": "Hi"}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}
QWEN3 = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
PARTS = ["<think>Hm", ".</think>", "I look. ", '<tool_call>{"name": "now", "argu', 'ments": {"a', '": 1}}</tool_call>']


def events(answer: Answer) -> list[dict[str, Any]]:
    found = []
    for number, block in enumerate(answer.body.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        found.append(event)
    return found


def without_names(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert len({item["id"] for item in items}) == len(items)
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


ITEMS = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "status": "completed"},
    {"type": "message", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
    {"type": "function_call", "name": "now", "arguments": '{"a": 1}', "status": "completed"},
]  # fmt: skip


def test_reasoning_text_and_calls_are_items() -> None:
    body = BODY | {"tools": [TOOL], "instructions": "Be short.", "max_output_tokens": 9, "store": True}
    answer, (request,) = ask(RESPONSES, body, ["".join(PARTS)], QWEN3)
    response = answer.json
    assert without_names(response["output"]) == ITEMS
    assert (response["object"], response["status"], response["store"]) == ("response", "completed", False)
    assert response["usage"]["output_tokens"] == len("".join(PARTS))
    assert (response["tools"], response["instructions"]) == ([TOOL], "Be short.")
    inputs = texts_of(request)
    assert json.loads(inputs["messages"]) == {
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
    }
    assert json.loads(inputs["sampling_parameters"]) == {"max_tokens": 9, "skip_special_tokens": False}


def test_a_response_repeats_what_the_model_samples_with() -> None:
    model = QWEN3 | {"temperature": 0.6, "top_p": 0.9}
    for more, repeated in (({}, (0.6, 0.9)), ({"temperature": 0, "top_p": None}, (0, 0.9)), ({"top_p": 1}, (0.6, 1))):
        response = ask(RESPONSES, BODY | more, chat_format=model)[0].json
        assert (response["temperature"], response["top_p"]) == repeated
    response = ask(RESPONSES, BODY, chat_format=QWEN3)[0].json
    assert (response["temperature"], response["top_p"]) == (1.0, 1.0)


def test_the_events_of_a_stream_make_the_same_response() -> None:
    answer, _ = ask(RESPONSES, BODY | {"tools": [TOOL], "stream": True}, PARTS, QWEN3)
    said = events(answer)
    kinds = [event["type"].removeprefix("response.") for event in said]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    final = said[-1]["response"]
    assert without_names(final["output"]) == ITEMS
    assert [event["item"] for event in said if event["type"].endswith("item.done")] == final["output"]
    for index, item in enumerate(final["output"]):
        own = [event for event in said if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in own} == {index}
        text = "".join(event["delta"] for event in own if "delta" in event)
        done = next(event for event in own if event["type"].endswith(".done"))
        assert text == done.get("text", done.get("arguments"))
    assert said[0]["response"]["usage"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more", "prefix"),
    [
        ("/v1/completions", {"prompt": "Hi"}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "chatcmpl-"),
        (RESPONSES, {"input": "Hi"}, "resp_"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}, "msg_"),
    ],
)
def test_the_model_knows_the_id_that_the_client_gets(
    path: str, more: dict[str, Any], prefix: str, stream: bool
) -> None:
    """So does a trace: `gen_ai.response.id`. All but a completion are chats there."""
    answer, (request,) = ask(path, {"model": "m", "stream": stream} | more, ["Hel"])
    name = request.parameters["response_id"].string_param
    assert name.startswith(prefix)
    assert f'"id":"{name}"' in answer.body.decode().replace(" ", "")
    assert ("messages" in texts_of(request)) == (prefix != "cmpl-"), "the server calls a request with messages a chat"


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    for stream in (True, False):
        answer, _ = ask(RESPONSES, BODY | {"stream": stream}, ["Hel"], end="length")
        response = events(answer)[-1]["response"] if stream else answer.json
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert (
        events(ask(RESPONSES, BODY | {"stream": True}, ["Hel"], end="length")[0])[-1]["type"] == "response.incomplete"
    )


def test_a_conversation_of_items_becomes_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13:00"}]},
    ]
    _, (request,) = ask(RESPONSES, BODY | {"input": items, "text": {"format": {"type": "json_object"}}})
    user, assistant, *tools = json.loads(texts_of(request)["messages"])["messages"]
    assert user == {"role": "user", "content": "What time?"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{}, {"a": 1}]
    assert [(tool["tool_call_id"], tool["content"]) for tool in tools] == [("c1", "12:00"), ("c2", "13:00")]
    sampling = json.loads(texts_of(request)["sampling_parameters"])
    assert sampling == {"structured_outputs": {"json_object": True}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"messages": []}, "messages"),
        ({"instructions": []}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": []}, "text"),
        ({"reasoning": {"effort": 3}}, "reasoning"),
        ({"model": ""}, "model"),
    ],
)
def test_a_bad_value_is_named(more: dict[str, Any], param: str) -> None:
    answer, requests = ask(RESPONSES, BODY | more)
    error = answer.json["error"]
    assert (answer.status, error["param"], requests) == (400, param, [])
    assert param in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "Hi", "temperature": 1}, "temperature"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/v1/embeddings", {"model": 1, "input": "Hi"}, "model"),
    ],
)
def test_a_bad_value_is_named_by_the_other_routes(path: str, more: dict[str, Any], param: str) -> None:
    answer, requests = ask(path, {"model": "m"} | more)
    assert (answer.status, answer.json["error"]["param"], requests) == (400, param, [])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("more", "num_top"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 1}, 1),
        ({"top_logprobs": 1}, 1),
    ],
)
def test_log_probabilities_of_texts(more: dict[str, Any], num_top: int, stream: bool) -> None:
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    texts = ["a", "a", ""] if stream else ["aa"]

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        assert json.loads(texts_of(request)["sampling_parameters"]) == {"logprobs": num_top}
        for number, text in enumerate(texts):
            end = "None" if number < len(texts) - 1 else "stop"
            yield response(text, end, logprobs=[{"7": entry}] * (1 if stream else 3))

    async def go() -> Answer:
        async with gateway(serve) as (app, _):
            return await app.call(RESPONSES, BODY | {"stream": stream} | more)

    answer = asyncio.run(asyncio.wait_for(go(), 20))
    token = {"token": "a", "logprob": -0.5, "bytes": [97]}
    expected = [token | {"top_logprobs": [token] * num_top}] * 3
    said = events(answer) if stream else []
    output = said[-1]["response"]["output"] if stream else answer.json["output"]
    assert output[0]["content"][0]["logprobs"] == expected
    if stream:
        assert [event["logprobs"] for event in said if event["type"].endswith("text.delta")] == [expected[:1]] * 2
        (done,) = [event for event in said if event["type"].endswith("text.done")]
        assert done["logprobs"] == expected


def test_log_probabilities_are_not_asked_for_unless_they_are_wanted() -> None:
    for more in ({}, {"top_logprobs": 0}, {"include": []}):
        _, (request,) = ask(RESPONSES, BODY | more)
        assert json.loads(texts_of(request)["sampling_parameters"]) == {}
