"""Replicas that come and leave while requests run, with engines that compute nothing: no token is lost or repeated."""

import asyncio
import random
from collections.abc import Callable

import pytest
from quire_engine.errors import EngineDeadError, EngineError, ScalingError
from quire_engine.messages import ReportPrefixCache, ResetPrefixCache, Sleep, WakeUp
from quire_engine.replicas import replica_set
from quire_engine.replicas.restart_policy import RestartPolicy
from support.engines import until
from support.fleet import POISON, Engine, Fleet

MIB = 1 << 20


def test_new_ones_serve_when_all_are_ready_and_the_others_meanwhile(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        Engine.may_start.clear()
        scaling = asyncio.ensure_future(one.client.scale(4))
        await until(lambda: len(Engine.all) == 4)
        await one.step(5)
        assert {len(tokens) for tokens in one.tokens.values()} == {5}
        assert len(one.client.replicas) == 2
        one.add("e")
        Engine.may_start.set()
        await scaling
        assert one.where() == [3, 2, 0, 0]
        one.add(*"fghi")
        assert one.where() == [3, 2, 2, 2], "those that have least get the new ones; nothing moves"
        assert one.client.ready.num_blocks == 4 * 64
        await one.step(60)
        assert all(one.tokens[request_id] == list(range(40)) for request_id in "abcdefghi")

    one.run(main)
    new = Engine.all[2:]
    assert [engine.index for engine in new] == [2, 3]
    assert [engine.num_blocks for engine in new] == [64, 64], "as large as the others"
    assert all(engine.config.parallel.data_parallel_size == 4 for engine in new), "they take their share of four"
    assert one.counted.num_engine_restarts == one.counted.num_requests_moved == 0


def test_those_that_leave_hand_over_at_once_and_nobody_is_blamed(fleet: Callable[..., Fleet]) -> None:
    one, ids = fleet(3), [str(number) for number in range(12)]

    async def main() -> None:
        one.add(*ids)
        await one.step(5)
        leaving = one.engines[1:]
        scaling = asyncio.ensure_future(one.client.scale(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert one.where() == [12], "in the turn in which the command came"
        await scaling
        assert all(engine.has_ended for engine in leaving)
        assert one.client.ready.num_blocks == 64
        one.add("new")
        await one.step(60)
        assert one.ended == {*ids, "new"}
        assert all(one.tokens[request_id] == list(range(40)) for request_id in ids)
        counted = one.counted
        assert (counted.num_requests_moved, counted.num_requests_replayed, counted.num_engine_restarts) == (8, 0, 0)
        assert one.client.is_alive

    one.run(main)
    assert not any(one.client._router.num_requests(index) for index in range(1))
    assert len(one.client._router._loads) == 1


def test_one_that_does_not_start_changes_nothing(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    Engine.fails_to_start = {3}

    async def main() -> None:
        one.add("a", "b")
        with pytest.raises(ScalingError, match="there cannot be 4 replicas: it cannot start"):
            await one.client.scale(4)
        assert one.where() == [1, 1]
        assert [engine.has_ended for engine in Engine.all] == [False, False, True, True], "nor is its sister left"
        assert one.client.ready.num_blocks == 128
        await one.step(60)
        assert one.ended == {"a", "b"}
        Engine.fails_to_start = set()
        await one.client.scale(3)
        assert len(one.client.replicas) == 3

    one.run(main)


def test_a_second_command_waits_its_turn_and_sleep_does_too(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        await one.client.scale(2)
        Engine.may_start.clear()
        scaling = asyncio.ensure_future(one.client.scale(3))
        await until(lambda: len(Engine.all) == 3)
        for again in (1, 3, 4):
            with pytest.raises(ScalingError, match="changed from 2 to 3; try again when that is done"):
                await one.client.scale(again)
        with pytest.raises(EngineError, match="sleep: the replicas are being changed from 2 to 3"):
            await one.client.calls.call(Sleep(1))
        scaling.cancel()  # whoever gave the command has gone
        Engine.may_start.set()
        await until(lambda: len(one.client.replicas) == 3)
        await asyncio.sleep(0)
        await one.client.scale(1)
        assert len(one.client.replicas) == 1

    one.run(main)


def test_a_sleeping_engine_is_not_scaled(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        await one.client.calls.call(Sleep(1))
        for number in (1, 3):
            with pytest.raises(ScalingError, match="the engine sleeps; wake it up first"):
                await one.client.scale(number)
        await one.client.calls.call(WakeUp())
        await one.client.scale(3)
        assert not any(engine.is_asleep for engine in one.engines)

    one.run(main)


def test_one_that_runs_a_suspect_alone_does_not_leave(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(POISON)
        while not one.client.replicas[1].is_isolating:  # it has killed both, and is now the second one's
            await one.step()
        with pytest.raises(ScalingError, match="runs alone on a replica that is to leave"):
            await one.client.scale(1)
        while POISON not in one.errors:
            await one.step()
        await one.up(0, 1)
        await one.client.scale(1)

    one.run(main)


@pytest.mark.parametrize("delay", [0.0, 600.0])
def test_one_that_is_being_started_again_leaves_at_once(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    """Whether its next engine is starting, or is not to start yet."""
    monkeypatch.setattr(RestartPolicy, "delay_after_death", lambda self: delay)
    one = fleet(2)

    async def main() -> None:
        one.add("a", "b")
        Engine.may_start.clear()
        one.engines[1].kill()
        await until(lambda: one.where() == [2, 0])
        calling = asyncio.ensure_future(one.client.replicas[1].call_utility(ReportPrefixCache()))
        await one.client.scale(1)
        with pytest.raises(EngineDeadError, match="was removed"):
            await calling
        await one.step(60)
        assert one.ended == {"a", "b"}
        Engine.may_start.set()
        await one.client.scale(2)
        assert one.client.replicas[1].is_alive

    one.run(main)


def test_the_only_one_that_is_up_does_not_leave_with_requests(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add("a", "b")
        Engine.may_start.clear()
        one.engines[0].kill()
        await until(lambda: one.where() == [0, 2])
        with pytest.raises(ScalingError, match="none of the replicas that are to stay is up"):
            await one.client.scale(1)
        Engine.may_start.set()
        await one.up(0)
        await one.client.scale(1)
        await one.step(60)
        assert one.ended == {"a", "b"}

    one.run(main)


def test_a_new_one_takes_what_waits_while_no_other_is_up(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        Engine.fails_to_start = {0, 1}
        for engine in one.engines:
            engine.kill()
        await until(lambda: not one.client.is_alive)
        await one.client.scale(3)
        await until(lambda: one.where()[2] == 4)
        await one.step(60)
        assert one.ended == set("abcd")

    one.run(main)


def test_an_end_that_was_not_told_yet_is_told(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add("a", "b")
        leaving = one.client.replicas[1]
        (mine,) = (request_id for request_id in "ab" if one.client.engine_index(request_id) == 1)
        leaving._end([mine], "it fails")
        await one.client.scale(1)
        await until(lambda: mine in one.errors)

    one.run(main)


def test_shutdown_ends_what_is_being_started(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        Engine.may_start.clear()
        scaling = asyncio.ensure_future(one.client.scale(3))
        await until(lambda: len(Engine.all) == 3)
        await asyncio.to_thread(one.client.shutdown)
        with pytest.raises(ScalingError, match="was shut down"):
            await scaling

    one.run(main)
    assert all(engine.has_ended for engine in Engine.all)


def test_replicas_that_the_memory_does_not_hold_are_refused(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two caches of 100 MiB, of which one is half used: each new one needs as much, and 20 for all else."""
    one = fleet(2)
    free = [269 * MIB]
    monkeypatch.setattr(replica_set, "available_memory_bytes", lambda: free[0])
    for replica, own in zip(one.client._own, (20, 70), strict=True):
        replica.ready.cpu_cache_bytes, replica.bytes_at_start = 100 * MIB, 20 * MIB
        monkeypatch.setattr(replica, "_own_bytes", lambda own=own: own * MIB)

    async def main() -> None:
        with pytest.raises(ScalingError, match=r"another one takes about 120 MiB.* and 119 MiB are free"):
            await one.client.scale(3)
        assert len(Engine.all) == 2
        free[0] += MIB
        await one.client.scale(3)

    one.run(main)


@pytest.mark.parametrize(("routing", "asked"), [("prefix", True), ("least_loaded", False)])
def test_a_single_engine_becomes_several_and_one_again(fleet: Callable[..., Fleet], routing: str, asked: bool) -> None:
    """What the single engine has counts in the routing from the moment at which there are two."""
    one = fleet(1, data_parallel_routing=routing)

    async def main() -> None:
        (engine,) = one.engines
        one.add("a", "b")
        await one.step(3)
        assert one.client._router.num_requests(0) == 0
        await one.client.scale(2)
        assert one.client._router.num_requests(0) == 2
        await until(lambda: engine.reports_prefixes is asked)
        one.add("c")
        assert one.where() == [2, 1]
        await one.step(3)
        engine.kill()
        await until(lambda: len(one.engines[1].requests) == 3)
        await one.up(0)
        assert one.engines[0].config.parallel.data_parallel_size == 2, "the next one has its share of two"
        await one.client.scale(1)
        assert one.client._router.num_requests(0) == 0
        await one.step(60)
        assert one.ended == set("abc")
        assert all(one.tokens[request_id] == list(range(40)) for request_id in "abc")
        await one.client.calls.call(ResetPrefixCache())
        await one.client.scale(2)
        assert one.client._router.num_requests(0) == 0

    one.run(main)


def test_commands_and_kills_at_random_lose_change_and_repeat_nothing(fleet: Callable[..., Fleet]) -> None:
    one, chance = fleet(2), random.Random(6)
    limits: dict[str, int] = {}
    refused: list[str] = []
    sizes: set[int] = set()

    async def main() -> None:
        for number in range(300):
            if chance.random() < 0.5:
                limits[str(number)] = chance.randint(1, 60)
                one.add(str(number), max_tokens=limits[str(number)])
            if chance.random() < 0.15:
                try:
                    await one.client.scale(chance.randint(1, 4))
                except ScalingError as error:
                    refused.append(str(error))
            sizes.add(len(one.client.replicas))
            await one.step()
            for replica, engine in zip(one.client.replicas, one.engines, strict=True):
                if engine.is_alive and not replica.is_isolating and chance.random() < 0.03:
                    engine.kill()
        while not one.ended >= set(limits):
            await one.step()

    one.run(main)
    assert sizes == {1, 2, 3, 4}
    assert not one.errors
    assert one.counted.num_requests_moved > 30
    for request_id, limit in limits.items():
        assert one.tokens[request_id] == list(range(limit)), request_id
    assert not one.client._router._routes
