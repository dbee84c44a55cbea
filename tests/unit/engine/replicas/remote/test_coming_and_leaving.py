"""Engines of other hosts that come and leave while the front serves, and replicas of the front's own that do so too."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from quire_engine.errors import EngineError, ScalingError
from quire_engine.ipc.keys import add_peers, read_keys
from quire_engine.replicas.remote import front_connection, remote_replica
from quire_engine.replicas.remote.wire import MessageType
from quire_engine.replicas.restart_policy import RestartPolicy
from support.engines import until
from support.fleet import POISON, Engine
from support.remote import Hosts, RemoteFleet, serve, tokens_are_right, until_all_have_ended

OPEN: dict[str, Any] = {"data_parallel_max_size": 4}
"""A front that has one engine, and lets others have ranks 1 to 3."""


def present(front: RemoteFleet) -> list[int]:
    return [index for index, replica in enumerate(front.client.replicas) if replica.is_present]


@pytest.fixture
def no_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends, ends without a word: its host has lost its power."""
    send = front_connection.FrontConnection.send

    def send_most(self: front_connection.FrontConnection, kind: MessageType, *frames: bytes) -> None:
        if kind is not MessageType.LEAVING:
            send(self, kind, *frames)

    monkeypatch.setattr(front_connection.FrontConnection, "send", send_most)


def test_one_that_nobody_counts_on_comes_and_leaves_and_comes_again(hosts: Hosts) -> None:
    ids, changes = [str(number) for number in range(6)], []

    async def main(front: RemoteFleet) -> None:
        front.client.on_change = lambda: changes.append(present(front))
        assert present(front) == [0], "nobody is missed"
        assert front.client.ready.num_blocks == 64
        running = hosts.run(hosts.engine(3, 1, **OPEN))
        await front.joined(3)
        assert changes == [[0, 3]]
        assert front.client.ready.num_blocks == 128
        front.add(*ids)
        await until(lambda: front.where() == [3, 3])
        await front.step(5)
        await hosts.end(running)
        await until(lambda: present(front) == [0])
        await until(lambda: front.client._router.num_requests(0) == 6)
        assert changes == [[0, 3], [0]]
        assert front.client.ready.num_blocks == 64
        assert front.client.outage is None
        await until_all_have_ended(front, *ids)
        assert tokens_are_right(front, *ids)
        hosts.run(hosts.engine(3, 1, **OPEN))
        await front.joined(3)
        front.add("new", "newer")
        await until(lambda: front.where() == [1, 1])
        await until_all_have_ended(front, "new", "newer")
        assert changes[2:] == [[0, 3]]

    counted = serve(hosts, main, 1, **OPEN).counted
    assert (counted.num_requests_moved, counted.num_requests_replayed, counted.num_engine_restarts) == (3, 0, 0)


