"""The paged KV cache as bookkeeping: which block belongs to whom. Holds no tensor and never imports torch."""

from quire_engine.kv_cache.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from quire_engine.kv_cache.manager import KVCacheManager

__all__ = ["BlockPool", "FreeKVCacheBlockQueue", "KVCacheBlock", "KVCacheManager"]
