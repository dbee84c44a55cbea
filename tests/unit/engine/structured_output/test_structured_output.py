"""Structured outputs through LLM: every text that came to its end follows its grammar, in whatever company."""

import json
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.errors import EngineUnavailableError
from quire_engine.messages import ErrorCode
from quire_engine.outputs import CompletionOutput
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.structured_output import manager as manager_module
from quire_engine.structured_output.compiler_messages import CompileRequest, CompileResult
from quire_engine.structured_output.xgrammar import XGrammar
from support.full import FULL
from support.processes import children
from support.scheduling import make_request
from support.schemas import random_schema

NUM_SCHEMAS = 200 if FULL else 80


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=512)
    yield llm
    llm.shutdown()


def params(structured_outputs: dict[str, Any] | None, **values: Any) -> SamplingParams:
    return SamplingParams.from_mapping(
        {"temperature": 0, "max_tokens": 100, "structured_outputs": structured_outputs, **values}
    )


def complete(llm: LLM, structured_outputs: dict[str, Any] | None, **values: Any) -> CompletionOutput:
    output = llm.generate("x = ", params(structured_outputs, **values), use_tqdm=False)[0]
    assert output.error is None
    return output.outputs[0]


def refusal(llm: LLM, structured_outputs: dict[str, Any], **values: Any) -> str:
    output = llm.generate("x = ", params(structured_outputs, **values), use_tqdm=False)[0]
    assert (output.outputs[0].finish_reason, output.error_parameter) == ("error", "structured_outputs")
    assert output.error is not None
    assert output.error.startswith("structured_outputs: ")
    assert llm.get_stats().num_blocks_used == 0
    return output.error


@pytest.mark.slow
def test_schemas_among_free_requests(llm: LLM) -> None:
    free = [
        SamplingParams(temperature=(i % 3) * 0.5, seed=i, max_tokens=10 + i % 30, ignore_eos=True)
        for i in range(NUM_SCHEMAS // 4)
    ]
    alone = llm.generate(["def f(x):"] * len(free), free, use_tqdm=False)
    schemas = [random_schema(i) for i in range(NUM_SCHEMAS)]
    structured = [
        params(
            {"json": schema, "disable_any_whitespace": i % 10 != 0},
            temperature=(0, 0.8, 1)[i % 3], seed=i, max_tokens=200,
        )
        for i, schema in enumerate(schemas)
    ]  # fmt: skip
    # One free request after every fourth structured one, so that all batches are mixed.
    prompts, all_params = [], []
    for i, one in enumerate(structured):
        prompts.append("config = ")
        all_params.append(one)
        if i % 4 == 3:
            prompts.append("def f(x):")
            all_params.append(free[i // 4])
    outputs = llm.generate(prompts, all_params, use_tqdm=False)
    assert [o.outputs for o in outputs if o.prompt == "def f(x):"] == [o.outputs for o in alone]

    cut = 0
    for schema, output in zip(schemas, (o for o in outputs if o.prompt == "config = "), strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "length":
            cut += 1  # a small model may go on with white space for ever, where it may
            continue
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), schema)
    assert cut <= NUM_SCHEMAS // 10
    assert llm.get_stats().num_blocks_used == 0


AWKWARD = 'new\nline "quoted" \\ \0 日本 \U0001f600'
KINDS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"regex": "[a-c]{3}-[0-9]+x"}, lambda text: re.fullmatch("[a-c]{3}-[0-9]+x", text)),
    ({"regex": "(a+)+b"}, lambda text: re.fullmatch("a+b", text)),
    ({"regex": "[日本]{3}"}, lambda text: re.fullmatch("[日本]{3}", text)),
    ({"choice": ["yes", "no", "yes and no"]}, lambda text: text in ("yes", "no", "yes and no")),
    ({"choice": [AWKWARD]}, lambda text: text == AWKWARD),
    ({"choice": ["<s>"]}, lambda text: text == "<s>"),  # as text, not as the special token
    ({"grammar": 'root ::= "a" root "b" | "c"'}, lambda text: re.fullmatch("(a*)c(b*)", text)),
    ({"grammar": 'start: "n" NUMBER\nNUMBER: /[0-9]{3}/'}, lambda text: re.fullmatch("n[0-9]{3}", text)),
    ({"json_object": True, "disable_any_whitespace": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"json": "true"}, lambda text: [json.loads(text)]),
    ({"json": {"type": "string", "maxLength": 3}}, lambda text: len(json.loads(text)) <= 3),
    (
        {"structural_tag": {
            "type": "structural_tag", "triggers": ["<f"],
            "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
        }},
        lambda text: all(re.match("<f>(true|false)</f>", text[m.start():]) for m in re.finditer("<f", text)),
    ),
    (
        {"structural_tag": {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 5}},
                       "end": "</f>"},
        }},
        lambda text: text == "<f>5</f>",
    ),
]  # fmt: skip


