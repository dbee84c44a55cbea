"""CachedSequence: what the KV cache has to know of a request."""

from typing import Protocol

from quire_engine.kv_cache.hashing import MultimodalHash
from quire_engine.sampling_params import SamplingParams

__all__ = ["CachedSequence"]


class CachedSequence(Protocol):
    """Tokens that are being computed, and what their blocks depend on besides; the scheduler's `Request` is one."""

    request_id: str
    sampling_params: SamplingParams
    """Its cache salt."""
    all_token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]
    """Of each full block, as far as it was needed so far; filled in here."""
    lora_id: str | None
    mm_hashes: list[MultimodalHash]
    no_allocation_until: int
    """Up to this many tokens `allocate_slots`, which sets it, has no block to add and none that has become full."""

    @property
    def num_tokens(self) -> int:
        """Of `all_token_ids`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token has to be computed, cached or not."""