def test_what_a_host_takes_away_goes_on_although_crashes_are_not_replayed(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        running = hosts.run(hosts.engine(2, 1, **OPEN))
        await front.joined(2)
        front.add("a", "b")
        await until(lambda: front.where() == [1, 1])
        await hosts.end(running)
        await until_all_have_ended(front, "a", "b")
        assert not front.errors
        assert tokens_are_right(front, "a", "b")

    serve(hosts, main, 1, **OPEN, replay_on_crash=False)


def test_one_that_is_counted_on_is_missed_from_the_start_and_not_after_it_was_taken_away(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        assert present(front) == [0, 1], "it is down until it has joined"
        running = hosts.run(hosts.engine())
        await front.joined()
        await hosts.end(running)
        await until(lambda: present(front) == [0])
        hosts.run(hosts.engine())
        await front.joined()
        assert present(front) == [0, 1]

    serve(hosts, main)


@pytest.mark.usefixtures("no_goodbyes")
def test_one_that_is_lost_is_missed_and_in_the_end_forgotten_if_nobody_counts_on_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(front: RemoteFleet) -> None:
        for rank in (1, 3):
            hosts.run(hosts.engine(rank, 2, **OPEN))
        await front.joined(1, 3)
        await hosts.end()
        await until(lambda: not any(front.client.replicas[rank].is_alive for rank in (1, 3)))
        assert present(front) == [0, 1, 3], "both are down, and operators should know"
        monkeypatch.setattr(remote_replica, "MISS_SECONDS", 0.05)
        hosts.run(hosts.engine(3, 2, **OPEN))
        await front.joined(3)
        await hosts.end()
        await until(lambda: present(front) == [0, 1])

    serve(hosts, main, 2, **OPEN)


def test_one_that_is_taken_away_before_it_could_serve_is_not_missed(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        Engine.may_start.clear()
        running = hosts.run(hosts.engine())
        await until(lambda: len(Engine.all) == 2)
        await hosts.end(running)
        await until(lambda: present(front) == [0])
        Engine.may_start.set()
        hosts.run(hosts.engine())
        await front.joined()

    serve(hosts, main)


def test_one_that_has_died_and_is_not_to_be_started_again_is_not_missed_either(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartPolicy, "delay_after_death", lambda self: 600.0)

    async def main(front: RemoteFleet) -> None:
        engine = hosts.engine()
        running = hosts.run(engine)
        await front.joined()
        front.engines[1].kill()
        await until(lambda: not front.client.replicas[1].is_alive)
        assert present(front) == [0, 1]
        await until(lambda: engine._front is None)
        await hosts.end(running)
        await until(lambda: present(front) == [0])

    serve(hosts, main)


def test_a_suspect_waits_for_a_while_where_it_was_and_then_nobody_misses_the_engine(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_replica, "HOLD_SECONDS", 0.05)

    async def main(front: RemoteFleet) -> None:
        running = hosts.run(hosts.engine())
        await front.joined()
        front.add(POISON)
        while not front.client.replicas[1].is_isolating:
            await front.step()
        await front.joined()
        await hosts.end(running)
        await until(lambda: POISON in front.ended)
        await until(lambda: present(front) == [0])

    serve(hosts, main)


def test_a_host_may_be_trusted_and_refused_while_the_front_serves(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    front_key, mine = read_keys(hosts.engine_keys).peers[0], tmp_path / "new-host.json"
    add_peers(mine, [front_key.hex()])
    before = hosts.front_keys.read_bytes()

    async def main(front: RemoteFleet) -> None:
        engine = hosts.engine(1, 1, **OPEN)
        engine._keys = read_keys(mine)
        running = hosts.run(engine)
        await until(lambda: "have it do so with: quire keys host FILE --trust" in caplog.text)
        add_peers(hosts.front_keys, [read_keys(mine).public_key.hex()])
        await front.joined(1)
        await hosts.end(running)
        replacement = tmp_path / "replacement"
        replacement.write_bytes(b"no JSON")
        replacement.chmod(0o600)
        replacement.replace(hosts.front_keys)
        running = hosts.run(hosts.engine(2, 1, **OPEN))
        await front.joined(2)
        assert "whom this host trusts stays as it was: data_parallel_key_file" in caplog.text
        replacement.write_bytes(before)
        replacement.chmod(0o600)
        replacement.replace(hosts.front_keys)
        caplog.clear()
        again = hosts.engine(1, 1, **OPEN)
        again._keys = read_keys(mine)
        hosts.run(again)
        await until(lambda: "the front does not trust this host" in caplog.text)
        assert front.client.replicas[2].is_alive

    serve(hosts, main, 1, **OPEN)


def test_no_rank_is_let_in_beyond_the_highest(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        own = hosts.engine(3, 1, **OPEN)
        own._rank = 4
        with pytest.raises(EngineError, match=r"these are 1 to 3 \(.*data_parallel_max_size\)"):
            await hosts.run(own)

    serve(hosts, main, 1, **OPEN)


def test_the_fronts_own_are_scaled_beside_those_of_other_hosts(hosts: Hosts) -> None:
    ids = [str(number) for number in range(10)]

    async def main(front: RemoteFleet) -> None:
        client = front.client
        hosts.run(hosts.engine(2, 3))
        await front.joined(2)
        await client.scale(3)
        assert present(front) == [0, 1, 2, 3, 4], "rank 1 is missed as before, and stays free for its host"
        assert [engine.index for engine in Engine.all] == [0, 2, 3, 4]
        new = Engine.all[-1].config.parallel
        assert (new.num_local_replicas, new.data_parallel_rank - new.data_parallel_start_rank) == (3, 2)
        front.add(*ids)
        await until(lambda: sorted(front.where()) == [2, 2, 3, 3])
        await front.step(3)
        hosts.run(hosts.engine(1, 3))
        await front.joined(1)
        await client.scale(1)
        assert present(front) == [0, 1, 2]
        assert len(client.replicas) == 3
        assert [engine.has_ended for engine in Engine.all if engine.index > 2] == [True, True]
        await until_all_have_ended(front, *ids)
        assert tokens_are_right(front, *ids)
        await client.scale(2)
        assert present(front) == [0, 1, 2, 3]
        Engine.fails_to_start = {4}
        with pytest.raises(ScalingError, match="it cannot start"):
            await client.scale(3)
        front.add("x", "y", "z", "w")
        await until(lambda: front.where()[:4] == [1, 1, 1, 1])
        await until_all_have_ended(front, "x", "y", "z", "w")

    counted = serve(hosts, main, 3).counted
    assert counted.num_requests_moved > 0
    assert (counted.num_requests_replayed, counted.num_engine_restarts) == (0, 0)


def test_one_of_the_fronts_first_leaves_and_its_place_is_taken_by_the_next(hosts: Hosts) -> None:
    both: dict[str, Any] = {"data_parallel_size_local": 2}

    async def main(front: RemoteFleet) -> None:
        client = front.client
        hosts.run(hosts.engine(2, 3))
        await front.joined(2)
        front.add(*"abcdef")
        await until(lambda: front.where() == [2, 2, 2])
        await front.step(3)
        await client.scale(1)
        assert present(front) == [0, 2]
        assert client._router.num_requests(1) == 0
        assert client.ready.num_blocks == 128
        front.add("g")
        await until_all_have_ended(front, *"abcdefg")
        assert tokens_are_right(front, *"abcdefg")
        await client.scale(3)
        assert present(front) == [0, 1, 2, 3]
        front.add(*"hijk")
        await until(lambda: front.where() == [1, 1, 1, 1])
        await until_all_have_ended(front, *"hijk")

    serve(hosts, main, 3, **both)


def test_comings_leavings_kills_and_commands_at_random_lose_change_and_repeat_nothing(hosts: Hosts) -> None:
    chance = random.Random(11)
    limits: dict[str, int] = {}
    seen: set[tuple[int, ...]] = set()
    running: dict[int, asyncio.Task[None]] = {}

    async def main(front: RemoteFleet) -> None:
        for number in range(400):
            if chance.random() < 0.5:
                limits[str(number)] = chance.randint(1, 60)
                front.add(str(number), max_tokens=limits[str(number)])
            if chance.random() < 0.1:
                rank = chance.randint(1, 3)
                if rank in running:
                    await hosts.end(running.pop(rank))
                else:
                    running[rank] = hosts.run(hosts.engine(rank, 2, **OPEN))
                    if chance.random() < 0.7:
                        await front.joined(rank)
            if chance.random() < 0.05:
                await front.client.scale(chance.randint(1, 3))
            seen.add(tuple(present(front)))
            await front.step()
            for index, engine in enumerate(front.engines):
                if index > 0 and engine.is_alive and chance.random() < 0.01:
                    engine.kill()
        while not front.ended >= set(limits):
            await front.step()
        assert not front.errors
        for request_id, limit in limits.items():
            assert front.tokens[request_id] == list(range(limit)), request_id
        assert not front.client._router._routes

    counted = serve(hosts, main, 2, **OPEN).counted
    assert len(seen) > 8
    assert counted.num_requests_moved > 20
