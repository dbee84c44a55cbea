"""After a death: those who go on compute first, with all cores of the host, and then the next engine is started."""

import asyncio
from collections.abc import Callable

import pytest
from quire_engine.messages import EngineCoreOutput, FinishReason, UseCores
from quire_engine.replicas import catch_up
from quire_engine.replicas.catch_up import CatchUp
from support.engines import until
from support.fleet import POISON, Engine, Fleet


class Told:
    """An engine that is only told."""

    def __init__(self) -> None:
        self.num_engines: list[int] = []

    def tell(self, call: UseCores) -> None:
        self.num_engines.append(call.num_engines)


def test_it_is_over_with_the_last_first_token() -> None:
    async def main() -> None:
        one, engines = CatchUp(), [Told(), Told()]
        over = one.begin(["a", "b", "c", "d"], engines)
        assert [engine.num_engines for engine in engines] == [[2], [2]]
        one.note_outputs([EngineCoreOutput("a", [7]), EngineCoreOutput("other", [7]), EngineCoreOutput("b", [])])
        one.note_outputs([EngineCoreOutput("c", finish_reason=FinishReason.ERROR)])
        one.remove("d")
        assert not over.is_set(), "b has no token yet"
        one.note_outputs([EngineCoreOutput("b", [7])])
        assert over.is_set()
        one.end()
        assert [engine.num_engines for engine in engines] == [[2, 0], [2, 0]], "once"

    asyncio.run(main())


def test_another_one_ends_the_first() -> None:
    async def main() -> None:
        one, engine = CatchUp(), Told()
        first = one.begin(["a"], [engine])
        second = one.begin(["a", "b"], [engine])
        assert (first.is_set(), second.is_set()) == (True, False)
        one.remove("a")
        one.remove("b")
        assert second.is_set()
        assert engine.num_engines == [1, 0, 1, 0]

    asyncio.run(main())


def test_the_next_engine_is_started_when_all_that_moved_have_a_token(fleet: Callable[..., Fleet]) -> None:
    one, ids = fleet(3), [str(number) for number in range(12)]

    async def main() -> None:
        one.add(*ids)
        await one.step(5)
        one.engines[1].kill()
        await until(lambda: one.where() == [6, 0, 6])
        survivors = [one.engines[0], one.engines[2]]
        assert [engine.told for engine in survivors] == [[(2, 4)], [(2, 4)]], "before the requests came"
        survivors[0].step()
        await asyncio.sleep(0.01)
        assert len(Engine.all) == 3, "two wait for their next token on the other one"
        survivors[1].step()
        await one.up(1)
        assert len(Engine.all) == 4
        assert [engine.told[1:] for engine in survivors] == [[(0, 6)], [(0, 6)]]
        assert not Engine.all[3].told, "it begins with its own share"
        await one.step(60)
        assert all(one.tokens[request_id] == list(range(40)) for request_id in ids)

    one.run(main)


def test_aborts_end_the_waiting(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        one.engines[0].kill()
        await until(lambda: one.where() == [0, 4])
        for request_id in "abcd":
            one.client.abort_request(request_id)
        await one.up(0)

    one.run(main)


def test_it_does_not_wait_for_ever(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "CATCH_UP_SECONDS", 0.001)
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        one.engines[0].kill()
        await one.up(0)
        assert one.engines[1].told == [(1, 2), (0, 4)]
        assert not one.tokens

    one.run(main)


def test_when_the_last_one_dies_too_nobody_is_waited_for(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        one.engines[0].kill()
        await until(lambda: one.where() == [0, 4])
        one.engines[1].kill()
        await one.up(0, 1)
        await one.step(60)
        assert one.ended == set("abcd")

    one.run(main)


def test_a_suspect_does_not_wait_for_the_others_twice(fleet: Callable[..., Fleet]) -> None:
    one = fleet(3)

    async def main() -> None:
        one.add(*"abc")
        one.add(POISON)
        one.engines[0].step()
        await until(
            lambda: not one.engines[0].is_alive and POISON in {**one.engines[1].requests, **one.engines[2].requests}
        )
        suspect = next(engine for engine in one.engines if POISON in engine.requests)
        suspect.step()
        await until(
            lambda: len(Engine.all) == 5
        )  # without a step of anybody: it waits for this engine, and nobody else

    one.run(main)


def test_those_who_stay_catch_up_with_what_one_that_leaves_had(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add(*"abcd")
        await one.client.scale(1)
        assert one.engines[0].told == [(1, 2)]
        await one.step()
        await until(lambda: one.engines[0].told == [(1, 2), (0, 4)])

    one.run(main)


def test_without_requests_the_next_engine_is_started_at_once(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)

    async def main() -> None:
        one.add("a")
        one.engines[1].kill()
        await one.up(1)
        assert not one.engines[0].told

    one.run(main)
