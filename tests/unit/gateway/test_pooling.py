"""Embeddings, scores and classes over HTTP, in the shapes of OpenAI, Cohere, Jina and vLLM."""

import asyncio
import base64
import json
import re
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from support.gateway import Answer, gateway, vectors

NO_TASK = "task is embed; this model offers generate"
PATHS = ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling")


def call(path: str, body: Any, answers: Any = None, error: str = "") -> tuple[Answer, list[Any]]:
    """The answer to one request, and the requests that the server got."""

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        if error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error)
        yield answers

    async def go() -> tuple[Answer, list[Any]]:
        async with gateway(serve) as (app, triton):
            triton.models["m"] = "quire"
            return await app.call(path, body), triton.requests

    return asyncio.run(asyncio.wait_for(go(), 20))


def inputs_of(request: Any) -> dict[str, Any]:
    """Its texts and ids as lists, and its parameters as an object."""
    found: dict[str, Any] = {}
    for item, content in zip(request.inputs, request.raw_input_contents, strict=True):
        if item.datatype == "BYTES":
            found[item.name], rest = [], content
            while rest:
                (size,) = struct.unpack_from("<I", rest)
                found[item.name].append(rest[4 : 4 + size].decode())
                rest = rest[4 + size :]
        else:
            found[item.name] = np.frombuffer(content, bool if item.datatype == "BOOL" else "<i4").tolist()
    return {**found, "pooling_parameters": json.loads(found["pooling_parameters"][0])}


ROWS = [[0.5, -1.0], [0.25, 2.0]]


