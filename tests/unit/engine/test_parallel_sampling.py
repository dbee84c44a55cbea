"""n > 1: each sequence is what a request of its own would give, and the prompt is computed and held once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.errors import RequestError
from quire_engine.frontend.request_state import child_seed
from quire_engine.kv_cache import AttentionSpec, block_bytes
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.outputs import CompletionOutput, RequestOutput
from quire_engine.worker.submitted_step import SubmittedStep

PROMPT = [5 + i % 60 for i in range(70)]
N = 4


def params(seed: int, n: int = 1, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"n": n, "seed": seed, "temperature": 0.9, "max_tokens": 24, "ignore_eos": True, **settings}
    )


def make_llm(folder: Path, num_blocks: int = 512, **settings: Any) -> LLM:
    config = CheckpointConfig.from_folder(folder)
    specs = [AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size)] * config.num_layers
    per_block = block_bytes(specs, block_size=16, dtype_bytes=4)
    return LLM(folder, dtype="float32", max_model_len=256, kv_cache_memory_bytes=num_blocks * per_block, **settings)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """What seeds 7, 8, … give, each by itself and with nothing shared."""
    llm = make_llm(folder, enable_prefix_caching=False)
    outputs = [llm.generate([PROMPT], params(7 + i), use_tqdm=False)[0] for i in range(N)]
    return [output.outputs[0].token_ids for output in outputs]


def token_ids(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [completion.token_ids for completion in output.outputs]


def test_child_seeds_follow_the_parents_and_wrap() -> None:
    assert [child_seed(7, i) for i in range(3)] == [7, 8, 9]
    assert child_seed(2**64 - 1, 1) == 0
    assert child_seed(None, 3) is None


@pytest.mark.parametrize("budget", [8, 64, 512])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix-caching", "no-prefix-caching"])
def test_siblings_are_what_each_seed_gives_alone(
    budget: int, prefix_caching: bool, folder: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(folder, max_num_batched_tokens=budget, enable_prefix_caching=prefix_caching)
    for _ in range(2):  # the second time the prompt may be found in the cache
        output = llm.generate([PROMPT], params(7, N), use_tqdm=False)[0]
        assert token_ids(output) == alone
        assert output.finished
        assert {completion.finish_reason for completion in output.outputs} == {"length"}
    assert output.num_cached_tokens == (64 if prefix_caching else 0)
    assert llm.get_stats().num_blocks_used == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("threshold", [0, 20])
def test_siblings_are_the_same_when_some_give_way(
    policy: str, threshold: int, folder: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(
        folder, 12, scheduling_policy=policy, max_num_batched_tokens=64, long_prefill_token_threshold=threshold
    )
    others = [[9, 8, i, *range(2, 30)] for i in range(4)]
    priorities = [0, 1, 0, 1, 2] if policy == "priority" else None
    outputs = llm.generate(
        [*others, PROMPT], [*(params(100 + i) for i in range(4)), params(7, N)], use_tqdm=False, priority=priorities
    )
    assert token_ids(outputs[-1]) == alone
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.num_preemptions > 0, "nobody gave way, so this test shows nothing"


def test_one_seed_gives_the_same_with_and_without_siblings_in_the_batch(folder: Path, alone: list[list[int]]) -> None:
    outputs = make_llm(folder).generate([PROMPT] * 3, [params(7), params(7, N), params(8)], use_tqdm=False)
    assert [token_ids(output) for output in outputs] == [alone[:1], alone, alone[1:2]]


def test_sequences_share_the_blocks_of_a_long_prompt(folder: Path) -> None:
    def most_blocks(n: int, prefix_caching: bool) -> int:
        llm = make_llm(folder, enable_prefix_caching=prefix_caching)
        prompt = [2 + i % 500 for i in range(200)]
        return max(llm.get_stats().num_blocks_used for _ in llm.stream(prompt, params(1, n, max_tokens=8)))

    alone, eight, unshared = most_blocks(1, True), most_blocks(8, True), most_blocks(8, False)
    assert alone == 13
    assert unshared == 8 * alone
    assert eight == 12 + 8, "12 full blocks once, and the last of each"


def test_stream_tells_which_sequence_each_delta_belongs_to(folder: Path, alone: list[list[int]]) -> None:
    streamed: dict[int, list[int]] = {}
    deltas = list(make_llm(folder).stream(PROMPT, params(7, N)))
    for delta in deltas:
        (completion,) = delta.outputs
        streamed.setdefault(completion.index, []).extend(completion.token_ids)
    assert [streamed[i] for i in range(N)] == alone
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert len({delta.request_id for delta in deltas}) == 1


def test_each_sequence_stops_for_itself(folder: Path, alone: list[list[int]]) -> None:
    stop = alone[1][5]
    output = make_llm(folder).generate([PROMPT], params(7, N, stop_token_ids=[stop]), use_tqdm=False)[0]
    for tokens, whole in zip(token_ids(output), alone, strict=True):
        assert tokens == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_request_is_counted_once_in_the_statistics(folder: Path) -> None:
    output = make_llm(folder).generate([PROMPT], params(7, N), use_tqdm=False)[0]
    assert output.metrics is not None
    assert (output.metrics.num_prompt_tokens, output.metrics.num_output_tokens) == (len(PROMPT), 24 * N)
    assert output.metrics.num_sequences == N
    per_token = output.metrics.time_per_output_token_seconds
    assert per_token == pytest.approx(output.metrics.generation_seconds / 23)


def test_abort_ends_all_sequences(folder: Path) -> None:
    llm = make_llm(folder)
    stream = llm.stream(PROMPT, params(7, N, max_tokens=100))
    first = next(stream)
    assert llm.get_stats().num_running == N
    llm.abort(first.request_id)
    assert (llm.get_stats().num_running, llm.get_stats().num_blocks_used) == (0, 0)
    rest = list(stream)
    assert rest[-1].finished
    assert [delta.outputs[0].finish_reason for delta in rest[-N:]] == ["abort"] * N


def test_leaving_a_stream_early_frees_all_sequences(folder: Path) -> None:
    llm = make_llm(folder)
    stream = llm.stream(PROMPT, params(7, N, max_tokens=100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert (llm.get_stats().num_running, llm.get_stats().num_blocks_used) == (0, 0)
    assert llm._outputs._parents == {}


def test_sequence_that_fails_ends_its_request_and_nobody_elses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, alone: list[list[int]]
) -> None:
    llm = make_llm(folder)
    worker = llm._core.executor._worker
    submit = worker.submit_model

    def fails(scheduler_output: SchedulerOutput) -> SubmittedStep:
        if any(name.startswith("2_") for name in scheduler_output.num_scheduled_tokens):
            raise RuntimeError("a kernel failed")
        return submit(scheduler_output)

    monkeypatch.setattr(worker, "submit_model", fails)
    bad, good = llm.generate([PROMPT, PROMPT], [params(1, 3), params(7, 2)], use_tqdm=False)
    assert bad.error is not None
    assert "its log has the cause" in bad.error
    assert bad.finished
    assert token_ids(good) == alone[:2]
    assert llm.get_stats().num_blocks_used == 0
    assert llm._outputs._parents == {}


def test_error_of_one_sequence_aborts_its_siblings(folder: Path) -> None:
    llm = make_llm(folder)
    seen: list[RequestOutput] = []
    request = llm._inputs.process(PROMPT, params(1, 3), "r")
    children = [child.request_id for child in llm._outputs.add_request(request, seen.append)]
    error = EngineCoreOutput(children[1], finish_reason=FinishReason.ERROR, error="why")
    stats, to_abort = llm._outputs.process(EngineCoreOutputs([error]))
    assert sorted(to_abort) == [children[0], children[2]]
    assert (seen[-1].request_id, seen[-1].error, seen[-1].finished) == ("r", "why", True)
    assert [one.finish_reason for one in stats.finished_requests] == ["error"]
    assert not llm._outputs.has_requests()


@pytest.mark.parametrize(("n", "temperature"), [(0, 1.0), (129, 1.0)])
def test_what_cannot_be_is_refused_by_name(n: int, temperature: float) -> None:
    with pytest.raises(RequestError, match=r"^n is "):
        SamplingParams(n=n, temperature=temperature)


def test_merge_keeps_sequences_apart_and_in_order() -> None:
    def delta(index: int, text: str, finished: bool = False) -> RequestOutput:
        return RequestOutput("r", None, [1], [CompletionOutput(index, text, [len(text)])], finished)

    total = delta(2, "c")
    for later in (delta(0, "a"), delta(2, "cc"), delta(1, "b"), delta(0, "aa", True)):
        total.merge(later)
    assert [(item.index, item.text, item.token_ids) for item in total.outputs] == [
        (0, "aaa", [1, 2]), (1, "b", [1]), (2, "ccc", [1, 2]),
    ]  # fmt: skip
    assert total.finished


def test_merge_keeps_that_the_first_sequence_has_begun_where_another_came_before_it() -> None:
    total = RequestOutput("r", None, [1], [CompletionOutput(1, "b", [2])])
    total.merge(RequestOutput("r", None, [1], [CompletionOutput(0, "a", [1])], is_first=True))
    total.merge(RequestOutput("r", None, [1], [CompletionOutput(0, "c", [3])]))
    assert total.is_first


def test_greedy_sequences_are_equal(folder: Path) -> None:
    llm = make_llm(folder)
    (alone,) = token_ids(llm.generate([PROMPT], params(0, temperature=0.0), use_tqdm=False)[0])
    assert token_ids(llm.generate([PROMPT], params(0, 3, temperature=0.0), use_tqdm=False)[0]) == [alone] * 3
