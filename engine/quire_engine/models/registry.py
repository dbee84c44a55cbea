"""Maps the architecture name in `config.json` to the family that reads the rest of the file."""

from importlib import import_module

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

__all__ = ["ARCHITECTURES", "read_options"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architecture → file in `models/families/`."""


def read_options(architecture: str, fields: Fields) -> DecoderOptions:
    """Read the family's options from `config.json`.

    Args:
        architecture: one of `ARCHITECTURES`.
        fields: of `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    family = import_module(f"quire_engine.models.families.{ARCHITECTURES[architecture]}")
    options: DecoderOptions = family.read_options(fields)
    return options
