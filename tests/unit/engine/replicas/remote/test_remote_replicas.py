"""Engines of another host over real TCP connections on loopback; they compute nothing, and what they do is theirs."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from quire_engine.errors import EngineError
from quire_engine.ipc import curve
from quire_engine.ipc.keys import add_peers, make_keys
from quire_engine.messages import RequestType, Sleep, WakeUp
from quire_engine.replicas.remote import front_connection, listener, remote_replica
from quire_engine.replicas.remote.front_connection import FrontLostError
from quire_engine.replicas.remote.wire import MessageType
from support.engines import until
from support.fleet import POISON, Engine
from support.remote import Hosts, RemoteFleet, serve, tokens_are_right, until_all_have_ended


def test_a_front_serves_alone_and_with_whoever_joins(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        front.add("a")
        await front.step(3)
        assert front.client.is_alive
        assert not front.client.replicas[1].is_alive
        assert "no engine has joined as data-parallel rank 1 yet" in (front.client.replicas[1].outage or "")
        assert front.client.ready.num_blocks == 128
        hosts.run(hosts.engine())
        await front.joined()
        assert front.engines[1].num_blocks == 64, "as large as the front's own"
        assert front.client.replicas[1].host.endswith("(127.0.0.1)")
        assert front.client.replicas[1].pid == front.engines[1].pid
        assert front.counted.num_engine_restarts == 0
        front.add("b", "c", "d")
        await until(lambda: front.where() == [2, 2])
        await until_all_have_ended(front, *"abcd")
        assert tokens_are_right(front, *"abcd")

    serve(hosts, main)


@pytest.mark.parametrize("how", ["the engine is killed", "its host is gone", "it says nothing any more"])
def test_what_an_engine_had_goes_on_at_once_and_it_may_join_again(
    hosts: Hosts, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, beats, beat = [str(number) for number in range(6)], asyncio.Event(), front_connection.FrontConnection.send

    def send(self: front_connection.FrontConnection, kind: MessageType, *frames: bytes) -> None:
        if kind is not MessageType.LEAVING and (beats.is_set() or kind is not MessageType.BEAT):
            beat(self, kind, *frames)

    monkeypatch.setattr(front_connection.FrontConnection, "send", send)

    async def main(front: RemoteFleet) -> None:
        beats.set()
        running = hosts.run(hosts.engine())
        await front.joined()
        front.add(*ids)
        await until(lambda: front.where() == [3, 3])
        await front.step(5)
        if how == "the engine is killed":
            front.engines[1].kill()
        elif how == "its host is gone":
            await hosts.end(running)
        else:
            beats.clear()
            monkeypatch.setattr(listener, "MAX_MISSED_BEATS", 5)
        await until(lambda: not front.client.replicas[1].is_alive)
        await until(lambda: front.client._router.num_requests(0) == 6)
        await until_all_have_ended(front, *ids)
        assert tokens_are_right(front, *ids)
        assert front.counted.num_requests_replayed == 3
        beats.set()
        if how == "its host is gone":
            hosts.run(hosts.engine())
        await front.joined()
        front.add("new", "newer")
        await until_all_have_ended(front, "new", "newer")
        assert front.counted.num_engine_restarts >= 1

    serve(hosts, main)


def test_an_engine_that_loses_its_front_gives_up_and_joins_the_next(hosts: Hosts) -> None:
    async def main() -> None:
        first = RemoteFleet(2, **hosts.settings())
        first.client.start()
        hosts.run(hosts.engine())
        await first.joined()
        first.add("a", "b")
        remote = first.engines[1]
        await until(lambda: len(remote.requests) == 1)
        first.client.shutdown()
        await until(lambda: not remote.requests)
        second = RemoteFleet(2, **hosts.settings())
        second.client.start()
        await second.joined()
        assert second.engines[1] is remote, "the engine stays, with its weights"
        second.add("a", "b")
        await until(lambda: len(remote.requests) == 1)
        await until_all_have_ended(second, "a", "b")
        assert tokens_are_right(second, "a", "b")
        second.client.shutdown()
        await hosts.end()

    asyncio.run(main())


def test_a_request_that_kills_engines_is_found_and_those_of_others_are_not_blamed(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        hosts.run(hosts.engine())
        await front.joined()
        front.add("a", "b", POISON)
        await until_all_have_ended(front, "a", "b", POISON)
        assert front.errors.keys() == {POISON}
        assert "again and again" in (front.errors[POISON].error or "")

    serve(hosts, main)


def test_one_that_is_not_there_sleeps_with_the_others_when_it_joins(hosts: Hosts) -> None:
    async def main(front: RemoteFleet) -> None:
        await front.client.calls.call(Sleep(1))
        assert front.client.calls.sleep_level == 1
        hosts.run(hosts.engine())
        await front.joined()
        await until(lambda: front.engines[1].is_asleep)
        await front.client.calls.call(WakeUp())
        assert not front.engines[1].is_asleep

    serve(hosts, main)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"data_parallel_size": 3},
            "data_parallel_size is 2 at the front and 3 on .*; give both the same model.json",
        ),
        ({"block_size": 32}, "block_size is 16 at the front and 32 on .*; give both the same model.json"),
        ({"seed": 7}, "the checkpoint on .* is not the front's"),
    ],
)
def test_an_engine_that_would_give_other_tokens_ends_and_says_why(
    hosts: Hosts, others: dict[str, Any], message: str
) -> None:
    async def main(front: RemoteFleet) -> None:
        engine = hosts.engine(**others)
        with pytest.raises(EngineError, match=message):
            await hosts.run(engine)
        assert len(Engine.all) == 1, "it did not start its engine"

    serve(hosts, main)


def test_a_rank_is_for_one_engine_and_none_of_the_fronts_own_is_for_others(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(front: RemoteFleet) -> None:
        first = hosts.run(hosts.engine())
        await front.joined()
        hosts.run(hosts.engine())
        await until(lambda: "data-parallel rank 1 is taken by the engine on" in caplog.text)
        assert front.client.replicas[1].is_alive
        own = hosts.engine()
        own._rank = 0
        with pytest.raises(EngineError, match="rank 0 is none that engines of other hosts have: these are 1 "):
            await hosts.run(own)
        await hosts.end(first)
        await until(lambda: len(Engine.all) == 3)
        await front.joined()

    serve(hosts, main)


def test_strangers_are_refused_and_disturb_nothing(
    hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong keys of either side, other protocols, connections that say nothing or go away: all while requests run."""
    monkeypatch.setattr(curve, "HANDSHAKE_MS", 200)
    address = ("127.0.0.1", hosts.port)

    async def main(front: RemoteFleet) -> None:
        hosts.run(hosts.engine())
        await front.joined()
        front.add("a", "b")
        stranger, others = make_keys(), [hosts.engine(), hosts.engine()]
        others[0]._keys = replace(stranger, peers=hosts.keys.peers)  # knows the front, which does not know it
        others[1]._keys = replace(hosts.keys, peers=(stranger.public_key,))  # takes the front for another one
        for other in others:
            hosts.run(other)
        await until(lambda: stranger.public_key.hex() + " is not among the peers" in caplog.text)
        await until(lambda: "is no front with the public key that this host trusts" in caplog.text)
        await until(lambda: "the front does not trust this host; have it do so with: quire keys host" in caplog.text)
        silent = [strangers.enter_context(socket.create_connection(address)) for _ in range(20)]
        for _ in range(20):
            socket.create_connection(address).close()
        context: zmq.Context[Any] = zmq.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(f"tcp://127.0.0.1:{hosts.port}")
        plain.send_multipart([b"join", b"\x83"])
        silent[0].send(b"GET / HTTP/1.1\r\n\r\n" * 9)
        await until(lambda: all(has_ended(one) for one in silent))
        context.destroy(linger=0)
        await until_all_have_ended(front, "a", "b")
        assert tokens_are_right(front, "a", "b")
        assert front.client.replicas[1].is_alive
        assert len(Engine.all) == 2
        refused = [record for record in caplog.records if "was refused: " in record.message]
        assert 1 <= len(refused) <= 2, "once in a while, however many there are"

    with ExitStack() as strangers:
        front = serve(hosts, main)
    assert (front.counted.num_engine_restarts, front.counted.num_requests_replayed) == (0, 0)


