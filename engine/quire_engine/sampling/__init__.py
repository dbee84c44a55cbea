"""Sampling: from logits to the next token of every request."""

from quire_engine.sampling.rejection import draft_positions, verify_drafts
from quire_engine.sampling.sampler import DraftsToVerify, SampledTokens, Sampler, SamplerOutput, SamplingMetadata

__all__ = [
    "DraftsToVerify", "SampledTokens", "Sampler", "SamplerOutput", "SamplingMetadata", "draft_positions",
    "verify_drafts",
]  # fmt: skip
