"""CachedSequence: what the KV cache needs to know about a request."""

from typing import Protocol

from quire_engine.messages import PromptPart
from quire_engine.sampling_params import SamplingParams


class CachedSequence(Protocol):
    """A request's tokens, and what else its blocks depend on; the scheduler's `Request` implements it."""

    request_id: str
    sampling_params: SamplingParams
    """Only the cache salt is used."""
    all_token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]
    """Of each full block, as far as needed so far; the KV cache manager fills it in."""
    lora_id: str | None
    prompt_parts: list[PromptPart]
    no_allocation_until: int
    """Up to this many tokens `allocate_slots`, which sets it, has no block to add and none that becomes full."""

    @property
    def num_tokens(self) -> int:
        """Length of `all_token_ids`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token has to be computed, cached or not."""
