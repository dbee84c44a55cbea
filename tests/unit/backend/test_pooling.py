"""Requests for vectors, with an engine that the test drives: batches, scores, vllm_backend's form, malformed input."""

import json
import re
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from quire_backend import pooling_batches
from quire_backend.model_config import POOLING_TYPED_INPUTS, complete
from quire_backend.pooling_batches import MAX_LIVE_PROMPTS, most_live_prompts, tensors_of_vectors
from quire_backend.request import LONG_PROMPT
from quire_engine.pooling import PoolingInfo
from quire_engine.stats import FinishedRequestStats
from support.serving import wait_until

EMBEDDER = PoolingInfo(tasks=("embed", "token_embed"), can_generate=False, embedding_size=4)
CLASSIFIER = PoolingInfo(
    tasks=("classify", "score"), can_generate=False, labels=("bad", "good"), activation="softmax", embedding_size=4
)
GENERATOR = PoolingInfo(tasks=())


def answer_with_lengths(engine: Any, request_id: str) -> None:
    """Each vector is the length of its prompt, and one."""
    request = next(one for one in engine.added if one.request_id == request_id)
    size = len(request.prompt_token_ids)
    engine.emit_vector(request_id, [float(size), 1.0], tokens=size)


def is_added(engine: Any, number: int) -> bool:
    return len(engine.added) >= number


def error_of(request: Any) -> tuple[str, str]:
    last = request.sender.wait()[-1]
    assert last.error is not None
    return last.error.code, last.error.message


def tensors_of(request: Any) -> dict[str, Any]:
    (response,) = request.sender.wait()
    assert response.error is None, response.error.message
    return response.tensors


