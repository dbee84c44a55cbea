"""However the model is cut among ranks and stages, it says token for token what transformers says."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import EngineDeadError
from quire_engine.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, Sleep
from quire_engine.outputs import RequestOutput
from quire_engine.sampling import SamplingMetadata
from support.oracle import Expected, assert_exact
from support.ranks import ThreadExecutor, llm_of_thread_ranks

Workload = tuple[list[list[int]], list[int], list[Expected]]

LAYOUTS = [
    ("tied-gqa", 2, 1),
    ("tied-gqa", 4, 1),
    ("untied-mha", 4, 1),
    ("tied-gqa", 1, 2),
    ("untied-mha", 1, 2),
    ("odd-sizes", 1, 3),
    ("tied-gqa", 2, 2),
    ("biased-mqa", 2, 2),
    ("olmo2", 4, 1),
    ("phi3", 2, 2),
    ("qwen2-windows", 2, 2),
    ("qwen3-windows", 1, 3),
    ("gemma3", 2, 2),
    ("gemma4-moe", 2, 2),
    ("gemma4-conditional", 2, 2),
    ("gemma3n", 1, 3),  # a stage in the middle, too
]
"""Checkpoint, tensor parallel size, pipeline parallel size; of 64 requests on two ranks alone, as four take long for a
step. Two ranks, and two stages, of each family are in `test_every_family.py`."""
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 128}


@contextmanager
def make_llm(folder: Path, tensor: int, pipeline: int, **settings: Any) -> Iterator[LLM]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with llm_of_thread_ranks(folder, **sizes, **{**SETTINGS, **settings}) as llm:
        yield llm


def executor_of(llm: LLM) -> ThreadExecutor:
    executor = llm._core.executor
    assert isinstance(executor, ThreadExecutor)
    return executor


def check_same_tokens_on_all_ranks(llm: LLM) -> None:
    """What a slot was last used for is still in it; the last token is not told any more."""
    batches = [worker.runner.batch for worker in executor_of(llm).workers]
    for batch in batches[1:]:
        assert batch.slots == batches[0].slots
        num_tokens = min(int(batch.num_tokens.max()), int(batches[0].num_tokens.max())) - 1
        assert num_tokens > 1
        for slot in range(len(batch.num_tokens)):
            known = max(0, min(int(batch.num_tokens[slot]), int(batches[0].num_tokens[slot])) - 1)
            assert (batch.token_ids[slot, :known] == batches[0].token_ids[slot, :known]).all()


@pytest.mark.parametrize(("name", "tensor", "pipeline"), LAYOUTS)
def test_many_requests_are_token_exact(
    name: str, tensor: int, pipeline: int, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts, lengths, expected = (part[: 64 if (tensor, pipeline) == (2, 1) else 24] for part in workload(name))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    with make_llm(checkpoint(name), tensor, pipeline, kv_cache_memory_bytes=2**23) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.get_stats()
        assert executor_of(llm).max_in_flight == pipeline
        check_same_tokens_on_all_ranks(llm)
    assert_exact(outputs, expected)
    assert (stats.num_blocks_used, stats.num_failed_steps) == (0, 0)


def test_int8_with_biases_on_two_ranks_is_as_near_to_float32_as_on_one(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    """Not the same: each rank has a scale of its own for the part of a row that it has, of weights and activations."""
    prompts = workload("biased-mqa")[0][:24]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = []
    for tensor, quantization in ((1, None), (1, "int8"), (2, "int8")):
        with make_llm(checkpoint("biased-mqa"), tensor, 1, quantization=quantization) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append(torch.tensor([one for output in outputs for one in scores(output.prompt_logprobs)]))
    float32, one_rank, two_ranks = results
    error = (one_rank - float32).abs().mean()
    assert 0.01 < error < 0.1, "int8 was not used, or this test shows nothing"
    # A bias that is added on both ranks, or on none, makes it 5 times as much.
    assert (two_ranks - float32).abs().mean() < 1.5 * error
    assert (two_ranks - one_rank).abs().mean() < 1.5 * error


def test_token_exact_when_blocks_are_scarce(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts, lengths, expected = workload("tied-gqa")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    bytes_of_a_block = 2 * 1 * 2 * 16 * 16 * 4  # key and value of one layer, two heads of 16, 16 tokens, float32
    with make_llm(checkpoint("tied-gqa"), 1, 2, kv_cache_memory_bytes=24 * bytes_of_a_block) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.get_stats()
    assert [output.outputs[0].token_ids for output in outputs] == [want.token_ids for want in expected]
    assert stats.num_preemptions > 0, "nothing was preempted, so this test shows nothing"
    assert (stats.num_blocks_used, stats.num_failed_steps) == (0, 0)


MIXED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2**64 - 1, max_tokens=20, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, frequency_penalty=0.7, min_tokens=12, prompt_logprobs=0),
    SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "(ab|cd)*x"}),
    SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=20, logit_bias={5: 4.0}, bad_words=["a"]),
    SamplingParams(temperature=0.9, min_p=0.02, seed=4, max_tokens=1, allowed_token_ids=[7, 8, 9, 400, 514]),
]


def generate_mixed(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, [MIXED[i % len(MIXED)] for i in range(len(prompts))], use_tqdm=False)


def scores(entries: Any) -> list[float]:
    return [item.logprob for entry in entries or [] if entry for item in entry.values()]


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_every_kind_of_request_gets_what_one_rank_gives(
    tensor: int, pipeline: int, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts = workload("untied-mha")[0][:18]
    results = []
    for sizes in ((1, 1), (tensor, pipeline)):
        with make_llm(checkpoint("untied-mha"), *sizes, max_num_batched_tokens=48) as llm:
            results.append(generate_mixed(llm, prompts))
    for want, got in zip(*results, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason
        assert scores(got.outputs[0].logprobs) == pytest.approx(scores(want.outputs[0].logprobs), abs=1e-4)
        assert scores(got.prompt_logprobs) == pytest.approx(scores(want.prompt_logprobs), abs=1e-4)
    assert scores(results[1][0].prompt_logprobs), "nothing was asked for, so this test shows nothing"


@pytest.mark.parametrize("level", [1, 2])
def test_all_ranks_sleep_and_wake_up(
    level: int, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts, lengths, expected = workload("tied-gqa")
    params = SamplingParams(temperature=0, max_tokens=lengths[0], ignore_eos=True)
    with make_llm(checkpoint("tied-gqa"), 2, 2) as llm:
        for _ in range(2):
            (output,) = llm.generate(prompts[:1], params, use_tqdm=False)
            assert output.outputs[0].token_ids == expected[0].token_ids
            llm.sleep(level)
            assert [worker.runner.kv_caches for worker in executor_of(llm).workers] == [[]] * 4
            llm.wake_up()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_faulty_request_ends_alone_whatever_is_in_flight(
    tensor: int, pipeline: int, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts, lengths, expected = workload("tied-gqa")
    prompts, lengths, expected = prompts[:12], lengths[:12], expected[:12]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    params[5] = SamplingParams(temperature=0.123, seed=1, max_tokens=lengths[5], ignore_eos=True)
    with make_llm(checkpoint("tied-gqa"), tensor, pipeline) as llm:
        runner = next(worker.runner for worker in executor_of(llm).workers if worker.parallel.is_output_rank)
        sampler = runner.sampler

        def failing(logits: torch.Tensor, metadata: SamplingMetadata) -> Any:
            poisoned = (metadata.temperature > 0) & (metadata.positions == len(prompts[5]) + 3)
            if poisoned.any():
                raise RuntimeError("poison")
            return sampler(logits, metadata)

        runner.sampler = failing  # type: ignore[assignment]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.get_stats()
    for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
        if i == 5:
            assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("error", 3)
        else:
            assert output.outputs[0].token_ids == want.token_ids
    assert stats.num_failed_steps == 2
    assert stats.num_blocks_used == 0


def test_aborted_requests_leave_nothing_in_flight(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts = workload("tied-gqa")[0][:4]
    with make_llm(checkpoint("tied-gqa"), 1, 2) as llm:
        client = llm._core
        for i, prompt in enumerate(prompts):
            client.add_request(EngineCoreRequest(f"r{i}", prompt, SamplingParams(max_tokens=99)))
        for _ in range(3):
            client.step()
        assert client._in_flight
        for i in range(len(prompts)):
            client.abort_request(f"r{i}")
        assert client.has_requests(), "what is in flight is still to be collected"
        client.call_utility(Sleep(1))
        assert not client.has_requests()
        assert not client._in_flight


def test_nobody_is_blamed_for_a_failure_in_the_wake_of_another(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, lengths, expected = workload("tied-gqa")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths[:3]]
    with make_llm(checkpoint("tied-gqa"), 1, 2) as llm:
        executor = executor_of(llm)
        submit, collect = executor.submit, executor.collect
        in_flight: deque[int] = deque()
        failed: list[int] = []

        def counting(scheduler_output: SchedulerOutput) -> None:
            in_flight.append(len(scheduler_output.num_scheduled_tokens))
            submit(scheduler_output)

        def failing() -> ModelRunnerOutput:
            output, size = collect(), in_flight.popleft()
            if (not failed and size == 2 and list(in_flight) == [1]) or len(failed) == 1:
                failed.append(size)
                raise RuntimeError("passing trouble")
            return output

        monkeypatch.setattr(executor, "submit", counting)
        monkeypatch.setattr(executor, "collect", failing)
        outputs = llm.generate(prompts[:3], params, use_tqdm=False)
        assert (failed, llm.get_stats().num_failed_steps) == ([2, 1], 1)
    assert [output.outputs[0].token_ids for output in outputs] == [want.token_ids for want in expected[:3]]


def test_step_that_fails_before_it_is_submitted_ends_nobody(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, lengths, expected = workload("tied-gqa")
    prompts, lengths, expected = prompts[:8], lengths[:8], expected[:8]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with make_llm(checkpoint("tied-gqa"), 1, 2, max_num_seqs=4) as llm:
        executor = executor_of(llm)
        submit, steps = executor.submit, []

        def failing(scheduler_output: SchedulerOutput) -> None:
            steps.append(scheduler_output)
            if len(steps) in (9, 30):
                raise RuntimeError("not sent")
            submit(scheduler_output)

        monkeypatch.setattr(executor, "submit", failing)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_stats().num_failed_steps >= 2
    assert [output.outputs[0].token_ids for output in outputs] == [want.token_ids for want in expected]


def test_executor_that_is_gone_is_nobodys_fault(checkpoint: Callable[[str], Path]) -> None:
    def gone() -> None:
        raise EngineDeadError("rank 1 is gone")

    with make_llm(checkpoint("tied-gqa"), 1, 1) as llm:
        llm._core.executor.collect = gone
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate([[1, 2, 3]], use_tqdm=False)
        assert llm.get_stats().num_failed_steps == 0
