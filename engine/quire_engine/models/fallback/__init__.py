"""Decoders of transformers' own modelling code, with our attention, KV cache and sampler."""
