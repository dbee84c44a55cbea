"""How many KV blocks a number of bytes holds."""

from collections.abc import Iterable

from quire_engine.kv_cache import KVCacheGroups
from quire_engine.models.base import AttentionSpec

__all__ = ["block_bytes", "num_blocks_for"]


def block_bytes(specs: Iterable[AttentionSpec], block_size: int, dtype_bytes: int) -> int:
    """Bytes of one block over all layers: what each KV head keeps for each of its tokens."""
    return sum(spec.num_caches * spec.num_kv_heads * spec.head_size for spec in specs) * block_size * dtype_bytes


def num_blocks_for(
    *,
    available_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    groups: KVCacheGroups,
) -> int:
    """Blocks that fit, and no more than `max_num_seqs` requests of full length could ever use.

    With several groups of layers a block is one of any of them, so a request needs more of them, which are smaller.

    Raises:
        ValueError: not even one block fits.
    """
    per_request = groups.max_blocks(max_model_len, block_size, max_num_batched_tokens)
    num_blocks = min(available_bytes // bytes_per_block, per_request * max_num_seqs)
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory_bytes: one block of {block_size} tokens takes {bytes_per_block} bytes and only "
            f"{available_bytes} are available; one request of max_model_len={max_model_len} takes "
            f"{per_request * bytes_per_block}"
        )
    return num_blocks
