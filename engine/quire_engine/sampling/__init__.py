"""Sampling: from logits to the next token of every request."""

from quire_engine.sampling.metadata import DraftsToVerify, SamplingMetadata
from quire_engine.sampling.rejection import draft_positions, verify_drafts
from quire_engine.sampling.sampler import SampledTokens, Sampler, SamplerOutput

__all__ = [
    "DraftsToVerify",
    "SampledTokens",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "draft_positions",
    "verify_drafts",
]