EVEN = 10_000.0
"""At this temperature all tokens that the grammar allows are as likely: where it ends does not depend on the model."""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("structured_outputs", "follows"), KINDS, ids=[str(kind)[:50] for kind, _ in KINDS])
def test_every_kind(
    llm: LLM, structured_outputs: dict[str, Any], follows: Callable[[str], object], temperature: float
) -> None:
    ended = 0
    temperatures = enumerate([temperature] * 4 + [EVEN] * 2)
    all_params = [
        params(structured_outputs, temperature=each, seed=seed, max_tokens=200) for seed, each in temperatures
    ]
    for output in llm.generate(["x = "] * len(all_params), all_params, use_tqdm=False):
        assert output.error is None
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            ended += 1
            assert follows(completion.text), completion.text
    endless = structured_outputs.keys() & {"json_object", "structural_tag"} or structured_outputs.get("json") == "true"
    assert ended or endless


def test_each_of_n_sequences_has_a_grammar_state_of_its_own(llm: LLM) -> None:
    def run(seed: int, n: int) -> list[str]:
        all_params = params({"regex": "[a-z]{3,12}[.]"}, temperature=EVEN, seed=seed, n=n)
        output = llm.generate("x = ", all_params, use_tqdm=False)[0]
        assert output.error is None
        return [completion.text for completion in output.outputs]

    manager = llm._core.structured_output
    texts = run(seed=3, n=6)
    num_jobs = manager._num_jobs
    assert texts == [run(seed=3 + i, n=1)[0] for i in range(6)]
    assert manager._num_jobs == num_jobs, "compiled once for all of them"
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{3,12}[.]", text) for text in texts)
    failed = llm.generate("x = ", params({"regex": "foo**"}, temperature=1, seed=0, n=3), use_tqdm=False)[0]
    assert (failed.finished, failed.error_parameter) == (True, "structured_outputs")