def has_ended(one: socket.socket) -> bool:
    """Whether the other side has closed a connection."""
    one.setblocking(False)
    try:
        return not one.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_requests_that_only_it_may_get_do_not_wait_for_ever(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "HOLD_SECONDS", 0.05)

    async def main(front: RemoteFleet) -> None:
        hosts.run(hosts.engine())
        await front.joined()
        Engine.may_start.clear()
        front.add(POISON)
        while not front.client.replicas[1].is_isolating:  # it has killed both, and nobody else is to have it
            await front.step()
        await hosts.end()
        await until(lambda: POISON in front.ended)
        assert "joins as data-parallel rank 1" in (front.errors[POISON].error or "")
        Engine.may_start.set()
        await front.up(0)
        assert not front.engines[0].requests

    serve(hosts, main)


@pytest.mark.parametrize("turns", range(5))
def test_an_engine_that_is_told_to_end_does_so_whatever_its_front_says_just_then(hosts: Hosts, turns: int) -> None:
    async def main() -> None:
        context: zmq.Context[Any] = zmq.Context()
        silent = socket.create_server((hosts.host, hosts.port))
        front = front_connection.FrontConnection(context, hosts.host, hosts.port, hosts.keys)
        receiving = asyncio.ensure_future(front.receive())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        front._on_message([zmq.Frame(MessageType.BEAT.value)])
        for _ in range(turns):
            await asyncio.sleep(0)
        receiving.cancel()
        done, _ = await asyncio.wait((receiving,), timeout=30)
        receiving.cancel()
        front._close()
        context.destroy(linger=0)
        silent.close()
        assert done
        assert receiving.cancelled()

    asyncio.run(main())


