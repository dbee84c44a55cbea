"""Several engines behind one client, with engines that compute nothing: who has which request when some of them die."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from quire_engine.errors import (
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    EngineUnavailableError,
    OperationError,
)
from quire_engine.messages import ErrorCode, LoadWeights, ReportPrefixCache, Sleep, UseWeights, WakeUp
from quire_engine.replicas.link import Link
from quire_engine.system import crash_loop
from support.engines import until
from support.fleet import POISON, Engine, Fleet


def test_one_engine_costs_no_routing_and_is_started_again_like_any(fleet: Callable[..., Fleet]) -> None:
    Engine.may_start.clear()
    one = fleet(1)

    async def main() -> None:
        one.client._router.route = one.client._router.note_outputs = None  # type: ignore[assignment,method-assign]
        one.add("a", "b")
        assert one.where() == [2]
        await one.step(5)
        assert one.client.abort_request("b")
        assert not one.client.abort_request("b")
        assert not one.client.abort_request("unknown")
        one.engines[0].kill()
        await until(lambda: one.client.outage == "the engine process was killed; it is being started again")
        one.add("c")
        assert one.client.is_held("c")
        Engine.may_start.set()
        await one.up(0)
        await one.step(60)
        assert one.ended == {"a", "c"}
        assert all(one.tokens[request_id] == list(range(40)) for request_id in "ac")

    one.run(main)
    counted = one.counted
    assert (counted.num_engine_restarts, counted.num_requests_replayed, counted.num_requests_moved) == (1, 1, 0)


def test_calls_end_with_an_error_when_their_engine_is_stopped(fleet: Callable[..., Fleet]) -> None:
    one = fleet(1)

    async def main() -> None:
        Engine.may_start.clear()
        one.engines[0].kill()
        await until(lambda: not one.client.is_alive)
        calling = asyncio.ensure_future(one.client.calls.call(ReportPrefixCache()))
        await asyncio.sleep(0)
        one.client.stop("the engine was shut down")
        with pytest.raises(EngineDeadError, match="was shut down"):
            await calling

    one.run(main)
    assert not one.failures


def test_a_call_to_an_engine_that_is_lost_does_not_wait() -> None:
    async def main() -> None:
        with pytest.raises(EngineDeadError, match="it was lost"):
            await Link("it was lost").call_utility(ReportPrefixCache())

    asyncio.run(main())


def test_a_failure_to_take_outputs_in_is_reported(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add("a", "b")
        one.tokens = None  # type: ignore[assignment]
        one.engines[1].step()
        await until(lambda: bool(one.failures))
        assert isinstance(one.failures[0], AttributeError)

    one.run(main)


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
        asleep = asyncio.ensure_future(one.client.calls.call(Sleep(1)))
        await until(lambda: one.client.calls._takes_none)
        with pytest.raises(EngineSleepingError, match="wake it up first"):
            one.add("b")
        with pytest.raises(OperationError, match="being put to sleep; try again when that is done"):
            await one.client.calls.call(Sleep(2))
        await one.step(40)
        assert await asleep
        assert one.tokens["a"] == list(range(40)), "it ended first"
        assert [engine.is_asleep for engine in one.engines] == [True, True]
        await one.client.calls.call(WakeUp())
        assert [engine.is_asleep for engine in one.engines] == [False, False]

        async def refuses(call: Any) -> bool:
            raise EngineError("no")

        one.engines[1].call_utility = refuses  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no"):
            await one.client.calls.call(Sleep(1))
        assert not one.engines[0].is_asleep
        one.add("c")
        assert sum(one.where()) == 1

    one.run(main)


def test_after_a_sleep_that_cannot_be_undone_the_engines_can_still_be_woken_up(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        answers = one.engines[0].call_utility

        async def cannot_wake(call: Any) -> bool:
            if isinstance(call, WakeUp):
                raise EngineError("there is no memory")
            return await answers(call)

        async def cannot_sleep(call: Any) -> bool:
            raise EngineError("no")

        one.engines[0].call_utility = cannot_wake  # type: ignore[method-assign]
        before, one.engines[1].call_utility = one.engines[1].call_utility, cannot_sleep  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no"):
            await one.client.calls.call(Sleep(1))
        with pytest.raises(EngineSleepingError, match="wake it up first"):
            one.add("a")
        one.engines[0].call_utility, one.engines[1].call_utility = answers, before  # type: ignore[method-assign]
        await one.client.calls.call(WakeUp())
        assert not one.engines[0].is_asleep
        one.add("b")
        await one.step(40)
        assert one.ended == {"b"}

    one.run(main)


def test_one_that_does_not_stay_up_keeps_the_others_neither_awake_nor_asleep(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next engine sleeps if they do."""
    one = fleet(2)

    async def main() -> None:
        Engine.fails_to_start = {1}
        one.engines[1].kill()
        await until(lambda: one.client.replicas[1].has_given_up)
        await one.client.calls.call(Sleep(1))
        assert one.engines[0].is_asleep
        Engine.fails_to_start = set()
        await one.up(1)
        await until(lambda: one.engines[1].is_asleep)
        Engine.fails_to_start = {1}
        one.engines[1].kill()
        await until(lambda: one.client.replicas[1].has_given_up)
        await one.client.calls.call(WakeUp())
        assert not one.engines[0].is_asleep
        Engine.fails_to_start = set()
        await one.up(1)
        one.add("a", "b")
        assert one.where() == [1, 1]
        assert not one.engines[1].is_asleep
        Engine.fails_to_start = {0, 1}
        for engine in one.engines:
            engine.kill()
        await until(lambda: all(replica.has_given_up for replica in one.client.replicas))
        with pytest.raises(EngineUnavailableError):
            await one.client.calls.call(Sleep(1))

    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 1)
    monkeypatch.setattr(crash_loop, "MAX_DELAY_SECONDS", 0.001)
    one.run(main)