def test_a_recursive_schema(llm: LLM) -> None:
    node = {
        "type": "object", "required": ["v", "c"], "additionalProperties": False,
        "properties": {"v": {"type": "boolean"}, "c": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/n"}}},
    }  # fmt: skip
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    structured_outputs = {"json": schema, "disable_any_whitespace": True}
    temperatures = [1.0] * 8 + [EVEN] * 32
    all_params = [
        params(structured_outputs, temperature=temperature, seed=seed, max_tokens=200)
        for seed, temperature in enumerate(temperatures)
    ]
    texts = set()
    for output in llm.generate(["x = "] * len(all_params), all_params, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            texts.add(completion.text)
    assert any(text.count("{") > 1 for text in texts)


def test_bounded_strings_hold_no_raw_control_characters(llm: LLM) -> None:
    # The model is made to want a tab: all else is forbidden but by the grammar.
    schema = {
        "type": "array",
        "items": {"type": "string", "minLength": 6, "maxLength": 8},
        "minItems": 8,
        "maxItems": 8,
    }
    structured_outputs = {"json": schema, "disable_any_whitespace": True}
    all_params = [params(structured_outputs, temperature=50, seed=seed, max_tokens=400) for seed in range(10)]
    for output in llm.generate(["x = "] * len(all_params), all_params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


def test_where_it_ends(llm: LLM) -> None:
    assert complete(llm, {"regex": "[ab]{2}"}).finish_reason == "stop"
    # The grammar has the last word: when it must end, it ends.
    assert len(complete(llm, {"regex": "[ab]{2}"}, min_tokens=10).text) == 2
    assert len(complete(llm, {"regex": "[ab]{2}"}, ignore_eos=True).text) == 2
    # Where it may go on, min_tokens holds.
    assert len(complete(llm, {"regex": "[ab]{1,40}"}, min_tokens=15).token_ids) >= 15
    cut = complete(llm, {"regex": "[ab]{50}"}, max_tokens=5)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    stopped = complete(llm, {"regex": "aaaxbbb"}, stop=["x"])
    assert (stopped.finish_reason, stopped.stop_reason, stopped.text) == ("stop", "x", "aaa")
    token = complete(llm, {"regex": "[ab]{9}"}).token_ids[1]
    by_token = complete(llm, {"regex": "[ab]{9}"}, stop_token_ids=[token])
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", token)
    assert complete(llm, {"regex": "[ab]{3}"}, logprobs=2).cumulative_logprob is not None


@pytest.mark.slow
def test_preemption_and_slot_reuse_change_nothing(llm: LLM, checkpoint: Callable[[str], Path]) -> None:
    all_params = [
        params(
            None if i % 3 == 2 else {"json": random_schema(i), "disable_any_whitespace": True},
            temperature=i % 2, seed=i, max_tokens=100, ignore_eos=i % 3 == 2,
        )
        for i in range(12)
    ]  # fmt: skip
    prompts = [f"config_{i} = " for i in range(12)]
    expected = llm.generate(prompts, all_params, use_tqdm=False)
    for settings in ({"kv_cache_memory_bytes": 1_000_000}, {"max_num_seqs": 2}):
        small = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=160, **settings)
        outputs = small.generate(prompts, all_params, use_tqdm=False)
        stats = small.get_stats()
        small.shutdown()
        assert [o.outputs for o in outputs] == [o.outputs for o in expected]
        assert stats.num_blocks_used == 0
        if "max_num_seqs" not in settings:
            assert stats.num_preemptions > 3


def test_the_cache_is_bounded_and_used(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "MAX_CACHED_GRAMMARS", 4)
    manager = llm._core.structured_output
    for i in range(8):
        assert complete(llm, {"choice": [f"choice {i}"]}).text == f"choice {i}"
    assert len(manager._cache) == 4
    assert manager._cached_bytes == sum(manager_module._size(*item) for item in manager._cache.items())
    before = manager._num_jobs
    assert complete(llm, {"choice": ["choice 7"]}).text == "choice 7"
    assert manager._num_jobs == before
    assert complete(llm, {"choice": ["choice 0"]}).text == "choice 0"  # evicted: compiled again
    outputs = llm.generate(["a"] * 5, params({"choice": ["once for all"]}), use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} == {"once for all"}
    assert manager._num_jobs == before + 2
    monkeypatch.setattr(manager_module, "MAX_CACHED_BYTES", 1)
    assert complete(llm, {"choice": ["too large to keep"]}).text == "too large to keep"
    assert (len(manager._cache), manager._cached_bytes) == (0, 0)
    assert not manager._jobs
    assert not manager._job_of


@pytest.mark.parametrize(
    ("structured_outputs", "message"),
    [
        ({"regex": "foo**"}, "position 5"),
        ({"regex": "a("}, "parenthesis"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"grammar": "root ::= nothing"}, "not defined"),
        ({"grammar": 'root ::= "ab" dead\ndead ::= dead "x"'}, "no text can satisfy"),
        ({"grammar": "start: ("}, "."),
        ({"json": {"type": "nonsense"}}, "nonsense"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"$ref": "http://example.org/schema"}}, "URI"),
        ({"json": {"anyOf": [{"$ref": "#"}]}}, "no text can satisfy"),
        ({"json": {"type": "string", "pattern": "foo**"}}, "repetition"),
        ({"json": {"type": "string", "pattern": "a", "maxLength": 5}}, "beside a 'pattern'"),
        ({"json": {"type": "number", "multipleOf": 0.5}}, "multipleOf"),
        ({"json": "false"}, "cannot accept any value"),
        ({"structural_tag": {"type": "nonsense"}}, "."),
        ({"structural_tag": {"structures": 5}}, "."),
        (
            {"structural_tag": {"format": {"type": "json_schema", "style": "qwen_xml", "json_schema": {}}}},
            "a schema with 'style', which cannot be enforced",
        ),
    ],
    ids=str,
)
def test_what_does_not_compile_says_why(llm: LLM, structured_outputs: dict[str, Any], message: str) -> None:
    first = refusal(llm, structured_outputs)
    assert re.search(message, first)
    assert "/project/" not in first
    assert refusal(llm, structured_outputs) == first


