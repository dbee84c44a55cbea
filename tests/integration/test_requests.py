"""What one request can ask for besides text: structure, several sequences, deadlines, a place in a full queue."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from safetensors.torch import load_file
from support.clients import Answer, ask, metric, run, with_client
from support.serving import CHECKPOINT, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_outputs(server: Server) -> None:
    structure = {"json": SCHEMA, "disable_any_whitespace": True}
    request = {"text_input": "person = ", "max_tokens": 60, "stream": True, "return_finish_reason": True}
    answer = run(server, structured_outputs=structure, **request)
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert answer.responses[-1]["finish_reason"] == ["stop"]
    answer = run(server, sampling_parameters={"structured_outputs": {"choice": ["yes", "no"]}}, **request)
    assert answer.text in ("yes", "no")


def test_a_structure_that_cannot_be_compiled_is_the_clients_fault(server: Server) -> None:
    answer = run(server, text_input="x", structured_outputs={"regex": "foo**("}, max_tokens=5)
    assert "structured_outputs" in answer.message
    assert run(server, text_input="x", max_tokens=1).text != ""


@pytest.mark.parametrize("stream", [True, False])
def test_several_sequences_are_those_of_their_seeds(server: Server, stream: bool) -> None:
    request = {"text_input": "class A:\n", "max_tokens": 24, "temperature": 0.8, "stream": stream, "ignore_eos": True,
               "exclude_input_in_output": True}  # fmt: skip
    alone = [run(server, seed=seed, **request).text for seed in (7, 8, 9)]
    answer = run(server, seed=7, n=3, **request)
    assert answer.error is None
    assert all(len(response["text_output"]) == 3 for response in answer.responses)
    assert ["".join(r["text_output"][i] for r in answer.responses) for i in range(3)] == alone


def test_embeddings_of_tokens_say_what_the_tokens_say(server: Server) -> None:
    table = load_file(CHECKPOINT / "model.safetensors")["model.embed_tokens.weight"].float()
    token_ids = [5, 66, 777, 8, 99, 300] * 12
    request = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
               "return_num_input_tokens": True, "return_prompt_token_ids": True}  # fmt: skip
    expected = run(server, input_ids=token_ids, **request)
    for _ in range(2):  # the second time from the prefix cache
        answer = run(server, prompt_embeds=table[token_ids].tolist(), **request)
        assert answer.token_ids == expected.token_ids
        assert answer.responses[0]["num_input_tokens"] == [len(token_ids)]
        assert answer.responses[0]["prompt_token_ids"] == [0] * len(token_ids)
    for rows, message in (
        (table[[5, 6], 1:], "prompt_embeds has shape"),
        (table[[5, 6]] * float("nan"), "prompt_embeds holds values that are not finite"),
    ):
        assert message in run(server, prompt_embeds=rows.tolist(), **request).message
    assert "prompt_logprobs" in run(
        server, prompt_embeds=table[[5]].tolist(), sampling_parameters={"prompt_logprobs": 1}
    ).message  # fmt: skip


def test_penalties_and_bias_reach_the_engine(server: Server) -> None:
    request = {"text_input": "import os\n", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True,
               "return_token_ids": True}  # fmt: skip
    plain = run(server, **request).token_ids
    biased = run(server, sampling_parameters={"logit_bias": {str(plain[0]): -100}}, **request).token_ids
    assert biased[0] != plain[0]
    assert len(set(run(server, repetition_penalty=10.0, **request).token_ids)) > len(set(plain))
    assert set(run(server, allowed_token_ids=[plain[0], 77], **request).token_ids) <= {plain[0], 77}


def test_prompt_logprobs(server: Server) -> None:
    answer = run(server, input_ids=[50, 60, 70], max_tokens=1, prompt_logprobs=2, return_prompt_logprobs=True)
    assert answer.error is None
    entries = json.loads(answer.responses[0]["prompt_logprobs"][0])
    assert entries[0] is None
    assert all(str(token_id) in entry for token_id, entry in zip((60, 70), entries[1:], strict=True))


@pytest.fixture(scope="module")
def bounded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request runs, and one may wait. Its sampling parameters may be input tensors."""
    repository = tmp_path_factory.mktemp("repository")
    settings = {"max_num_seqs": 1, "max_queued_requests": 1, "scheduling_policy": "priority"}
    add_model(repository, "bounded", settings, 'parameters { key: "typed_inputs" value { string_value: "true" } }\n')
    with serve("--model-repository", str(repository), "--", "--log-verbose=1", step_seconds=0.01) as running:
        yield running


