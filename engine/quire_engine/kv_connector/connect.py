"""Connects the two halves of a KV connector when an engine starts."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import cast

from quire_engine.config import EngineCoreConfig, TierConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.kv_connector.block_index import BlockIndex
from quire_engine.kv_connector.block_store import ListedStore, StoredBlocks
from quire_engine.kv_connector.board import TransferBoard
from quire_engine.kv_connector.connector_scheduler import ConnectorScheduler
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.kv_connector.namespace import describe_namespace, namespace_of
from quire_engine.kv_connector.tiered_store import TieredIndex, open_store
from quire_engine.messages import ConnectKV, CountStateParts, DescribeKV, WorkerCall

logger = logging.getLogger(__name__)


def connect(
    config: EngineCoreConfig,
    max_model_len: int,
    kv_cache: KVCacheManager,
    board: TransferBoard,
    call_ranks: Callable[[WorkerCall], list[int]],
    num_loads: int = 0,
) -> tuple[ConnectorScheduler, str]:
    """Open the store of this engine's blocks, here and on the ranks. One on another host may be unreachable.

    Args:
        config: the engine core's, with a connector.
        max_model_len: of the model.
        kv_cache: the scheduler's.
        board: of the executor.
        call_ranks: makes a call to all ranks.
        num_loads: that the board has seen: numbers of loads are not used twice.

    Returns:
        The scheduler's half, and what the blocks depend on, in JSON.

    Raises:
        ValueError: the store cannot be used.
    """
    transfer = config.cache.kv_transfer_config
    assert transfer is not None
    try:
        description = describe_namespace(config, max_model_len, call_ranks(DescribeKV()))
    except OSError as error:
        raise ValueError(f"the checkpoint cannot be read: {error}") from None
    if not kv_cache.groups.keep_everything:
        description["groups"] = kv_cache.groups.layers  # a stored block has them one after the other
    num_state_parts = max(call_ranks(CountStateParts())) if kv_cache.groups.has_states else 1
    if kv_cache.groups.has_states:
        description["state_parts"] = num_state_parts
    namespace, text = namespace_of(description), json.dumps(description, indent=2) + "\n"
    opened = []
    for tier in transfer.tiers:
        with _naming(tier):
            store = open_store(tier, config.cache.kv_memory, namespace, 0)
            if isinstance(store, FolderStore):
                store.describe(text)
        opened.append((tier, store))
    block_bytes = call_ranks(ConnectKV(namespace, num_state_parts))
    indexes: list[StoredBlocks] = []
    for tier, store in opened:
        if tier.tier == "memory":
            from quire_engine.kv_connector.memory_store import MemoryIndex, MemoryStore

            assert isinstance(store, MemoryStore)
            with _naming(tier):
                store.divide(max(block_bytes))
            indexes.append(MemoryIndex(store))
        else:  # a remote store may be unreachable now, and is described later
            description_left = text if tier.tier == "remote" else None
            indexes.append(BlockIndex(cast("ListedStore", store), description=description_left))
    index = indexes[0] if len(indexes) == 1 else TieredIndex(indexes)
    places = ", then ".join(store.place for _, store in opened)
    logger.info("KV blocks are kept in %s; %d bytes each", places, sum(block_bytes))
    connector = ConnectorScheduler(
        transfer, kv_cache, index, board, block_bytes, num_loads=num_loads, num_state_parts=num_state_parts
    )
    return connector, json.dumps(description, sort_keys=True)


@contextlib.contextmanager
def _naming(tier: TierConfig) -> Iterator[None]:
    """Name the setting in errors."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{tier.place_setting}, which cannot be used: {error}") from None