def test_a_grammar_that_gets_slow_ends_alone(llm: LLM) -> None:
    """Ever more ways to read `aaaa…`: compiles at once, but each token takes longer than the one before."""
    slow = params({"regex": "(((a+)+)+)+"}, max_tokens=450, min_tokens=450)
    free = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = llm.generate("import os", free, use_tqdm=False)[0].outputs
    outputs = llm.generate(["x = a", "import os"], [slow, free], use_tqdm=False)
    assert outputs[1].outputs == expected
    assert (outputs[0].outputs[0].finish_reason, outputs[0].error_parameter) == ("error", "structured_outputs")
    assert "too ambiguous" in (outputs[0].error or "")


def test_one_slow_request_speaks_for_all_with_its_grammar(llm: LLM) -> None:
    slow = params({"regex": "(((a+)+)+)+a"}, max_tokens=450, min_tokens=450)
    outputs = llm.generate(["x = a"] * 12, slow, use_tqdm=False)
    errors = [output.error or "" for output in outputs]
    assert all("too ambiguous" in error for error in errors)
    assert len({error for error in errors if "tokens, finding out" in error}) <= 1, "one was measured"
    before = llm._core.structured_output._num_jobs
    assert "too ambiguous" in refusal(llm, {"regex": "(((a+)+)+)+a"})
    assert llm._core.structured_output._num_jobs == before
    cache = llm._core.structured_output._cache
    cache[next(key for key in cache if key[1] == "(((a+)+)+)+a")].expires_at = 0.0
    assert complete(llm, {"regex": "(((a+)+)+)+a"}, max_tokens=5).finish_reason in ("stop", "length")


class SlowGrammar:
    """Says that it takes 30 ms for each row."""

    last_fill_seconds = 0.0

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        return True

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        bitmask[row] = 1
        self.last_fill_seconds = 0.03

    def is_terminated(self) -> bool:
        return False


def test_slow_rows_of_one_step_are_bounded(llm: LLM) -> None:
    manager = llm._core.structured_output
    requests = [make_request([1], params=params({"regex": "a"})) for _ in range(12)]
    for request in requests:
        request.grammar = SlowGrammar()
    assert manager.grammar_bitmask(requests)[2] == []  # nobody knows yet
    bitmask, _, failed = manager.grammar_bitmask(requests)
    assert bitmask is not None
    assert [request for request, _ in failed] == requests[4:]
    assert {error.parameter for _, error in failed} == {"structured_outputs"}


def test_a_grammar_that_fails_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate("import os", free, use_tqdm=False)[0].outputs
    complete(llm, {"regex": "warm"})

    def fail(*_: object) -> None:
        raise RuntimeError("deliberate")

    for target in ("accept_tokens", "fill_bitmask"):
        with monkeypatch.context() as patch:
            patch.setattr(XGrammar, target, fail)
            outputs = llm.generate(["x = ", "import os"], [params({"regex": f"{target}"}), free], use_tqdm=False)
        assert outputs[0].error == "the grammar failed; the server's log says why"
        assert "deliberate" in caplog.text
        caplog.clear()
        assert outputs[0].error_parameter is None
        assert outputs[1].outputs == expected
    assert complete(llm, {"regex": "well"}).text == "well"


