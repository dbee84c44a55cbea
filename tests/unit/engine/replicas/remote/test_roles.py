"""Roles on several hosts: who may join as what, and that all have one place for their blocks."""

from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import KVTransferConfig
from quire_engine.errors import EngineError
from quire_engine.ipc.keys import add_peers
from quire_engine.messages import EngineCoreRequest
from quire_engine.replicas.remote.engine_digest import describe_store
from quire_engine.sampling_params import SamplingParams
from support.engines import until
from support.fleet import Engine
from support.remote import Hosts, RemoteFleet, serve

LONG = 20
"""Tokens of a prompt with a block to hand over."""


def shared(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def remote(key_file: Path) -> dict[str, Any]:
    extra = {"address": "127.0.0.1:1", "key_file": str(key_file)}
    return {"kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra}


@pytest.fixture
def roles(tmp_path: Path) -> dict[str, Any]:
    return {"disaggregation": {"prefill": 1, "decode": 1}, "kv_transfer_config": shared(tmp_path / "kv")}


def add(front: RemoteFleet, *request_ids: str) -> None:
    for request_id in request_ids:
        request = EngineCoreRequest(request_id, list(range(LONG)), SamplingParams(max_tokens=20))
        front.client.add_request(request)


async def ended(front: RemoteFleet, *request_ids: str) -> None:
    while not front.ended >= set(request_ids):
        await front.step()
    assert all(front.tokens[request_id] == list(range(20)) for request_id in request_ids)


def test_the_front_does_all_until_a_host_joins_and_after_it_has_left(hosts: Hosts, roles: dict[str, Any]) -> None:
    async def main(front: RemoteFleet) -> None:
        add(front, "a")
        await front.step(3)
        assert len(front.tokens["a"]) == 3, "its end at the first token would be for nobody"
        running = hosts.run(hosts.engine(1, 2, **roles))
        await front.joined()
        add(front, "b", "c")
        await until(lambda: len(front.engines[0].requests) == 3)
        await front.step()
        await until(lambda: front.engines[1].requests.keys() == {"b", "c"})
        assert all(request.was_prefilled for request in front.engines[1].requests.values())
        await front.step(2)
        await hosts.end(running)
        await until(lambda: front.engines[0].requests.keys() == {"a", "b", "c"})
        add(front, "d")
        await ended(front, *"abcd")

    front = serve(hosts, main, 2, **roles)
    assert front.counted.num_requests_moved == 2


def test_a_rank_beyond_those_that_are_counted_decodes(hosts: Hosts, roles: dict[str, Any]) -> None:
    more = {**roles, "data_parallel_max_size": 4}

    async def main(front: RemoteFleet) -> None:
        hosts.run(hosts.engine(3, 2, **more))
        await front.joined(3)
        add(front, "a", "b")
        await front.step()
        await until(lambda: front.engines[1].requests.keys() == {"a", "b"})
        await ended(front, "a", "b")

    serve(hosts, main, 2, **more)


@pytest.mark.parametrize("what", ["roles", "folder", "connector", "store"])
def test_one_that_would_not_find_the_blocks_ends_and_says_why(
    hosts: Hosts, roles: dict[str, Any], tmp_path: Path, what: str
) -> None:
    for name in ("one", "same", "another"):
        add_peers(tmp_path / f"{name}.key", ["11" * 32 if name != "another" else "22" * 32])
    own, others, message = {
        "roles": (
            {**roles, "disaggregation": {"prefill": 1, "decode": 2}},
            {"disaggregation": {"prefill": 2, "decode": 1}},
            "disaggregation is .*; give both the same",
        ),
        "folder": (
            roles,
            {"kv_transfer_config": shared(tmp_path / "other")},
            "another place on .*; mount one folder on",
        ),
        "connector": (roles, {"kv_transfer_config": remote(tmp_path / "one.key")}, "let both ask one store"),
        "store": (
            {**roles, "kv_transfer_config": remote(tmp_path / "one.key")},
            {"kv_transfer_config": remote(tmp_path / "another.key")},
            "another place on .*key 2222.* than at the front .*key 1111",
        ),
    }[what]

    num_replicas = 3 if what == "roles" else 2

    async def main(front: RemoteFleet) -> None:
        engine = hosts.engine(1, num_replicas, **{**own, **others})
        with pytest.raises(EngineError, match=message):
            await hosts.run(engine)
        assert len(Engine.all) == 1, "it did not start its engine"
        if what == "store":
            hosts.run(hosts.engine(1, 2, **{**own, "kv_transfer_config": remote(tmp_path / "same.key")}))
            await front.joined()

    serve(hosts, main, num_replicas, **own)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("computed_with", "OMP_NUM_THREADS"),
        ("checkpoint", "rsync -t"),
        ("dtype", "give both the same model.json"),
        ("kv_cache_dtype", "give both the same model.json"),
    ],
)
def test_one_that_computes_other_blocks_ends_and_says_why(
    hosts: Hosts, roles: dict[str, Any], name: str, message: str
) -> None:
    said: list[int] = []

    class OtherEngine(Engine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.ready.kv_namespace = f'{{"{name}": 1}}'

    async def main(front: RemoteFleet) -> None:
        assert front.client._listener is not None
        front.client._listener._like.kv_namespace = f'{{"{name}": 0}}'
        engine = hosts.engine(1, 2, **roles)
        engine._make_link, engine._on_joined = OtherEngine, said.append  # type: ignore[assignment]
        with pytest.raises(EngineError, match=rf"{name} differs at the front and on .*{message}"):
            await hosts.run(engine)
        assert not said, "nobody is told that it has joined"

    serve(hosts, main, 2, **roles)


def test_a_folder_is_the_same_under_all_its_names(tmp_path: Path) -> None:
    folder, link = tmp_path / "kv", tmp_path / "link"
    first = describe_store(KVTransferConfig.from_value(shared(folder)))
    link.symlink_to(folder)
    assert describe_store(KVTransferConfig.from_value(shared(link))) == first
    assert describe_store(KVTransferConfig.from_value(shared(tmp_path / "other"))) != first
    assert [path.name for path in folder.iterdir()] == ["number"], "nothing else is left"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"shared_storage_path is .*file', which cannot be used: "):
        describe_store(KVTransferConfig.from_value(shared(tmp_path / "file")))
