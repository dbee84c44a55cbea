"""Engines that compute nothing, behind the client of several: who has which request, and what has come of it."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
    ReportPrefixCache,
    Sleep,
)
from quire_engine.replicas.replica_set import ReplicaSet
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.stats import IterationStats
from support.engines import until
from support.scheduling import FakeModelRunner, make_scheduler, run_step

__all__ = ["POISON", "Engine", "Fleet", "SchedulingEngine"]

POISON = "poison"


class Engine:
    """Stands in for `LocalLink`: a step gives each request its next token, which depends on its place alone."""

    all: "list[Engine]"
    may_start: threading.Event
    fails_to_start: set[int]

    host, has_left = "", False

    def __init__(self, config: EngineConfig, num_blocks: int | None = None) -> None:
        self.index = config.parallel.data_parallel_rank
        self.ready = EngineCoreReady(
            vocab_size=100, max_model_len=1000, num_blocks=64, block_size=16, num_kv_cache_tokens=1000 - self.index
        )
        self.death: str | None = None
        self.requests: dict[str, EngineCoreRequest] = {}
        self.num_tokens: Counter[str] = Counter()
        self.is_asleep = self.reports_prefixes = self.has_ended = False
        self.pid, self._num_sent, self.num_messages_waiting = 1000 + len(Engine.all), 0, 0
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._is_first = num_blocks is None
        self.config, self.num_blocks = config, num_blocks
        Engine.all.append(self)

    @property
    def is_alive(self) -> bool:
        return self.death is None

    def wait_until_ready(self, cancelled: threading.Event | None = None) -> EngineCoreReady:
        if not self._is_first:
            while not Engine.may_start.wait(0.01):
                if cancelled is not None and cancelled.is_set():
                    raise EngineDeadError("the engine was shut down")
            if self.index in Engine.fails_to_start:
                raise EngineDeadError("it cannot start")
        return self.ready

    def watch(self, is_busy: Callable[[], bool]) -> None:
        pass

    def add_request(self, request: EngineCoreRequest) -> int:
        self.requests[request.request_id] = request
        self.num_tokens[request.request_id] = 0  # it may have been here before
        self._num_sent += 1
        return self._num_sent

    def abort_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_begun(self, message_number: int) -> bool:
        return True

    async def call_utility(self, call: Any) -> bool:
        if isinstance(call, Sleep) and call.level > 2:
            raise EngineError("there is no such level")
        if self.is_alive:
            await self._outputs.join()  # an answer comes after the outputs before it
        if isinstance(call, ReportPrefixCache):
            self.reports_prefixes = True
        else:
            self.is_asleep = isinstance(call, Sleep)
        return self.is_asleep

    async def get_output(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        self._outputs.task_done()
        if isinstance(outputs, str):
            raise EngineDeadError(outputs)
        return outputs

    def step(self) -> bool:
        """One token each; a poison request ends the engine instead."""
        if POISON in self.requests:
            self.kill()
            return True
        outputs = []
        for request in list(self.requests.values()):
            place = len(request.output_token_ids) + self.num_tokens[request.request_id]
            self.num_tokens[request.request_id] += 1
            limit = request.sampling_params.max_tokens or 0
            if request.max_new_tokens is not None:
                limit = min(limit, len(request.output_token_ids) + request.max_new_tokens)
            outputs.append(EngineCoreOutput(request.request_id, [place]))
            if place + 1 == limit:
                outputs[-1].finish_reason = FinishReason.LENGTH
                del self.requests[request.request_id], self.num_tokens[request.request_id]
        self._outputs.put_nowait(EngineCoreOutputs(outputs))
        return True

    def kill(self) -> None:
        self.death = "the engine process was killed"
        self.requests = {}
        self._outputs.put_nowait(self.death)

    def abandon(self, reason: str) -> None:
        self.death = reason

    def end_processes(self) -> None:
        self.has_ended = True

    def stop_listening(self) -> None:
        pass

    def shutdown(self) -> None:
        self.has_ended = True


class Fleet:
    """A client, its present engines, and what has come of the requests."""

    def __init__(self, num_replicas: int, **settings: Any) -> None:
        config = EngineConfig.from_settings({"model": "x", "data_parallel_size": num_replicas, **settings})
        self.counted = IterationStats()
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, EngineCoreOutput] = {}
        self.ended: set[str] = set()
        self.failures: list[BaseException] = []
        self.client = ReplicaSet(config, self._hear, self._count, self.failures.append)
        self.client.wait_until_ready()

    def _count(self, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        self.counted.num_requests_replayed += len(replayed_ids)
        self.counted.num_engine_restarts += stats.num_engine_restarts
        self.counted.num_requests_moved += stats.num_requests_moved

    @property
    def engines(self) -> list[Engine]:
        engines: Any = [replica.link for replica in self.client.replicas]
        return engines

    def add(self, *request_ids: str, max_tokens: int = 40) -> None:
        for request_id in request_ids:
            self.client.add_request(EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens)))

    def where(self) -> list[int]:
        """Requests of each engine."""
        return [len(engine.requests) for engine in self.engines]

    def _hear(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
            if output.error is not None:
                self.errors[output.request_id] = output

    async def step(self, number: int = 1) -> None:
        """Steps of all that live."""
        for _ in range(number):
            for engine in self.engines:
                if engine.is_alive:
                    engine.step()
            await asyncio.sleep(0.001)

    async def up(self, *indices: int) -> None:
        await until(lambda: all(self.client.replicas[index].is_alive for index in indices))

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def listened() -> None:
            self.client.start()
            try:
                await main()
            finally:
                self.client.shutdown()

        asyncio.run(listened())


class SchedulingEngine(Engine):
    """One with a real scheduler, whose cache is so small that requests queue and are preempted."""

    def __init__(self, config: EngineConfig, num_blocks: int | None = None) -> None:
        super().__init__(config, num_blocks)
        self._scheduler = make_scheduler(num_blocks=24, block_size=4, max_num_seqs=6, max_num_batched_tokens=64)
        self._runner = FakeModelRunner.for_scheduler(self._scheduler)

    def add_request(self, request: EngineCoreRequest) -> int:
        self._scheduler.add_request(Request(request, (), self.ready.max_model_len))
        return super().add_request(request)

    def abort_request(self, request_id: str) -> None:
        self._scheduler.finish_request(request_id)
        super().abort_request(request_id)

    def step(self) -> bool:
        """Of the scheduler. Returns whether it had anything to do."""
        if not self._scheduler.has_requests():
            return False
        outputs = run_step(self._scheduler, self._runner)
        for output in outputs:
            if output.finish_reason is not None:
                self.requests.pop(output.request_id, None)
        changes = self._scheduler.take_phase_changes()
        self._outputs.put_nowait(EngineCoreOutputs(outputs, self._scheduler.make_stats(), phase_changes=changes))
        return True
