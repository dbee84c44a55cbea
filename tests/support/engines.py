"""An AsyncLLM for tests, an ear at its statistics, live requests, and what the offline engine says to the same."""

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, AsyncLLM, EngineConfig, RequestOutput, RequestOutputKind, SamplingParams
from quire_engine.outputs import CompletionOutput
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE
from support.event_loop import running_loop
from support.faults import put_fault
from support.processes import is_gone

__all__ = [
    "Recorder", "SharedEngine", "Stream", "assert_same", "engine", "kill", "offline", "params", "run", "shared_engine",
    "until",
]  # fmt: skip


class Recorder:
    """A StatLogger that keeps what it hears."""

    def __init__(self) -> None:
        self.scheduler_stats: SchedulerStats | None = None
        """The last."""
        self.iterations: list[IterationStats] = []

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        self.scheduler_stats = scheduler_stats or self.scheduler_stats
        self.iterations.append(iteration_stats)

    @property
    def finished(self) -> list[FinishedRequestStats]:
        return [one for stats in self.iterations for one in stats.finished_requests]

    @property
    def num_restarts(self) -> int:
        return sum(stats.num_engine_restarts for stats in self.iterations)

    @property
    def num_replayed(self) -> int:
        return sum(stats.num_requests_replayed for stats in self.iterations)

    @property
    def num_running(self) -> int:
        return self.scheduler_stats.num_running if self.scheduler_stats is not None else 0

    @property
    def num_waiting_for_fsm(self) -> int:
        return self.scheduler_stats.num_waiting_for_fsm if self.scheduler_stats is not None else 0


@contextlib.contextmanager
def engine(
    folder: Path, recorder: Any = None, step_seconds: float = 0.0, **settings: Any
) -> Iterator[tuple[AsyncLLM, Any]]:
    """An engine in a process of its own and its recorder; afterwards the process is gone.

    Args:
        folder: the checkpoint.
        recorder: instead of a new one.
        step_seconds: how much longer every step takes than so small a model needs: for tests that do something while
            requests run.
        settings: of the engine.
    """
    recorder = recorder or Recorder()
    config = EngineConfig.from_settings({"model": str(folder), "dtype": "float32", **settings})
    with contextlib.ExitStack() as stack:
        if step_seconds:
            fault = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-slow-")), "fault.json")
            put_fault(fault, action="slow", rank=0, seconds=step_seconds)
            stack.enter_context(pytest.MonkeyPatch.context()).setenv(FAULT_INJECTION_VARIABLE, str(fault))
        llm = AsyncLLM(config, [recorder])
        try:
            yield llm, recorder
        finally:
            llm.shutdown()
    assert is_gone(llm.engine_pid)


def run(llm: AsyncLLM, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run `main` in an event loop in which the engine takes outputs from the start."""

    async def started() -> Any:
        await llm.start()
        return await main()

    return asyncio.run(started())


class SharedEngine:
    """An engine that tests of a module use one after the other; none of them harms it."""

    def __init__(self, llm: AsyncLLM, recorder: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.recorder = recorder
        self._loop = loop

    def run(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run `main` in the engine's event loop; the recorder has heard nothing before."""

        async def started() -> Any:
            await self.llm.start()
            await until(lambda: not self.recorder.num_running)
            self.recorder.__init__()
            return await main()

        return asyncio.run_coroutine_threadsafe(started(), self._loop).result(120)


@contextlib.contextmanager
def shared_engine(folder: Path, recorder: Any = None, **settings: Any) -> Iterator[SharedEngine]:
    """The same as `engine`, whose event loop runs in a thread from test to test."""
    with engine(folder, recorder, **settings) as (llm, heard), running_loop() as loop:
        yield SharedEngine(llm, heard, loop)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let the loop run until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        await asyncio.sleep(0.005)


def params(**fields: Any) -> SamplingParams:
    """Greedy and of a fixed length unless told otherwise, and streamed as deltas."""
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 40, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, **fields}
    )


def kill(llm: AsyncLLM, number: int = signal.SIGKILL) -> None:
    """Send a signal to the engine core."""
    os.kill(llm.engine_pid, number)


class Stream:
    """One request: its deltas put together, and how many tokens have come."""

    def __init__(self, llm: AsyncLLM, prompt: list[int], sampling_params: SamplingParams, **options: Any) -> None:
        self.output: RequestOutput | None = None
        self.num_tokens = 0
        self.task = asyncio.ensure_future(self._run(llm.generate(prompt, sampling_params, **options)))

    async def _run(self, outputs: Any) -> RequestOutput:
        async for delta in outputs:
            if self.output is None:
                self.output = delta
            else:
                self.output.merge(delta)
            self.num_tokens = sum(len(one.token_ids) for one in self.output.outputs)
        assert self.output is not None
        return self.output


def offline(folder: Path, prompts: list[list[int]], sampling_params: SamplingParams, **settings: Any) -> list[Any]:
    """What an undisturbed engine in this process makes of each prompt."""
    outputs = LLM(folder, dtype="float32", **settings).generate(prompts, sampling_params, use_tqdm=False)
    return [output.outputs for output in outputs]


def assert_same(outputs: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    """Equal, up to the rounding of log-probabilities: a token that is computed with others is rounded differently."""
    assert [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in outputs] == [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in expected
    ]
    for one, other in zip(outputs, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for mine, theirs in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert {i: item.logprob for i, item in mine.items()} == pytest.approx(
                {i: item.logprob for i, item in theirs.items()}, abs=1e-4
            )
