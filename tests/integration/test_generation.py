"""What clients get from the real server, against the same model offline."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from support.clients import Answer, ask_all, final_flags, http, infer_inputs, run, sse
from support.serving import ROOT, Server
from tritonclient.grpc import InferRequestedOutput
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

PROMPT = "def fibonacci(n):"
PROMPTS = [f"def function_{i}(a, b):\n    return a + {i}\n\nclass Name{i}" for i in range(32)]
GENERATE = "/v2/models/tinypy/generate"
RETURN_ALL = dict.fromkeys(
    ["return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
     "return_num_output_tokens", "return_token_ids", "return_perf_metrics"], True,
)  # fmt: skip


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    """The demo model in this process, with the settings that it is served with."""
    version = ROOT / "model_repository" / "tinypy" / "1"
    settings: dict[str, Any] = json.loads((version / "model.json").read_text())
    settings["model"] = str(version / settings["model"])
    # The profiling run's share of memory is the server's already.
    llm = LLM(**settings, kv_cache_memory_bytes=64 * 2**20)
    yield llm
    llm.shutdown()


def test_serves_the_demo_model(server: Server) -> None:
    assert http(server, "/v2/models/tinypy/ready")[0] == 200
    status, answer = http(server, GENERATE, {"text_input": "def add(a, b):"})
    assert status == 200
    assert answer["text_output"]
    assert server.dashboard == "", "it has none"


def offline_texts(llm: LLM, prompts: list[str], **params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(**params), use_tqdm=False)]


def test_deltas_of_32_streams_are_the_offline_texts(server: Server, offline: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 48}
    answers = ask_all(server, [{"text_input": prompt, "stream": True, **params} for prompt in PROMPTS])
    assert [answer.text for answer in answers] == offline_texts(offline, PROMPTS, **params)
    assert all(len(answer.responses) > 1 for answer in answers)


def test_seeded_sampling_is_the_same_alone_in_a_crowd_and_offline(server: Server, offline: LLM) -> None:
    params = {"temperature": 1.0, "seed": 2**63 + 5, "max_tokens": 32, "ignore_eos": True}
    request = {"text_input": PROMPT, "return_token_ids": True, **params}
    (expected,) = offline.generate(PROMPT, SamplingParams(**params), use_tqdm=False)
    assert run(server, **request).token_ids == expected.outputs[0].token_ids
    crowd = [{"text_input": prompt, "stream": True, "max_tokens": 40} for prompt in PROMPTS[:31]]
    assert ask_all(server, [*crowd, request])[-1].token_ids == expected.outputs[0].token_ids


# -- a client of vllm_backend -----------------------------------------------------------------------------------------


async def vllm_client(url: str, prompts: list[str], stream: bool) -> dict[str, list[str]]:
    """All prompts on one gRPC stream, as vllm_backend's sample client sends them."""
    params = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}
    texts: dict[str, list[str]] = {str(i): [] for i in range(len(prompts))}

    async def requests() -> Any:
        for i, prompt in enumerate(prompts):
            yield {
                "model_name": "tinypy",
                "inputs": infer_inputs(text_input=prompt, stream=stream, sampling_parameters=json.dumps(params)),
                "outputs": [InferRequestedOutput("text_output")],
                "request_id": str(i),
                "parameters": params,
            }

    async with grpc_aio.InferenceServerClient(url) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            texts[result.get_response().id] += [item.decode() for item in result.as_numpy("text_output")]
    return texts


@pytest.mark.parametrize("stream", [True, False])
def test_client_of_vllm_backend_runs_unchanged(server: Server, stream: bool) -> None:
    prompts = ["def add(a, b):", "import os", "class Node:"]
    texts = asyncio.run(asyncio.wait_for(vllm_client(server.grpc, prompts, stream), 60))
    for i, prompt in enumerate(prompts):
        pieces = texts[str(i)]
        assert "".join(pieces).startswith(prompt) is not stream
        assert (len(pieces) > 1) is stream