@pytest.fixture
def submit(engine: Any, serve: Any, request_of: Any) -> Any:
    engine.on_add = answer_with_lengths
    started: list[Any] = []

    def submit(parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
        if not started:
            started.append(serve())
        request = request_of(parameters, **inputs)
        started[0].submit(request)
        return request

    return submit


@pytest.mark.parametrize("info", [EMBEDDER, PoolingInfo(embedding_size=4)])
def test_a_batch_is_one_response_in_the_order_of_its_prompts(engine: Any, submit: Any, info: PoolingInfo) -> None:
    engine.pooling_info = info
    asked = {} if info is EMBEDDER else {"task": "embed"}  # else the second one generates
    tensors = tensors_of(submit(asked, text_input=["a", "bbb", "cc"], return_num_input_tokens=True))
    assert tensors["embeddings"].tolist() == [[1, 1], [3, 1], [2, 1]]
    assert tensors["embeddings"].dtype == np.float32
    assert tensors["num_input_tokens"].tolist() == [1, 3, 2]
    assert tensors.keys() == {"embeddings", "num_input_tokens"}


@pytest.mark.parametrize("typed", [{"dimensions": 2}, {"normalize": False}])
def test_a_typed_input_of_its_own_asks_a_model_that_generates_for_vectors(
    engine: Any, submit: Any, typed: dict[str, Any]
) -> None:
    tensors = tensors_of(submit(text_input="abc", **typed))
    assert tensors["embeddings"].tolist() == [[3, 1]]
    params = engine.added[0].options.pooling_params
    assert {name: getattr(params, name) for name in typed} == typed
    assert "task" not in {spec.name for spec in POOLING_TYPED_INPUTS}, "tokenization has a parameter of that name"


def test_token_ids_of_several_prompts_are_parted_by_their_lengths(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    tensors = tensors_of(submit(input_ids=[1, 2, 3], input_lengths=[2, 1]))
    assert tensors["embeddings"].tolist() == [[2, 1], [1, 1]]
    assert [one.prompt_token_ids for one in engine.added] == [[1, 2], [3]]
    assert tensors_of(submit(input_ids=[1, 2, 3]))["embeddings"].tolist() == [[3, 1]]


def test_parameters_reach_the_engine_and_what_is_said_twice_must_agree(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    said = {"dimensions": 2, "priority": 3, "slo_class": "batch", "truncate_prompt_tokens": -1}
    request = submit({"normalize": False, "dimensions": 2}, text_input="a", pooling_parameters=said)
    tensors_of(request)
    options = engine.added[0].options
    params = options.pooling_params
    assert (params.task, params.dimensions, params.normalize, params.truncate_prompt_tokens) == ("embed", 2, False, -1)
    assert (options.slo.slo_class, options.operation, options.label) == ("batch", "embeddings", "label")
    assert engine.priorities == [3]
    code, message = error_of(submit({"dimensions": 3}, text_input="a", pooling_parameters=said))
    assert (code, "must agree" in message) == ("INVALID_ARG", True)


def test_the_requests_timeout_is_a_deadline_of_every_prompt(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info, engine.on_add = EMBEDDER, answer_with_lengths
    request = request_of(text_input=["a", "b"])
    request.timeout_us = 5_000_000
    serve().submit(request)
    tensors_of(request)
    assert [one.options.deadline_ms for one in engine.added] == [5000, 5000]


def test_vllm_backends_form_is_answered_as_text(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    asked = {"input": "hello", "pooling_params": {"dimensions": [2]}}
    tensors = tensors_of(submit(text_input=b"", embedding_request=asked, return_num_output_tokens=True))
    values = json.loads(tensors["text_output"][0])
    assert values == [5.0, 1.0]
    assert all(isinstance(value, float) for value in values)
    assert tensors["num_output_tokens"].tolist() == [0]
    assert engine.added[0].options.pooling_params.dimensions == 2
    several = tensors_of(submit(text_input=b"", embedding_request={"input": [[101, 7], [3]], "pooling_params": {}}))
    assert [json.loads(text) for text in several["text_output"]] == [[2.0, 1.0], [1.0, 1.0]]


def test_a_model_that_reads_pairs_scores_them(engine: Any, submit: Any) -> None:
    engine.pooling_info = CLASSIFIER
    engine.on_add = lambda fake, id_: fake.emit_vector(id_, [float(id_[1:])])
    tensors = tensors_of(submit({"task": "score"}, text_input="q", text_pair=["a", "bb"]))
    assert tensors["scores"].tolist() == [[1], [2]]
    assert [len(one.prompt_token_ids) for one in engine.added] == [2, 3]


def test_a_model_that_embeds_scores_by_similarity_and_embeds_each_text_once(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    engine.on_add = lambda fake, id_: fake.emit_vector(id_, {"r1": [1.0, 0.0], "r2": [0.0, 2.0]}.get(id_, [3.0, 0.0]))
    request = submit({"task": "score"}, text_input="q", text_pair=["a", "b", "q"], return_num_input_tokens=True)
    tensors = tensors_of(request)
    assert tensors["scores"].ravel().tolist() == pytest.approx([0.0, 1.0, 1.0])
    assert tensors["num_input_tokens"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("info", [EMBEDDER, PoolingInfo(embedding_size=4)])
def test_a_conversation_is_one_prompt(engine: Any, submit: Any, info: PoolingInfo) -> None:
    """Also a long one; beside a task, or parameters."""
    engine.pooling_info = info
    long = TALK.replace("Hello", "Hello" * (LONG_PROMPT // 5 + 1))
    for inputs in ({"pooling_parameters": "{}"}, {"pooling_parameters": json.dumps({"task": "embed"})}):
        assert tensors_of(submit(messages=TALK, **inputs))["embeddings"].tolist() == [[5, 1]]
    assert tensors_of(submit({"task": "embed"}, messages=long))["embeddings"][0, 0] > LONG_PROMPT


def test_classes_come_with_their_labels(engine: Any, submit: Any) -> None:
    engine.pooling_info = CLASSIFIER
    tensors = tensors_of(submit(text_input=["a", "bb"]))
    assert tensors["scores"].tolist() == [[1, 1], [2, 1]]
    assert tensors["labels"].tolist() == [b"bad", b"good"]


def test_rows_of_tokens_are_counted_by_prompt(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    engine.on_add = lambda fake, id_: fake.emit_vector(id_, *([[1.0, 2.0]] * (2 if id_ == "r1" else 3)))
    tensors = tensors_of(submit({"task": "token_embed"}, text_input=["a", "b"]))
    assert tensors["embeddings"].shape == (5, 2)
    assert tensors["num_rows"].tolist() == [2, 3]


def test_a_large_batch_is_no_flood_of_the_engine(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = EMBEDDER
    number = MAX_LIVE_PROMPTS + 50
    request = request_of(text_input=["a"] * number)
    serve().submit(request)
    wait_until(lambda: len(engine.sinks) == MAX_LIVE_PROMPTS, "the prompts")
    assert len(engine.added) == MAX_LIVE_PROMPTS
    engine.on_add = answer_with_lengths  # of those that follow
    for id_ in list(engine.sinks):
        answer_with_lengths(engine, id_)
    assert tensors_of(request)["embeddings"].shape == (number, 2)


def test_a_batch_never_fills_a_bounded_queue_alone(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = EMBEDDER
    sizes: list[int] = []
    engine.on_add = lambda fake, id_: sizes.append(len(fake.sinks))
    request, started = request_of(text_input=["a"] * 10), serve(max_queued_requests=3)
    started.submit(request)
    for number in range(10):
        wait_until(partial(is_added, engine, min(number + 3, 10)), "the prompts")
        started.call(answer_with_lengths, engine, f"r{number + 1}")  # in the loop's thread, as the engine does
    assert tensors_of(request)["embeddings"].shape == (10, 2)
    assert max(sizes) == 3
    assert most_live_prompts(0) == 1


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"text_input": ["a"] * 7}, "text_input"),
        ({"text_input": "a" * 7, "pooling_parameters": {"task": "token_embed"}}, "text_input"),
        ({"input_ids": [1] * 7, "input_lengths": [1] * 7}, "input_ids"),
        ({"embedding_request": {"input": "a"}}, "embedding_request"),
    ],
)
def test_vectors_that_could_not_be_sent_are_not_computed(
    engine: Any, serve: Any, request_of: Any, inputs: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_backend.pooling_batches.MAX_RESPONSE_BYTES", 100)
    engine.pooling_info = EMBEDDER
    request = request_of(**inputs)
    serve().submit(request)  # a vector has 16, and about 88 as JSON
    code, message = error_of(request)
    assert code == "INVALID_ARG"
    assert message.startswith(f"{name} asks for more than 100 bytes of numbers")
    assert not engine.added


def test_vectors_that_are_only_compared_may_be_larger_than_an_answer(
    engine: Any, serve: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_backend.pooling_batches.MAX_RESPONSE_BYTES", 100)
    engine.pooling_info = EMBEDDER
    engine.on_add = lambda fake, id_: fake.emit_vector(id_, [1.0, 0.0, 0.0, 0.0])
    request = request_of({"task": "score"}, text_input="q", text_pair=list("abcdefgh"))
    serve().submit(request)
    assert tensors_of(request)["scores"].tolist() == [[1.0]] * 8


def test_many_vectors_are_compared_beside_other_responses(
    engine: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.pooling_info = EMBEDDER
    threads: list[str] = []

    def note_thread(*args: Any, **settings: Any) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return tensors_of_vectors(*args, **settings)

    monkeypatch.setattr(pooling_batches, "tensors_of_vectors", note_thread)
    engine.on_add = lambda fake, id_: fake.emit_vector(id_, [1.0] * 4096)
    tensors_of(submit({"task": "score"}, text_input="q", text_pair=[str(i) for i in range(100)]))
    assert threads == ["quire-large"]


def test_one_prompt_that_fails_ends_the_request_and_the_others(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = EMBEDDER
    request = request_of(text_input=["a", "b", "c"])
    serve().submit(request)
    wait_until(lambda: len(engine.sinks) == 3, "the prompts")
    engine.emit("r2", finish_reason="error", error="the rank died")
    assert error_of(request) == ("INTERNAL", "the rank died")
    wait_until(lambda: not engine.sinks, "the prompts")


def test_a_client_that_leaves_ends_all_prompts(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = EMBEDDER
    request = request_of(text_input=["a", "b", "c"])
    serve().submit(request)
    wait_until(lambda: len(engine.sinks) == 3, "the prompts")
    request.sender.cancelled = True
    assert error_of(request)[0] == "CANCELLED"
    wait_until(lambda: not engine.sinks, "the prompts")
    assert engine.events.count("abort") >= 3


def test_unloading_ends_a_batch(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = EMBEDDER
    request, started = request_of(text_input=["a", "b"]), serve()
    started.submit(request)
    wait_until(lambda: len(engine.sinks) == 2, "the prompts")
    started.end_engine()
    assert error_of(request)[0] == "UNAVAILABLE"


def test_statistics_are_one_object_per_prompt(engine: Any, submit: Any) -> None:
    engine.pooling_info = EMBEDDER
    engine.on_add = lambda fake, id_: fake.emit_vector(
        id_, [1.0], metrics=FinishedRequestStats("stop", num_prompt_tokens=3, e2e_seconds=0.5)
    )
    tensors = tensors_of(submit(text_input=["a", "b"], return_perf_metrics=True))
    said = [json.loads(text) for text in tensors["perf_metrics"]]
    assert [one["e2e_seconds"] for one in said] == [0.5, 0.5]


def test_the_model_says_its_tasks(engine: Any, serve: Any, request_of: Any) -> None:
    engine.pooling_info = PoolingInfo(tasks=("embed",))
    request = request_of({"introspect": "chat_format"})
    serve().submit(request)
    (response,) = request.sender.wait()
    assert json.loads(response.text)["tasks"] == ["generate", "embed"]


TALK = json.dumps([{"role": "user", "content": "Hello"}])
MALFORMED: list[tuple[PoolingInfo, dict[str, Any], dict[str, Any], str]] = [
    (EMBEDDER, {}, {}, "there is no prompt; exactly one of text_input, input_ids and messages"),
    (EMBEDDER, {}, {"text_input": "a", "input_ids": [1]}, "text_input and input_ids are given; exactly one of"),
    (EMBEDDER, {}, {"text_input": ["a", ""]}, r"text_input\[1\] is empty"),
    (EMBEDDER, {}, {"text_input": b"\xff"}, "text_input is not valid UTF-8 at byte 0"),
    (EMBEDDER, {}, {"input_ids": [1, 2], "input_lengths": [3]}, "input_lengths adds up to 3"),
    (EMBEDDER, {}, {"input_ids": [1, 2], "input_lengths": [2, 0]}, "input_lengths adds up to 2"),
    (EMBEDDER, {}, {"input_ids": [1] * 16385, "input_lengths": [1] * 16385}, "input_lengths holds 16385 prompts"),
    (EMBEDDER, {}, {"text_input": "a", "input_lengths": [1]}, "input_lengths is given with text_input"),
    (EMBEDDER, {"task": "dance"}, {"text_input": "a"}, "task is 'dance'; it must be one of"),
    (EMBEDDER, {"task": "classify"}, {"text_input": "a"}, "task is 'classify'; this model offers embed, token_embed"),
    (EMBEDDER, {"task": "embed", "max_tokens": 5}, {"text_input": "a"}, "max_tokens has no meaning in a request for"),
    (EMBEDDER, {"dimensions": "two"}, {"text_input": "a"}, "dimensions is 'two'; it must be an integer"),
    (EMBEDDER, {"dimensions": 5}, {"text_input": "a"}, "dimensions is 5; embeddings of this model have 4"),
    (EMBEDDER, {"slo_ttft_ms": "soon"}, {"text_input": "a"}, "slo_ttft_ms is 'soon'"),
    (EMBEDDER, {"task": "score"}, {"text_input": "a"}, "text_pair is missing"),
    (EMBEDDER, {}, {"text_input": ["a", "b"], "text_pair": ["c", "d", "e"]}, "text_pair holds 3 texts for 2"),
    (EMBEDDER, {}, {"input_ids": [1], "text_pair": ["c"]}, "text_pair is given without text_input"),
    (EMBEDDER, {}, {"text_input": "a", "pooling_parameters": "{"}, "pooling_parameters is not JSON"),
    (EMBEDDER, {}, {"text_input": "a", "pooling_parameters": "[]"}, "pooling_parameters must be a JSON object"),
    (EMBEDDER, {}, {"embedding_request": {"inputs": "a"}}, "embedding_request holds 'inputs'"),
    (EMBEDDER, {}, {"embedding_request": {"input": [1, "a"]}}, "embedding_request: input must be a string"),
    (EMBEDDER, {}, {"embedding_request": {"input": ""}}, "embedding_request"),
    (EMBEDDER, {}, {"embedding_request": {"input": "a", "pooling_params": 3}}, "embedding_request: pooling_params"),
    (EMBEDDER, {}, {"text_input": "a", "sampling_parameters": "{}"}, "task is generate; this model offers embed"),
    (EMBEDDER, {"max_tokens": 3}, {"text_input": "a"}, "task is generate; this model offers embed"),
    (EMBEDDER, {}, {"messages": "[]"}, "task is generate; this model offers embed"),
    (EMBEDDER, {"task": "embed"}, {"messages": "{}"}, "messages must be a JSON list of messages"),
    (EMBEDDER, {"task": "embed"}, {"messages": "[]", "text_input": "a"}, "text_input and messages are given"),
    (EMBEDDER, {"task": "embed"}, {"messages": "[]", "input_lengths": [1]}, "input_lengths is given with messages"),
    (EMBEDDER, {"task": "embed"}, {"messages": TALK, "text_pair": ["a"]}, "text_pair is given without text_input"),
    (EMBEDDER, {"task": "embed"}, {"messages": TALK.replace("Hello", "")}, "messages is empty"),
    (EMBEDDER, {}, {"text_input": "a", "return_logprobs": True}, "task is generate; this model offers embed"),
    (PoolingInfo(), {"task": "embed"}, {"text_input": "a", "return_logprobs": True}, "return_logprobs has no meaning"),
    (
        PoolingInfo(),
        {"task": "generate"},
        {"text_input": "a"},
        "task is generate, which is what this model does without",
    ),
    (GENERATOR, {"task": "embed"}, {"text_input": "a"}, "task is 'embed'; this model offers generate"),
]


@pytest.mark.parametrize(("info", "parameters", "inputs", "message"), MALFORMED, ids=lambda value: str(value)[:48])
def test_malformed_requests_are_rejected_by_name(
    engine: Any, submit: Any, info: PoolingInfo, parameters: dict[str, Any], inputs: dict[str, Any], message: str
) -> None:
    engine.pooling_info = info
    request = submit(parameters, **inputs)
    code, said = error_of(request)
    assert code == "INVALID_ARG"
    assert re.match(message, said), said


def test_a_model_without_vectors_generates_as_before(engine: Any, submit: Any) -> None:
    engine.pooling_info = GENERATOR
    engine.on_add = lambda fake, id_: fake.emit(id_, "Hello", finish_reason="stop")
    assert tensors_of(submit(text_input="Hi"))["text_output"].tolist() == [b"HiHello"]


def test_the_configuration_has_what_the_model_can_do() -> None:
    class Config:
        def __init__(self) -> None:
            self.input: dict[str, Any] = {}
            self.output: dict[str, Any] = {}

        def as_dict(self) -> dict[str, Any]:
            return {}

        def add_input(self, one: dict[str, Any]) -> None:
            assert one["name"] not in self.input
            self.input[one["name"]] = one

        def add_output(self, one: dict[str, Any]) -> None:
            assert one["name"] not in self.output
            self.output[one["name"]] = one

        def set_max_batch_size(self, size: int) -> None: ...
        def set_model_transaction_policy(self, policy: dict[str, Any]) -> None: ...

    plain, embeds, classifies = Config(), Config(), Config()
    complete(plain, GENERATOR)
    complete(embeds, EMBEDDER)
    complete(classifies, CLASSIFIER)
    assert (plain.input["text_input"]["dims"], embeds.input["text_input"]["dims"]) == ([1], [-1])
    assert "embedding_request" not in plain.input
    assert embeds.input.keys() - plain.input.keys() == {
        "text_pair", "input_lengths", "embedding_request", "pooling_parameters",
    }  # fmt: skip
    assert embeds.output.keys() - plain.output.keys() == {"embeddings", "scores", "num_rows"}
    assert classifies.output.keys() - plain.output.keys() == {"scores", "labels"}
    assert embeds.output["embeddings"] == {"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, -1]}
    assert embeds.output["num_input_tokens"]["dims"] == [-1]
