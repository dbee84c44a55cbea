"""UniProcExecutor: with async scheduling a step begins when it is submitted, and its error waits for `collect`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import EngineConfig, SamplingParams
from quire_engine.executor import UniProcExecutor
from quire_engine.messages import CachedRequestData, SchedulerOutput
from quire_engine.models.checkpoints.config import CheckpointConfig
from support.multiproc import bad_step, settings, step


def executor(folder: Path, async_scheduling: bool | None) -> UniProcExecutor:
    config = EngineConfig.from_settings(
        settings(folder, distributed_executor_backend="uni", device="cpu", async_scheduling=async_scheduling)
    )
    made = UniProcExecutor(config, CheckpointConfig.from_folder(folder), 256)
    made.initialize_cache(made.determine_num_blocks())
    return made


def next_step(request_id: str, num_computed_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(
        {request_id: 1}, cached_requests=CachedRequestData([request_id], [[]], [num_computed_tokens])
    )


@pytest.mark.parametrize("async_scheduling", [None, False, True])
def test_step_begins_when_it_is_submitted_where_it_may_run_ahead(
    async_scheduling: bool | None, checkpoint: Callable[[str], Path]
) -> None:
    ahead = executor(checkpoint("tied-gqa"), async_scheduling)
    assert ahead.async_scheduling == bool(async_scheduling), "on the CPU it has to be asked for"
    assert ahead.max_concurrent_batches == 1 + ahead.async_scheduling
    ahead.submit(step("a"))
    assert ("a" in ahead._worker.runner.batch.slots) == ahead.async_scheduling
    assert list(ahead.collect().sampled_token_ids) == ["a"]


def test_steps_follow_on_from_tokens_that_nobody_has_collected(checkpoint: Callable[[str], Path]) -> None:
    def tokens(num_ahead: int) -> list[int]:
        workers = executor(checkpoint("tied-gqa"), async_scheduling=num_ahead > 0)
        first = step("a")
        (new,) = first.new_requests
        new.sampling_params = SamplingParams(temperature=2.0, seed=1)
        steps = [first, *(next_step("a", len(new.token_ids) + i) for i in range(3))]
        outputs = []
        for i, scheduler_output in enumerate(steps):
            workers.submit(scheduler_output)
            if i >= num_ahead:
                outputs.append(workers.collect())
        outputs += [workers.collect() for _ in range(num_ahead)]
        return [token_id for output in outputs for token_id in output.sampled_token_ids["a"]]

    assert len(set(tokens(0))) > 2
    assert tokens(1) == tokens(2) == tokens(0)


def test_error_of_a_step_that_cannot_begin_waits_for_its_turn(checkpoint: Callable[[str], Path]) -> None:
    workers = executor(checkpoint("tied-gqa"), async_scheduling=True)
    workers.submit(step("a"))
    workers.submit(bad_step())
    assert list(workers.collect().sampled_token_ids) == ["a"]
    workers.submit(step("b"))
    with pytest.raises(KeyError):
        workers.collect()
    assert list(workers.collect().sampled_token_ids) == ["b"]


def test_time_of_two_steps_at_once_counts_once(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = executor(checkpoint("tied-gqa"), async_scheduling=True)
    now = 10.0
    monkeypatch.setattr("quire_engine.executor.uniproc.time.perf_counter", lambda: now)
    workers.submit(SchedulerOutput({}))
    now = 11.0
    workers.submit(SchedulerOutput({}))
    now = 15.0
    workers.collect()
    assert workers.busy_seconds() == [5.0]
    now = 18.0
    workers.collect()
    assert workers.busy_seconds() == [8.0]
