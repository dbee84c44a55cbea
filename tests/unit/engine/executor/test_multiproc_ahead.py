"""Workers that begin a step while the result of the one before is waited for."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.errors import EngineError
from quire_engine.messages import SchedulerOutput, StepNanoseconds, UsesGpu
from support.multiproc import bad_step, executor, settings, step

PROMPTS = [[5 + i % 60 for i in range(40)], [7, 8, 9], [11] * 100]
SUBMITTED_STEPS = """
class Step:
    begun = threading.Semaphore(0)

    def __init__(self, request_ids):
        (self.what,) = request_ids
        if self.what == "bad":
            raise RuntimeError("cannot begin")
        Step.begun.release()

    def result(self):
        if self.what == "after the next":
            assert all(Step.begun.acquire(timeout=30) for _ in range(2)), "the next step did not begin meanwhile"
        if self.what == "slow":
            time.sleep(0.2)
        if self.what == "fails":
            raise RuntimeError("cannot end")
        return ModelRunnerOutput({self.what: [1]})

def submit_step(self, scheduler_output):
    is_named = scheduler_output.dropped_request_ids and not scheduler_output.num_scheduled_tokens
    return Step(scheduler_output.dropped_request_ids) if is_named else submit_model(self, scheduler_output)

submit_model, Worker.submit_model = Worker.submit_model, submit_step
"""


def named(what: str) -> SchedulerOutput:
    return SchedulerOutput({}, dropped_request_ids=[what])


def test_the_next_step_begins_before_the_result_is_there(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers(SUBMITTED_STEPS)
    with executor(checkpoint("tied-gqa"), async_scheduling=True) as workers:
        workers.submit(named("after the next"))
        workers.submit(named("next"))
        assert [list(workers.collect().sampled_token_ids) for _ in range(2)] == [["after the next"], ["next"]]


def test_answers_keep_the_order_of_the_calls(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers(SUBMITTED_STEPS)
    with executor(checkpoint("tied-gqa"), async_scheduling=True) as workers:
        for what in ("slow", "bad", "fails", "last"):
            workers.submit(named(what))
        assert workers.collective_rpc(UsesGpu()) == [0]
        assert list(workers.collect().sampled_token_ids) == ["slow"]
        for cause in ("cannot begin", "cannot end"):
            with pytest.raises(EngineError, match=f"RuntimeError: {cause}"):
                workers.collect()
        assert list(workers.collect().sampled_token_ids) == ["last"]


def test_time_of_two_steps_at_once_counts_once(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers(SUBMITTED_STEPS)
    with executor(checkpoint("tied-gqa"), async_scheduling=True) as workers:
        before, began_at = workers.busy_seconds()[0], time.perf_counter()
        for _ in range(3):
            workers.submit(named("slow"))
        for _ in range(3):
            workers.collect()
        workers.collective_rpc(StepNanoseconds())  # the last step is counted before it is told
        assert 3 * 0.2 <= workers.busy_seconds()[0] - before <= time.perf_counter() - began_at


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_same_tokens_and_errors_as_with_one_step_at_a_time(num_ranks: int, checkpoint: Callable[[str], Path]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    more = {"tensor_parallel_size": num_ranks}
    answers = []
    for is_async in (False, True):
        llm = LLM(**settings(checkpoint("tied-gqa"), async_scheduling=is_async, **more))
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        llm.shutdown()
    assert answers[0] == answers[1]
    with executor(checkpoint("tied-gqa"), async_scheduling=True, **more) as workers:
        for i in range(3):
            workers.submit(bad_step())
            with pytest.raises(EngineError, match=r"KeyError.*unknown to the workers"):
                workers.collect()
            workers.submit(step(f"a{i}"))
            assert list(workers.collect().sampled_token_ids) == [f"a{i}"]