def test_embeddings_of_texts_are_one_request_and_have_openais_shape() -> None:
    body = {"model": "m", "input": ["Hi", "héllo"], "dimensions": 2, "user": "me", "normalize": None}
    answer, (request,) = call("/v1/embeddings", body, vectors(ROWS))
    assert answer.status == 200
    assert (answer.json["object"], answer.json["model"]) == ("list", "m")
    assert answer.json["data"] == [
        {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
        {"object": "embedding", "index": 1, "embedding": [0.25, 2.0]},
    ]
    assert answer.json["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert inputs_of(request) == {
        "text_input": ["Hi", "héllo"],
        "pooling_parameters": {"task": "embed", "dimensions": 2},
        "return_num_input_tokens": [True],
    }


def test_base64_is_float32_in_little_endian() -> None:
    answer, _ = call("/v1/embeddings", {"input": "Hi", "encoding_format": "base64"}, vectors(ROWS[:1]))
    assert np.frombuffer(base64.b64decode(answer.json["data"][0]["embedding"]), "<f4").tolist() == ROWS[0]


@pytest.mark.parametrize("order", ["native", "little", "big"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_in_base64_have_a_type_and_an_order(dtype: str, order: str) -> None:
    numbers = [0.1, -3.0e-3, 65504.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]
    body = {"input": "Hi", "encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
    answer, (request,) = call("/pooling", body, vectors([numbers]))
    assert inputs_of(request)["pooling_parameters"] == {}
    found = bytearray(base64.b64decode(answer.json["data"][0]["data"]))
    expected = torch.tensor(numbers, dtype=getattr(torch, dtype))
    kind = torch.int32 if dtype == "float32" else torch.int16
    bits = np.frombuffer(found, np.dtype(f"i{expected.itemsize}").newbyteorder(">" if order == "big" else "<"))
    assert bits.tolist() == expected.view(kind).tolist()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/classify", "/pooling"])
@pytest.mark.parametrize("ending", [{}, {"add_generation_prompt": True}])
def test_a_conversation_is_one_prompt(path: str, ending: dict[str, bool]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    body = {"model": "m", "messages": messages, "chat_template_kwargs": {"mood": "good"}, **ending}
    answer, (request,) = call(path, body, vectors(ROWS[:1]))
    assert answer.status == 200, answer.json
    sent = inputs_of(request)
    assert "text_input" not in sent
    (conversation,) = map(json.loads, sent["messages"])
    assert [message["content"] for message in conversation["messages"]] == ["Hi", "Hello"]
    assert conversation["chat_template_kwargs"] == {"mood": "good"}
    assert conversation.get("add_generation_prompt", True) == bool(ending)
    assert set(sent["pooling_parameters"]) <= {"task"}


@pytest.mark.parametrize(("given", "lengths"), [([7, 8, 9], [3]), ([[7], [8, 9]], [1, 2])])
def test_token_ids_go_to_the_model_with_their_lengths(given: list[Any], lengths: list[int]) -> None:
    _, (request,) = call("/v1/embeddings", {"model": "m", "input": given}, vectors(ROWS[: len(lengths)]))
    sent = inputs_of(request)
    assert (sent["input_ids"], sent["input_lengths"]) == ([7, 8, 9], lengths)


def test_a_batch_of_2048_is_one_request() -> None:
    answer, (request,) = call("/v1/embeddings", {"model": "m", "input": ["a"] * 2048}, vectors([[1.0]] * 2048))
    assert len(answer.json["data"]) == len(inputs_of(request)["text_input"]) == 2048
    assert call("/v1/embeddings", {"model": "m", "input": ["a"] * 2049})[0].status == 400


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_their_score(path: str) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}
    answer, (request,) = call(path, body, vectors([[0.1], [0.9], [0.1]], "scores", num_input_tokens=[4, 5, 6]))
    assert [one["index"] for one in answer.json["results"]] == [1, 0]
    assert answer.json["results"][0]["document"] == {"text": "b"}
    assert answer.json["results"][0]["relevance_score"] == pytest.approx(0.9)
    assert answer.json["usage"]["total_tokens"] == 15
    sent = inputs_of(request)
    assert (sent["text_input"], sent["text_pair"]) == (["q"], ["a", "b", "c"])
    plain, _ = call(path, {**body, "return_documents": False}, vectors([[0.1], [0.9], [0.1]], "scores"))
    assert all("document" not in one for one in plain.json["results"])


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_are_in_the_order_of_the_pairs(names: tuple[str, str]) -> None:
    body = {"model": "m", names[0]: "q", names[1]: ["a", "b"]}
    answer, _ = call("/v1/score", body, vectors([[0.5], [0.25]], "scores"))
    assert answer.json["data"] == [
        {"object": "score", "index": 0, "score": 0.5}, {"object": "score", "index": 1, "score": 0.25},
    ]  # fmt: skip


def test_classes_have_their_labels_and_probabilities() -> None:
    answer, _ = call(
        "/classify", {"model": "m", "input": ["a", "b"]}, vectors([[0.25, 0.75], [0.75, 0.25]], "scores",
                                                                  labels=["bad", "good"]),
    )  # fmt: skip
    first, second = answer.json["data"]
    assert first == {"index": 0, "label": "good", "probs": [0.25, 0.75], "num_classes": 2}
    assert second["label"] == "bad"
    nameless, _ = call("/classify", {"model": "m", "input": "a"}, vectors([[0.5]], "scores"))
    assert nameless.json["data"][0]["label"] is None


def test_rows_per_token_are_parted_by_prompt() -> None:
    body = {"model": "m", "input": ["a b", "c"], "task": "token_embed"}
    answer, (request,) = call("/pooling", body, vectors([[1.0], [2.0], [3.0]], num_rows=[2, 1]))
    assert [one["data"] for one in answer.json["data"]] == [[[1.0], [2.0]], [[3.0]]]
    assert inputs_of(request)["pooling_parameters"] == {"task": "token_embed"}
    _, (request,) = call("/pooling", {"model": "m", "input": "a"}, vectors([[1.0]]))
    assert inputs_of(request)["pooling_parameters"] == {}


def test_a_key_pays_for_the_tokens() -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield vectors(ROWS)

    async def go() -> str:
        async with gateway(serve, api_keys=("sesam",)) as (app, _):
            headers = {"authorization": "Bearer sesam"}
            await app.call("/v1/embeddings", {"model": "m", "input": ["a", "b"]}, headers)
            return (await app.call("/metrics", headers=headers)).body.decode()

    assert re.search(r"quire_openai_key_tokens_total\{.*\} 6\.0\n", asyncio.run(asyncio.wait_for(go(), 20)))


def test_a_client_that_leaves_cancels_the_request() -> None:
    async def go() -> int:
        left, began = asyncio.Event(), asyncio.Event()

        async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
            began.set()
            await asyncio.Event().wait()
            yield

        async with gateway(serve) as (app, triton):
            going = asyncio.create_task(app.call("/v1/embeddings", {"model": "m", "input": "a"}, left=left))
            await began.wait()
            left.set()
            await going
            while not triton.num_cancelled:
                await asyncio.sleep(0)
            return triton.num_cancelled

    assert asyncio.run(asyncio.wait_for(go(), 20)) == 1


def test_a_model_without_the_task_says_what_it_can_do() -> None:
    for path, body in (
        ("/v1/embeddings", {"model": "m", "input": "a"}),
        ("/v1/completions", {"model": "m", "prompt": "a"}),
    ):
        answer, _ = call(path, body, error=NO_TASK)
        assert (answer.status, answer.json["error"]["param"]) == (400, "model")
        assert answer.json["error"]["message"] == NO_TASK


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", 1]}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input"),
    ("/v1/embeddings", {"input": [1 << 40]}, "input"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "endianness": ["big"]}, "endianness"),
    ("/v1/embeddings", {"input": "a", "encoding_format": []}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": ""}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "endianness": {}}, "endianness"),
    ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "Hi"}]}, "messages"),
    ("/v1/embeddings", {"messages": []}, "messages"),
    ("/v1/embeddings", {"input": "a", "model": 7}, "model"),
    ("/v1/embeddings", {"input": "a", "task": "classify"}, "task"),
    ("/rerank", {"query": "q", "documents": ["a"], "task": "embed"}, "task"),
    ("/rerank", {"query": "q"}, "documents"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/v2/rerank", {"query": "q", "documents": ["a", 5]}, "documents"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/rerank", {"query": "q", "documents": ["a"], "return_documents": "yes"}, "return_documents"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/v1/score", {"text_1": "a"}, "text_2"),
    ("/classify", {"input": None}, "input"),
    ("/pooling", {"input": "a", "task": ["embed"]}, "task"),
    ("/pooling", {"input": "a", "task": "score"}, "task"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: str(value)[:40])
def test_malformed_bodies_are_rejected_by_name(path: str, body: Mapping[str, Any], param: str) -> None:
    answer, requests = call(path, {"model": "m", **body})
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body
    assert answer.json["error"]["message"].startswith(param)
    assert not requests


def test_an_error_shows_a_text_as_one() -> None:
    answer, _ = call("/rerank", {"model": "m", "query": "q", "documents": ["a"], "top_n": "3"})
    assert answer.json["error"]["message"] == "top_n is '3'; it must be an integer above 0"


@pytest.mark.parametrize(
    ("said", "message", "param"),
    [
        ("text_input[1] is empty", "input[1] is empty", "input"),
        (
            "dimensions is 9; this model's are from 1 to 8",
            "dimensions is 9; this model's are from 1 to 8",
            "dimensions",
        ),
    ],
)
def test_what_the_model_rejects_names_the_clients_field(said: str, message: str, param: str) -> None:
    answer, _ = call("/v1/embeddings", {"model": "m", "input": ["a", ""], "dimensions": 9}, error=said)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert answer.json["error"]["message"] == message


@pytest.mark.parametrize("path", PATHS)
def test_each_route_takes_json_alone(path: str) -> None:
    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        yield vectors(ROWS)

    async def go() -> Answer:
        async with gateway(serve) as (app, _):
            return await app.call(path, {"model": "m"}, {"content-type": "text/plain"})

    assert asyncio.run(asyncio.wait_for(go(), 20)).status == 415