def test_a_time_out_is_remembered_for_a_while(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = llm._core.structured_output
    before = manager._num_jobs

    def time_out(request: CompileRequest) -> None:
        manager._compiler._on_result(CompileResult(request.job_id, error="it takes too long", cacheable=False))

    monkeypatch.setattr(manager._compiler, "submit", time_out)
    slow = {"regex": "as if it were slow"}
    assert refusal(llm, slow) == refusal(llm, slow)
    assert manager._num_jobs == before + 1
    manager._cache[next(key for key in manager._cache if key[1] == slow["regex"])].expires_at = 0.0
    refusal(llm, slow)
    assert manager._num_jobs == before + 2


def test_the_backlog_is_bounded_and_without_those_who_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = llm._core.structured_output
    cancelled: list[int] = []
    monkeypatch.setattr(manager_module, "MAX_PENDING_JOBS", 2)
    monkeypatch.setattr(manager._compiler, "submit", lambda request: None)
    monkeypatch.setattr(manager._compiler, "cancel", cancelled.append)
    requests = [make_request([1], params=params({"regex": f"backlog {i}"})) for i in range(3)]
    manager.init_grammar(requests[0])
    manager.init_grammar(requests[1])
    with pytest.raises(EngineUnavailableError, match="2 other grammars"):
        manager.init_grammar(requests[2])
    first = manager._num_jobs - 1
    requests[0].status = RequestStatus.FINISHED
    manager.init_grammar(requests[2])
    assert cancelled == [first]
    manager._compiler._on_result(CompileResult(first, error="too late"))
    assert manager.take_finished(lambda message_number: None) == []
    for request in requests:
        request.status = RequestStatus.FINISHED
    manager.drop_abandoned()
    assert (manager._jobs, manager._job_of) == ({}, {})


def test_a_full_backlog_refuses_what_is_known_as_slow_rather_than_newcomers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = llm._core.structured_output
    monkeypatch.setattr(manager_module, "MAX_PENDING_JOBS", 3)
    slow_jobs: list[int] = []
    monkeypatch.setattr(manager._compiler, "submit", lambda request: None)
    monkeypatch.setattr(manager._compiler, "slow_jobs", lambda: slow_jobs)
    requests = [make_request([1], params=params({"regex": f"slow backlog {i}"})) for i in range(5)]
    for request in requests[:3]:
        manager.init_grammar(request)
    first = manager._num_jobs - 2
    requests[1].is_replay = True
    slow_jobs += [first + 1, first]
    manager.init_grammar(requests[3])
    ((refused, error),) = manager.take_finished(lambda message_number: None)
    assert refused is requests[0], "the slowest, of which no replay waits"
    assert error is not None
    assert error.is_unavailable
    (output,) = llm._core.scheduler.reject(_live(llm, refused), error)
    assert output.error_code is ErrorCode.UNAVAILABLE
    with pytest.raises(EngineUnavailableError, match="3 other grammars"):
        manager.init_grammar(requests[4])
    for request in requests:
        request.status = RequestStatus.FINISHED
    manager.drop_abandoned()


def _live(llm: LLM, request: Request) -> Request:
    llm._core.scheduler.add_request(request)
    return request


def test_who_waits_for_a_grammar_may_have_many_descriptors_open(checkpoint: Callable[[str], Path]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard) if hard > 0 else 2048, hard))
    held: list[int] = []
    try:
        while not held or held[-1] < 1024:  # beyond what select() takes
            held.append(os.open(os.devnull, os.O_RDONLY))
        llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=256)
        assert complete(llm, {"choice": ["one", "two"]}).text in ("one", "two")
        llm.shutdown()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_unstructured_requests_start_nothing(checkpoint: Callable[[str], Path]) -> None:
    before = children(os.getpid())
    llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=256)
    llm.generate("a", use_tqdm=False)
    assert set(children(os.getpid())) <= set(before)
    llm.shutdown()