# -- HTTP -------------------------------------------------------------------------------------------------------------


def test_generate(server: Server, offline: LLM) -> None:
    (expected,) = offline_texts(offline, [PROMPT], temperature=0.0, max_tokens=8)
    body = {"text_input": PROMPT, "max_tokens": 8, "parameters": {"temperature": 0}}
    status, answer = http(server, GENERATE, body)
    assert (status, answer["text_output"]) == (200, PROMPT + expected)
    _, answer = http(server, GENERATE, {**body, "exclude_input_in_output": True})
    assert answer["text_output"] == expected


@pytest.mark.parametrize("place", ["the top", "parameters"])
@pytest.mark.parametrize("kind", [str, float])
def test_generate_takes_numbers_and_numbers_as_strings(server: Server, place: str, kind: Any) -> None:
    """Clients of vllm_backend send strings: its server did not take fractions as parameters for a long time."""
    said: dict[str, Any] = {"temperature": kind(0.5), "top_p": kind(0.9), "max_tokens": kind(8), "seed": kind(3)}
    said |= {"ignore_eos": "true" if kind is str else True}
    if kind is str:
        said |= {"max_tokens": "8", "seed": "3"}
    body = {"text_input": PROMPT, **(said if place == "the top" else {"parameters": said})}
    status, answer = http(server, GENERATE, {**body, "id": "mine", "stop_words": "", "bad_words": ""})
    assert status == 200, answer
    assert answer["id"] == "mine"
    assert answer["text_output"] == run(server, text_input=PROMPT, parameters=said).text


def test_generate_takes_lists(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 32, "temperature": 0, "exclude_input_in_output": True}
    _, whole = http(server, GENERATE, body)
    word = whole["text_output"][5:8]
    _, answer = http(server, GENERATE, {**body, "stop_words": [word, "never"]})
    assert whole["text_output"].startswith(answer["text_output"])
    assert word not in answer["text_output"]


def test_generate_stream(server: Server, offline: LLM) -> None:
    (expected,) = offline_texts(offline, [PROMPT], temperature=0.0, max_tokens=24)
    body = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True, "return_finish_reason": True}
    events = sse(server, body)
    assert "".join(event["text_output"] for event in events) == expected
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]