def test_sampling_parameters_as_input_tensors(bounded_server: Server) -> None:
    said: dict[str, Any] = {"model": "bounded", "text_input": "def f(", "max_tokens": 7, "temperature": 0.5,
                            "seed": 2**64 - 1, "ignore_eos": True}  # fmt: skip
    typed = run(bounded_server, typed=True, **said)
    assert typed.text == run(bounded_server, **said).text


LONG: dict[str, Any] = {"model": "bounded", "input_ids": [7, 8, 9], "max_tokens": 900, "ignore_eos": True}


def waiting(server: Server) -> float:
    return metric(server, "quire_requests_waiting", model="bounded", reason="queue")


def test_a_full_queue_is_unavailable_and_says_when_to_come_back(bounded_server: Server) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> Answer:
        live = [asyncio.create_task(ask(client, stream=True, **LONG)) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: waiting(bounded_server) == 1, "one waits")
        refused = await ask(client, model="bounded", text_input="x", max_tokens=1)
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)
        return refused

    refused = asyncio.run(with_client(bounded_server, work))
    assert "max_queued_requests" in refused.message
    wait_until(lambda: waiting(bounded_server) == 0, "the queue is empty")
    wait_until(
        lambda: metric(bounded_server, "quire_requests_total", model="bounded", outcome="rejected") >= 1,
        "it is counted",
    )
    assert run(bounded_server, model="bounded", text_input="x", max_tokens=1).text != ""


def test_a_cancelled_request_is_told_in_a_verbose_log(bounded_server: Server) -> None:
    """In vllm_backend's words, for whom its own tests look."""

    async def leave(client: grpc_aio.InferenceServerClient) -> None:
        live = asyncio.create_task(ask(client, stream=True, request_id="left", **LONG))
        await asyncio.to_thread(
            wait_until, lambda: metric(bounded_server, "quire_requests_running", model="bounded") == 1, "it runs"
        )
        live.cancel()
        await asyncio.gather(live, return_exceptions=True)

    asyncio.run(with_client(bounded_server, leave))
    for line in ("[vllm] Cancelling the request 'left'", "[vllm] Successfully cancelled the request 'left'"):
        wait_until(lambda line=line: line in bounded_server.log(), line)


def test_a_timeout_ends_a_request_wherever_it_is(bounded_server: Server) -> None:
    answer = run(bounded_server, timeout=300_000, **LONG)
    assert "deadline" in answer.message
    wait_until(
        lambda: metric(bounded_server, "quire_kv_blocks", model="bounded", state="used") == 0, "its blocks are free"
    )
    assert run(bounded_server, model="bounded", text_input="x", max_tokens=1, timeout=60_000_000).text != ""


def test_the_more_urgent_request_goes_first(bounded_server: Server) -> None:
    order: list[str] = []

    async def one(client: grpc_aio.InferenceServerClient, name: str, **request: Any) -> None:
        answer = await ask(client, model="bounded", stream=True, **request)
        order.append(name if answer.error is None else "refused")

    async def work(client: grpc_aio.InferenceServerClient) -> None:
        first = asyncio.create_task(one(client, "first", input_ids=[7], max_tokens=300, ignore_eos=True))
        await asyncio.to_thread(
            wait_until,
            lambda: metric(bounded_server, "quire_requests_running", model="bounded") == 1,
            "the first runs",
        )
        late = asyncio.create_task(
            one(client, "late", input_ids=[8], max_tokens=2, sampling_parameters={"priority": 5})
        )
        await asyncio.to_thread(wait_until, lambda: waiting(bounded_server) == 1, "one waits")
        urgent = asyncio.create_task(
            one(client, "urgent", input_ids=[9], max_tokens=2, sampling_parameters={"priority": -5})
        )
        await asyncio.gather(first, late, urgent)

    asyncio.run(with_client(bounded_server, work))
    assert "refused" in order, "the queue holds one, and the less urgent gives way"
    assert "urgent" in order
