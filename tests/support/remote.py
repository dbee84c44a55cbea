"""Hosts of a model for tests: files of keys that trust each other, a front, and engines that join it over loopback."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from quire_engine.config import EngineConfig
from quire_engine.ipc.keys import HostKeys, add_peers, read_keys
from quire_engine.kv_connector.store_server import StoreServer
from quire_engine.messages import EngineCoreOutputs
from quire_engine.replicas.remote.engine_digest import describe_engine
from quire_engine.replicas.remote.headless import HeadlessEngine
from support.fleet import Engine, Fleet
from support.ports import unused_port

__all__ = [
    "Hosts",
    "RemoteEngine",
    "RemoteFleet",
    "serve",
    "store_server",
    "tokens_are_right",
    "trusting_hosts",
    "until_all_have_ended",
]


class RemoteEngine(Engine):
    """Stands in for the process of an engine on another host."""

    num_messages_waiting = 0

    def __init__(self, config: EngineConfig, num_blocks: int | None = None) -> None:
        super().__init__(config, num_blocks)
        self.ready = msgspec.structs.replace(self.ready, num_kv_cache_tokens=1000)

    def abort_request(self, request_id: str) -> None:
        super().abort_request(request_id)
        self.num_tokens.pop(request_id, None)
        self._outputs.put_nowait(EngineCoreOutputs(freed_request_ids=[request_id]))


class RemoteFleet(Fleet):
    """A front whose first engine is its own; the others have joined, or have not yet."""

    @property
    def engines(self) -> list[Engine]:
        """The present ones that there are, by rank."""
        latest = {engine.index: engine for engine in Engine.all}
        return [latest[rank] for rank in sorted(latest)]

    async def joined(self, *ranks: int) -> None:
        """Wait until they have."""
        await self.up(*(ranks or (1,)))


def trusting_hosts(folder: Path) -> tuple[Path, Path]:
    """Files of keys of two hosts that trust each other."""
    front, engine = folder / "front.json", folder / "engine.json"
    public_key = add_peers(front, []).public_key
    add_peers(front, [add_peers(engine, [public_key.hex()]).public_key.hex()])
    return front, engine


@contextmanager
def store_server(folder: Path, port: int = 0) -> Iterator[tuple[StoreServer, dict[str, Any]]]:
    """A store of KV blocks, and the setting of an engine that has it."""
    keys = folder / "keys"
    if not keys.exists():
        keys.mkdir()
        trusting_hosts(keys)
    server = StoreServer(
        folder / "blocks", 1 << 30, read_keys(keys / "front.json"), "127.0.0.1", port, keys / "front.json"
    )
    extra = {"address": server.endpoint.removeprefix("tcp://"), "key_file": str(keys / "engine.json")}
    try:
        yield server, {"kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra}
    finally:
        server.close()


@dataclass
class Hosts:
    """A front's settings, and engines of another host that compute nothing."""

    folder: Path
    host: str = "127.0.0.1"
    running: "list[asyncio.Task[None]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "config.json").write_text("{}")
        self.front_keys, self.engine_keys = trusting_hosts(self.folder)
        self.port = unused_port(self.host)

    @property
    def keys(self) -> HostKeys:
        """Of the engines' host."""
        return read_keys(self.engine_keys)

    def settings(self, num_replicas: int = 2, **others: Any) -> dict[str, Any]:
        """Of the front."""
        return {
            "model": str(self.folder), "load_format": "dummy", "data_parallel_size": num_replicas,
            "data_parallel_size_local": 1, "data_parallel_address": self.host, "data_parallel_rpc_port": self.port,
            "data_parallel_key_file": str(self.front_keys), **others,
        }  # fmt: skip

    def engine(self, rank: int = 1, num_replicas: int = 2, **others: Any) -> HeadlessEngine:
        """An engine that is to join."""
        front = EngineConfig.from_settings(self.settings(num_replicas, **others))
        config = front.for_headless(rank, data_parallel_size_local=1).for_replica(rank)
        make: Callable[..., Any] = RemoteEngine
        return HeadlessEngine(config, self.keys, describe_engine(config.core), make_link=make)

    def run(self, engine: HeadlessEngine) -> "asyncio.Task[None]":
        """Have it join, again and again."""
        self.running.append(asyncio.ensure_future(engine.run()))
        return self.running[-1]

    async def end(self, *tasks: "asyncio.Task[None]") -> None:
        """End some, or all."""
        ending = list(tasks or self.running)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def serve(hosts: Hosts, main: Callable[[RemoteFleet], Any], num_replicas: int = 2, **settings: Any) -> RemoteFleet:
    """A front, as long as `main` runs."""
    front = RemoteFleet(num_replicas, **hosts.settings(num_replicas, **settings))

    async def ended() -> None:
        try:
            await main(front)
        finally:
            await hosts.end()

    front.run(ended)
    return front


async def until_all_have_ended(front: RemoteFleet, *request_ids: str) -> None:
    """Have all engines compute until these requests have all their tokens."""
    deadline = time.monotonic() + 30
    while not front.ended >= set(request_ids):
        assert time.monotonic() < deadline, front.ended
        await front.step()


def tokens_are_right(front: RemoteFleet, *request_ids: str) -> bool:
    """Whether each has those that it would have got from an engine that nobody disturbs."""
    return all(front.tokens[request_id] == list(range(40)) for request_id in request_ids)