def test_a_request_that_comes_after_the_end_of_a_session_is_not_taken(hosts: Hosts) -> None:
    """It continues elsewhere: the next engine of this host would compute it, too, and its tokens would come twice."""

    async def main() -> None:
        context: zmq.Context[Any] = zmq.Context()
        with socket.create_server((hosts.host, hosts.port)):
            front = front_connection.FrontConnection(context, hosts.host, hosts.port, hosts.keys)
            front.end("the engine has died")
            front._on_message([zmq.Frame(RequestType.ADD.value), zmq.Frame(b"a"), zmq.Frame(b"")])
            with pytest.raises(FrontLostError, match="the engine has died"):
                await front.receive()
            front._close()
        context.destroy(linger=0)

    asyncio.run(main())


def test_closing_waits_for_nobody_who_is_to_read_what_happened(hosts: Hosts) -> None:
    async def main() -> None:
        context: zmq.Context[Any] = zmq.Context()
        with socket.create_server((hosts.host, hosts.port)) as listening:
            front = front_connection.FrontConnection(context, hosts.host, hosts.port, hosts.keys)
            connection, _ = listening.accept()
            close_monitor = front._monitor.close

            def close_and_let_something_happen() -> None:
                close_monitor()
                connection.close()
                time.sleep(0.2)

            front._monitor.close = close_and_let_something_happen  # type: ignore[method-assign]
            closing = threading.Thread(target=front._close, daemon=True)
            closing.start()
            closing.join(60)
            assert not closing.is_alive()
        context.destroy(linger=0)

    asyncio.run(main())


def test_a_front_that_cannot_listen_says_why(hosts: Hosts, tmp_path: Path) -> None:
    def fails(match: str, **others: Any) -> None:
        with pytest.raises(ValueError, match=match):
            RemoteFleet(2, **{**hosts.settings(), **others})

    with socket.create_server(("127.0.0.1", hosts.port)):
        fails("Address already in use; another program listens there")
    fails("this host has no such address", data_parallel_address="192.0.2.250")
    fails("is no address and no name of a host", data_parallel_address="front..example")
    alone = tmp_path / "alone.json"
    add_peers(alone, [])
    fails("alone.json trusts nobody, so that no engine can join", data_parallel_key_file=str(alone))