def test_waking_up_ends_a_sleep_that_waits_for_requests(fleet: Callable[..., Fleet]) -> None:
    one = fleet(1)

    async def main() -> None:
        one.add("a")
        asleep = asyncio.ensure_future(one.client.calls.call(Sleep(1)))
        await until(lambda: one.client.calls._takes_none)
        assert await one.client.calls.call(WakeUp())
        with pytest.raises(OperationError, match="before its requests had ended"):
            await asleep
        one.add("b")
        await one.step(40)
        assert one.ended == {"a", "b"}
        assert not one.engines[0].is_asleep

    one.run(main)


def test_a_request_wakes_the_engines_up_where_the_setting_says_so(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2, wake_on_request=True)

    async def main() -> None:
        await one.client.calls.call(Sleep(2))
        one.add("a", "b")
        assert one.where() == [0, 0]
        assert one.client.is_held("a")
        await until(lambda: one.where() == [1, 1])
        assert [engine.is_asleep for engine in one.engines] == [False, False]
        await one.step(40)
        assert one.ended == {"a", "b"}

    one.run(main)


def test_if_one_cannot_wake_up_all_sleep_and_requests_that_wait_for_it_end(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2, wake_on_request=True)

    async def main() -> None:
        await one.client.calls.call(Sleep(1))
        calls, answers = [], one.engines[1].call_utility

        async def has_no_memory(call: Any) -> bool:
            calls.append(call)
            if isinstance(call, WakeUp):
                raise EngineError("there is no memory")
            return await answers(call)

        one.engines[1].call_utility = has_no_memory  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="no memory"):
            await one.client.calls.call(WakeUp())
        assert [engine.is_asleep for engine in one.engines] == [True, True]
        assert (one.client.calls.sleep_level, calls) == (1, [WakeUp(), Sleep(1)])
        one.add("a")
        await until(lambda: "a" in one.errors)
        assert "cannot be woken up: there is no memory" in (one.errors["a"].error or "")
        assert one.errors["a"].error_code is ErrorCode.UNAVAILABLE

    one.run(main)


def test_new_weights_are_for_all_engines_or_none(fleet: Callable[..., Fleet]) -> None:
    """Requests that engines have end first. New ones are held, and an engine that dies afterwards has the new ones."""
    one = fleet(2)
    present = one.client.config
    following = replace(present, model=replace(present.model, model="y"))

    async def main() -> None:
        calls: list[tuple[int, Any]] = []
        fails: set[int] = {1}

        def listen(engine: Any) -> None:
            async def hear(call: Any) -> bool:
                calls.append((engine.index, call))
                if isinstance(call, LoadWeights) and engine.index in fails:
                    raise EngineError("its shapes differ")
                return True

            engine.call_utility = hear

        for engine in one.engines:
            listen(engine)
        with pytest.raises(EngineError, match="its shapes differ"):
            await one.client.update_weights(following)
        assert calls == [(i, call) for call in (LoadWeights("y"), UseWeights(False)) for i in (0, 1)]
        assert one.client.config is present
        calls.clear()
        fails.clear()
        one.add("a")
        updating = asyncio.ensure_future(one.client.update_weights(following))
        await asyncio.sleep(0.001)
        one.add("b")
        assert (calls, sum(one.where()), one.client.is_held("b")) == ([], 1, True)
        with pytest.raises(OperationError, match="the weights are being updated; try again"):
            await one.client.calls.call(Sleep(1))
        await one.step(40)
        await updating
        assert calls == [(i, call) for call in (LoadWeights("y"), UseWeights(True)) for i in (0, 1)]
        await one.step(40)
        assert one.ended == {"a", "b"}
        one.engines[1].kill()
        await until(lambda: Engine.all[-1].config.model.model == "y")
        await one.up(1)
        await one.client.calls.call(Sleep(1))
        with pytest.raises(OperationError, match="the engine sleeps; wake it up first"):
            await one.client.update_weights(present)

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
