"""Speculative decoding: the methods that draft tokens.

A method is a `Proposer`; those that run a model do so on the workers (`worker/drafting`). `scheduler/drafter.py`
decides how many of its drafts a step computes, the worker samples after each of them, and those that equal what is
sampled in their place are accepted. So no method changes a token, unless `acceptance` is `rejection`.
"""

from quire_engine.config import SpeculativeConfig
from quire_engine.scheduler.drafter import Proposer
from quire_engine.spec_decode.lookup import NgramProposer
from quire_engine.spec_decode.suffix import SuffixProposer

__all__ = ["make_proposer"]


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """The method that the settings name; None if it runs a model on the workers."""
    if config.method == "ngram":
        return NgramProposer(*config.lookup_range)
    if config.checkpoint is not None:
        return None
    return SuffixProposer(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
