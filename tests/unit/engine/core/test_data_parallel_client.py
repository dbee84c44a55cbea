"""Several engines behind one client, with engines that compute nothing: who has which request when some of them die."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from quire_engine.config import EngineConfig
from quire_engine.core import supervised_client
from quire_engine.core.data_parallel_client import DataParallelClient, make_engine_client
from quire_engine.core.supervised_client import SupervisedClient
from quire_engine.errors import EngineDeadError, EngineError, EngineUnavailableError
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
    IsSleeping,
    Sleep,
    WakeUp,
)
from quire_engine.sampling_params import SamplingParams
from quire_engine.stats import IterationStats
from quire_engine.system import crash_loop
from support.engines import until

POISON = "poison"


class Engine:
    """Stands in for `AsyncMPClient`: a step gives each request its next token, which depends on its place alone."""

    all: "list[Engine]"
    may_start: threading.Event
    fails_to_start: set[int]

    def __init__(self, config: EngineConfig, num_blocks: int | None = None) -> None:
        self.index = config.parallel.data_parallel_rank
        self.ready = EngineCoreReady(
            vocab_size=100, max_model_len=1000, num_blocks=64, block_size=16, num_kv_cache_tokens=1000 - self.index
        )
        self.death: str | None = None
        self.requests: dict[str, EngineCoreRequest] = {}
        self.num_tokens: Counter[str] = Counter()
        self.is_asleep = False
        self.pid, self._num_sent = 1000 + len(Engine.all), 0
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._is_first = num_blocks is None
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
        self._num_sent += 1
        return self._num_sent

    def abort_request(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_begun(self, message_number: int) -> bool:
        return True

    async def call_utility(self, call: Any) -> bool:
        if isinstance(call, Sleep) and call.level > 2:
            raise EngineError("there is no such level")
        if not isinstance(call, IsSleeping):
            self.is_asleep = isinstance(call, Sleep)
        return self.is_asleep

    async def get_output(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, str):
            raise EngineDeadError(outputs)
        return outputs

    def step(self) -> None:
        """One token each; a poison request ends the engine instead."""
        if POISON in self.requests:
            self.kill()
            return
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

    def kill(self) -> None:
        self.death = "the engine process was killed"
        self.requests = {}
        self._outputs.put_nowait(self.death)

    def stop_listening(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Fleet:
    """A client, its present engines, and what has come of the requests."""

    def __init__(self, num_replicas: int, **settings: Any) -> None:
        config = EngineConfig.from_settings({"model": "x", "data_parallel_size": num_replicas, **settings})
        self.counted = IterationStats()
        self.client = DataParallelClient(config, self._count)
        self.client.wait_until_ready()
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, EngineCoreOutput] = {}
        self.ended: set[str] = set()

    def _count(self, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        self.counted.num_requests_replayed += len(replayed_ids)
        self.counted.num_engine_restarts += stats.num_engine_restarts

    @property
    def engines(self) -> list[Engine]:
        engines: Any = [replica._client for replica in self.client.replicas]
        return engines

    def add(self, *request_ids: str, max_tokens: int = 40) -> None:
        for request_id in request_ids:
            self.client.add_request(EngineCoreRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens)))

    def where(self) -> list[int]:
        """Requests of each engine."""
        return [len(engine.requests) for engine in self.engines]

    async def listen(self) -> None:
        while True:
            for output in (await self.client.get_output()).outputs:
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
            listening = asyncio.ensure_future(self.listen())
            try:
                await main()
            finally:
                self.client.shutdown()
                listening.cancel()

        asyncio.run(listened())


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    monkeypatch.setattr(supervised_client, "AsyncMPClient", Engine)
    Engine.all, Engine.may_start, Engine.fails_to_start = [], threading.Event(), set()
    Engine.may_start.set()
    yield Fleet
    Engine.may_start.set()


def test_one_engine_has_nothing_in_between(fleet: Callable[..., Fleet]) -> None:
    config = EngineConfig.from_settings({"model": "x"})
    client = make_engine_client(config, lambda stats, replayed_ids: None)
    assert type(client) is SupervisedClient
    assert client.replicas == (client,)


def test_what_all_can_serve_is_what_one_can(fleet: Callable[..., Fleet]) -> None:
    ready = fleet(3).client.ready
    assert (ready.num_kv_cache_tokens, ready.num_blocks) == (998, 192)


def test_the_requests_of_one_that_dies_go_on_at_once_where_they_were(fleet: Callable[..., Fleet]) -> None:
    Engine.may_start.clear()
    one, ids = fleet(3), [str(number) for number in range(12)]

    async def main() -> None:
        one.add(*ids)
        assert one.where() == [4, 4, 4]
        await one.step(5)
        one.engines[1].kill()
        await until(lambda: one.where() == [6, 0, 6])
        assert not one.client.replicas[1].is_alive, "nobody has waited for it"
        assert one.client.is_alive
        assert one.client.outage is None
        one.add("new")
        assert sorted(one.where()) == [0, 6, 7]
        await one.step(60)
        assert one.ended == {*ids, "new"}
        assert all(tokens == list(range(40)) for tokens in one.tokens.values()), "each token once, in order"
        assert one.counted.num_requests_replayed == 4
        Engine.may_start.set()
        await one.up(1)
        one.add("a", "b", "c")
        assert one.where() == [1, 1, 1]
        assert one.counted.num_engine_restarts == 1

    one.run(main)


def test_when_none_is_up_they_wait_for_the_first_that_is(fleet: Callable[..., Fleet]) -> None:
    Engine.may_start.clear()
    one, ids = fleet(2), [str(number) for number in range(6)]

    async def main() -> None:
        one.add(*ids)
        await one.step(5)
        one.engines[0].kill()
        await until(lambda: one.where() == [0, 6])
        await one.step(5)
        one.engines[1].kill()
        await until(lambda: one.client.is_held(ids[0]))
        assert not one.client.is_alive
        one.add("new")
        assert all(one.client.is_held(request_id) for request_id in (*ids, "new"))
        assert "engine 0: the engine process was killed" in str(one.client.outage)
        Engine.fails_to_start = {1}
        Engine.may_start.set()
        await one.up(0)
        assert one.where()[0] == 7
        await one.step(60)
        assert all(one.tokens[request_id] == list(range(40)) for request_id in (*ids, "new"))

    one.run(main)


def test_a_poison_request_ends_when_it_has_killed_two(fleet: Callable[..., Fleet]) -> None:
    one, ids = fleet(4), [str(number) for number in range(16)]

    async def main() -> None:
        one.add(*ids)
        await one.step(5)
        one.add(POISON)
        await until_stepped(lambda: POISON in one.errors)
        assert "died of this request again and again" in str(one.errors[POISON].error)
        await until_stepped(lambda: len(one.ended) == 17)
        assert all(one.tokens[request_id] == list(range(40)) for request_id in ids)
        deaths = Counter(engine.index for engine in Engine.all if engine.death is not None)
        assert sorted(deaths.values()) == [1, 3], "one, then another, where it runs alone twice"

    async def until_stepped(condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await one.step()
        raise AssertionError("it did not come to be")

    one.run(main)


def test_one_that_is_silent_gets_no_new_work(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    one = fleet(2, data_parallel_routing="least_loaded")
    now = [0.0]

    async def main() -> None:
        one.client._router._clock = lambda: now[0]
        one.add("a", "b")
        one.engines[1].step()
        await asyncio.sleep(0.001)
        now[0] = 0.9
        one.engines[1].step()
        await until(lambda: len(one.tokens.get("b", ())) == 2)
        now[0] = 1.5
        one.add(*"cdef")
        assert one.where() == [1, 5]
        one.engines[0].step()
        await until(lambda: "a" in one.tokens)
        one.add("g")
        assert one.where() == [2, 5]

    one.run(main)


def test_one_that_does_not_stay_up_leaves_its_share_to_the_others(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 1)
    Engine.fails_to_start = {0}
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        one.engines[0].kill()
        await until(lambda: one.client.replicas[0].has_given_up)
        one.add("e")
        await one.step(60)
        assert one.ended == set("abcde")
        assert not one.errors
        Engine.fails_to_start = {0, 1}
        one.add("f")
        one.engines[1].kill()
        await until(lambda: "f" in one.errors)
        assert one.errors["f"].retry_after_seconds is not None
        with pytest.raises(EngineUnavailableError):
            one.add("g")

    one.run(main)


def test_all_sleep_or_none(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add("a")
        with pytest.raises(EngineError, match="1 requests are live"):
            await one.client.call_utility(Sleep(1))
        assert one.client.abort_request("a")
        assert await one.client.call_utility(Sleep(1))
        assert [engine.is_asleep for engine in one.engines] == [True, True]
        await one.client.call_utility(WakeUp())
        assert not await one.client.call_utility(IsSleeping())

        async def refuses(call: Any) -> bool:
            raise EngineError("no")

        one.engines[1].call_utility = refuses  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no"):
            await one.client.call_utility(Sleep(1))
        assert not one.engines[0].is_asleep

    one.run(main)


def test_kills_at_random_lose_change_and_repeat_nothing(fleet: Callable[..., Fleet]) -> None:
    """Whatever dies when, also several at once: only one that runs a suspect alone is spared, or that one is blamed."""
    one, chance = fleet(3), random.Random(4)
    limits: dict[str, int] = {}
    aborted: set[str] = set()

    async def main() -> None:
        for number in range(400):
            if number < 300 and chance.random() < 0.5:
                limits[str(number)] = chance.randint(1, 60)
                one.add(str(number), max_tokens=limits[str(number)])
            live = [request_id for request_id in limits if request_id not in one.ended | aborted]
            if live and chance.random() < 0.05:
                aborted.add(live[0])
                one.client.abort_request(live[0])
            await one.step()
            for replica, engine in zip(one.client.replicas, one.engines, strict=True):
                if engine.is_alive and not replica.is_isolating and chance.random() < 0.04:
                    engine.kill()
        while not one.ended | aborted >= set(limits):
            await one.step()

    one.run(main)
    assert sum(engine.death is not None for engine in Engine.all) > 15
    assert not one.errors
    for request_id in set(limits) - aborted:
        assert one.tokens[request_id] == list(range(limits[request_id])), request_id
    for request_id in aborted & set(one.tokens):
        assert one.tokens[request_id] == list(range(len(one.tokens[request_id])))
    assert all(one.client._router.num_requests(index) == 0 for index in range(3))
