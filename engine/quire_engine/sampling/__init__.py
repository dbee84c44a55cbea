"""Sampling: from logits to the next token of every request."""

from quire_engine.sampling.metadata import SamplingMetadata
from quire_engine.sampling.sampler import SampledTokens, Sampler, SamplerOutput

__all__ = ["SampledTokens", "Sampler", "SamplerOutput", "SamplingMetadata"]
