"""Several ranks as threads of one process: communicators of lists and barriers, and an executor."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from quire_engine import LLM
from quire_engine.config import EngineConfig
from quire_engine.core import build_engine
from quire_engine.distributed import ParallelState
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.worker import Worker
from quire_engine.worker.rank_board import RankBoard

__all__ = ["ThreadExecutor", "llm_of_thread_ranks", "run_on_ranks", "thread_ranks"]

TIMEOUT_SECONDS = 60.0
"""After which a rank that waits for another one gives up."""


class _Group:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.tensors: list[Any] = [None] * size
        self.mail: list[list[SimpleQueue[torch.Tensor]]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]


@dataclass(frozen=True)
class ThreadCommunicator:
    """See `Communicator`."""

    group: _Group
    rank: int

    @property
    def size(self) -> int:
        return len(self.group.tensors)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(self._share(tensor))  # type: ignore[assignment]
        self.group.barrier.wait()
        return total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        tensors = self._share(tensor)
        together = torch.cat(tensors, dim=-1) if self.rank == 0 else None
        self.group.barrier.wait()
        return together

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self.group.mail[self.rank][rank].put(tensor.clone())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        tensor = self.group.mail[rank][self.rank].get(timeout=TIMEOUT_SECONDS)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        return tensor

    def _share(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.group.tensors[self.rank] = tensor
        self.group.barrier.wait()
        tensors = list(self.group.tensors)
        assert len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        return tensors


def thread_ranks(tensor_parallel_size: int, pipeline_parallel_size: int) -> list[ParallelState]:
    """The ranks of an engine, each to be used in a thread of its own."""
    stages = [_Group(tensor_parallel_size) for _ in range(pipeline_parallel_size)]
    columns = [_Group(pipeline_parallel_size) for _ in range(tensor_parallel_size)]
    return [
        ParallelState(
            rank=stage * tensor_parallel_size + place,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            tensor_group=ThreadCommunicator(stages[stage], place) if tensor_parallel_size > 1 else None,
            pipeline_group=ThreadCommunicator(columns[place], stage) if pipeline_parallel_size > 1 else None,
        )
        for stage in range(pipeline_parallel_size)
        for place in range(tensor_parallel_size)
    ]


def run_on_ranks(ranks: list[ParallelState], function: Callable[[ParallelState], Any]) -> list[Any]:
    """Call a function on all ranks at once; returns what each returned, or raises what the first one raised."""
    threads = [_Rank(lambda rank=rank: function(rank)) for rank in ranks]  # type: ignore[misc]
    for thread in threads:
        thread.calls.put(None)
    return _results([thread.results.get(timeout=TIMEOUT_SECONDS) for thread in threads])


def _results(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class _Rank:
    """A thread that calls what it is told to, and keeps what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self.results: SimpleQueue[Any] = SimpleQueue()
        self.calls.put(function)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            self.results.put(_result_or_error(call))


def _result_or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


class ThreadExecutor:
    """See `Executor`. Messages are encoded and decoded as on their way to a process."""

    clock = staticmethod(time.perf_counter)

    def __init__(
        self, config: EngineConfig, checkpoint: CheckpointConfig, max_model_len: int, expert_group: None = None
    ) -> None:
        parallel = config.parallel
        states = thread_ranks(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.max_concurrent_batches = parallel.pipeline_parallel_size
        self.async_scheduling = False
        self.max_in_flight = 0
        self.worker_pids: list[int] = []
        self.death_descriptors: list[int] = []
        self._output_rank = next(state.rank for state in states if state.is_output_rank)
        self._num_in_flight = 0
        self._early: list[list[Any]] = []
        self.board = RankBoard(config, checkpoint.expert_shape)
        self.board.close()  # the memory stays; no process inherits its descriptor

        def make(state: ParallelState) -> Worker:
            return Worker(config, checkpoint, max_model_len, state, board=self.board)

        self._ranks = [_Rank(lambda state=state: make(state)) for state in states]  # type: ignore[misc]
        self.workers: list[Worker] = self._collect()

    def check_health(self) -> None:
        """Threads do not die."""

    def determine_num_blocks(self) -> int:
        return min(self._call("determine_num_blocks"))

    def initialize_cache(self, num_blocks: int) -> None:
        self._call("initialize_cache", num_blocks)

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        message = msgspec.msgpack.encode(scheduler_output)
        for rank, worker in zip(self._ranks, self.workers, strict=True):
            decoded = msgspec.msgpack.decode(message, type=SchedulerOutput)
            rank.calls.put(lambda worker=worker, decoded=decoded: worker.execute_model(decoded))  # type: ignore[misc]
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)

    def collect(self) -> ModelRunnerOutput:
        self._num_in_flight -= 1
        outputs = self._early.pop(0) if self._early else self._collect()
        output = outputs.pop(self._output_rank)
        assert all(other == ModelRunnerOutput({}) for other in outputs)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ModelRunnerOutput)

    def busy_seconds(self) -> list[float]:
        return []

    def expert_tokens(self) -> Any:
        return None if self.board.expert_tokens is None else self.board.expert_tokens.copy()

    def collective_rpc(self, call: Any) -> list[int]:
        # What a rank says to steps in flight comes first.
        self._early += [self._collect() for _ in range(self._num_in_flight - len(self._early))]
        return self._call("call", call)

    def shutdown(self) -> None:
        if self.board.transfers is not None:
            self._call("close")
        for rank in self._ranks:
            rank.calls.put(None)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for rank, worker in zip(self._ranks, self.workers, strict=True):
            rank.calls.put(lambda worker=worker: getattr(worker, method)(*arguments))  # type: ignore[misc]
        return self._collect()

    def _collect(self) -> list[Any]:
        return _results([rank.results.get(timeout=TIMEOUT_SECONDS) for rank in self._ranks])


@contextmanager
def llm_of_thread_ranks(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine whose ranks, if there are several, are threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        if settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1) > 1:
            patch.setattr(build_engine, "make_executor", ThreadExecutor)
        llm = LLM(folder, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()
