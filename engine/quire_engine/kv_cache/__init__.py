"""Bookkeeping of the paged KV cache: which blocks each request holds. Holds no tensors and never imports torch."""

from quire_engine.kv_cache.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from quire_engine.kv_cache.groups import ONE_GROUP, KVCacheGroups
from quire_engine.kv_cache.manager import KVCacheManager
from quire_engine.kv_cache.state import (
    STATE,
    TOKENS,
    AttentionSpec,
    RecurrentSpec,
    StateSpec,
    StateTensor,
    block_bytes,
)

__all__ = [
    "ONE_GROUP",
    "STATE",
    "TOKENS",
    "AttentionSpec",
    "BlockPool",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheGroups",
    "KVCacheManager",
    "RecurrentSpec",
    "StateSpec",
    "StateTensor",
    "block_bytes",
]