def test_token_ids_instead_of_text(server: Server, offline: LLM) -> None:
    (expected,) = offline.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    body = {"input_ids": expected.prompt_token_ids, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    _, answer = http(server, GENERATE, body)
    assert answer["text_output"] == expected.outputs[0].text
    assert answer["token_ids"] == expected.outputs[0].token_ids


def test_error_over_http(server: Server) -> None:
    status, answer = http(server, GENERATE, {"text_input": PROMPT, "top_p": 2})
    assert status == 400
    assert answer["error"].startswith("top_p is 2")


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_all_additional_outputs_of_a_stream(server: Server, offline: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 20, "logprobs": 2}
    (expected,) = offline.generate(PROMPT, SamplingParams(**params), use_tqdm=False)
    answer = run(server, text_input=PROMPT, stream=True, **params, **RETURN_ALL)
    wanted = {"text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens",
              "num_output_tokens", "token_ids", "perf_metrics"}  # fmt: skip
    assert answer.error is None
    assert len(answer.responses) > 1
    assert all(response.keys() == wanted for response in answer.responses)
    assert answer.token_ids == expected.outputs[0].token_ids
    assert [r["finish_reason"] for r in answer.responses] == [["None"]] * (len(answer.responses) - 1) + [["length"]]
    assert {tuple(r["num_input_tokens"]) for r in answer.responses} == {(len(expected.prompt_token_ids),)}
    assert [r["num_output_tokens"] for r in answer.responses] == [[len(r["token_ids"])] for r in answer.responses]
    positions = [position for r in answer.responses for position in json.loads(r["logprobs"][0])]
    assert expected.outputs[0].logprobs is not None
    assert [{int(token_id) for token_id in position} for position in positions] == [
        set(position) for position in expected.outputs[0].logprobs
    ]
    for token_id, position in zip(answer.token_ids, positions, strict=True):
        assert position[str(token_id)]["rank"] == 1
    total = sum(position[str(token_id)]["logprob"] for token_id, position in zip(answer.token_ids, positions))  # noqa: B905
    assert answer.responses[-1]["cumulative_logprob"][0] == pytest.approx(total, rel=1e-4)
    check_perf_metrics(answer, len(expected.prompt_token_ids))


def check_perf_metrics(answer: Answer, num_prompt_tokens: int) -> None:
    assert {r["perf_metrics"][0] for r in answer.responses[:-1]} <= {"null"}
    metrics = json.loads(answer.responses[-1]["perf_metrics"][0])
    assert metrics["num_prompt_tokens"] == num_prompt_tokens
    assert metrics["num_output_tokens"] == 20
    assert 0 < metrics["time_to_first_token_seconds"] < metrics["e2e_seconds"]
    assert metrics["decode_seconds"] > 0
    assert metrics["num_preemptions"] == 0


def test_cumulative_logprob_needs_no_logprobs(server: Server) -> None:
    answer = run(server, text_input=PROMPT, max_tokens=3, return_cumulative_logprob=True, return_logprobs=True)
    (response,) = answer.responses
    assert response["cumulative_logprob"][0] < 0
    assert response["logprobs"] == ["null"]


def test_only_requested_outputs_are_sent(server: Server) -> None:
    answer = run(server, text_input=PROMPT, max_tokens=3, outputs=["text_output"], **RETURN_ALL)
    assert [response.keys() for response in answer.responses] == [{"text_output"}]


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        {"max_tokens": 5},
        {"parameters": {"max_tokens": 5}},
        {"parameters": {"max_tokens": "5"}},
        {"sampling_parameters": {"max_tokens": 5}},
        {"sampling_parameters": {"max_tokens": "5"}, "parameters": {"max_tokens": 5}, "max_tokens": 5},
        {"temperature": 0.1, "parameters": {"temperature": 0.1, "max_tokens": 5}},
        {"max_tokens": 5, "top_k": 10**6, "top_p": 0.9, "min_p": 0.01, "seed": 7, "min_tokens": 5},
    ],
)
def test_where_a_parameter_may_be_said(server: Server, said: dict[str, Any]) -> None:
    answer = run(server, text_input=PROMPT, ignore_eos=True, return_num_output_tokens=True, **said)
    assert [response["num_output_tokens"] for response in answer.responses] == [[5]]


def test_stop_words(server: Server, offline: LLM) -> None:
    (text,) = offline_texts(offline, [PROMPT], temperature=0.0, max_tokens=32)
    stop = text[10:13]
    expected = text[: text.index(stop)]
    request = {"text_input": PROMPT, "temperature": 0.0, "max_tokens": 32, "return_finish_reason": True}
    answer = run(server, stop_words=["never seen", stop], stream=True, **request)
    assert answer.text == expected
    assert answer.responses[-1]["finish_reason"] == ["stop"]
    answer = run(server, parameters={"stop": stop}, exclude_input_in_output=True, **request)
    assert answer.text == expected


def test_same_request_id_twice_at_once(server: Server) -> None:
    request = {"request_id": "twin", "text_input": PROMPT, "temperature": 0.0, "max_tokens": 30, "stream": True}
    first, second = ask_all(server, [request, request])
    assert first.text == second.text != ""


@pytest.mark.parametrize("stream", [True, False])
def test_last_response_carries_the_final_flag(server: Server, stream: bool) -> None:
    """A client that would also take an empty final response gets none."""
    *earlier, last = final_flags(server, text_input=PROMPT, max_tokens=20, stream=stream)
    assert set(earlier) == ({(False, True)} if stream else set())
    assert last == (True, True)


def test_nul_is_text(server: Server) -> None:
    answer = run(server, text_input="a\0b", max_tokens=1)
    assert answer.text.startswith("a\0b")
