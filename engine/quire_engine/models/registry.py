"""Architecture name of `config.json` → model class."""

from quire_engine.models.checkpoint import ARCHITECTURES
from quire_engine.models.llama import LlamaForCausalLM

__all__ = ["MODELS"]

MODELS = {"LlamaForCausalLM": LlamaForCausalLM}

assert set(MODELS) == set(ARCHITECTURES)
