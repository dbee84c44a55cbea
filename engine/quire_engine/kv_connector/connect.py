"""Connects the two halves when an engine starts."""

import json
import logging
from collections.abc import Callable

from quire_engine.config import EngineCoreConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.kv_connector.block_index import BlockIndex
from quire_engine.kv_connector.block_store import open_store
from quire_engine.kv_connector.board import TransferBoard
from quire_engine.kv_connector.connector_scheduler import ConnectorScheduler
from quire_engine.kv_connector.namespace import describe_namespace, namespace_of
from quire_engine.messages import ConnectKV, DescribeKV, WorkerCall

__all__ = ["connect"]

logger = logging.getLogger(__name__)


def connect(
    config: EngineCoreConfig,
    max_model_len: int,
    kv_cache: KVCacheManager,
    board: TransferBoard,
    call_ranks: Callable[[WorkerCall], list[int]],
) -> ConnectorScheduler:
    """Find the store of this engine's blocks, and have the ranks use it. One on another host may be away.

    Args:
        config: the engine core's, with a connector.
        max_model_len: of the model.
        kv_cache: the scheduler's.
        board: of the executor.
        call_ranks: makes a call to all ranks.

    Raises:
        ValueError: the model has layers that forget, or the store cannot be used.
    """
    transfer = config.cache.kv_transfer_config
    assert transfer is not None
    if not kv_cache.groups.keep_everything:
        raise ValueError(
            "kv_transfer_config is set, and this model has layers with a sliding window that keep only what they see: "
            "blocks that are saved have all layers; set disable_hybrid_kv_cache_manager to true, or leave it out"
        )
    try:
        description = describe_namespace(config, max_model_len, call_ranks(DescribeKV()))
        namespace = namespace_of(description)
        store = open_store(transfer, namespace, 0)
    except OSError as error:
        raise ValueError(f"{transfer.place_setting}, which cannot be used: {error}") from None
    text = json.dumps(description, indent=2) + "\n"
    try:
        if not transfer.is_remote:
            store.describe(text)
    except OSError as error:
        raise ValueError(f"{transfer.place_setting}, which cannot be used: {error}") from None
    index = BlockIndex(store, description=text if transfer.is_remote else None)
    block_bytes = call_ranks(ConnectKV(namespace))
    logger.info("KV blocks are kept in %s; %d bytes each", store.place, sum(block_bytes))
    scheduler = ConnectorScheduler(transfer, kv_cache, index, board, block_bytes)
    scheduler.namespace = json.dumps(description, sort_keys=True)
    return scheduler
