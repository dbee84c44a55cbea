"""Maps the architecture name in `config.json` to the family that reads the rest of the file."""

from importlib import import_module
from typing import Any

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Architecture → file in `models/families/`."""
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def read_options(architecture: str, fields: Fields) -> DecoderOptions:
    """Read the family's options from `config.json`.

    Args:
        architecture: one of `ARCHITECTURES`.
        fields: of `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    options: DecoderOptions = _family(architecture).read_options(fields)
    return options


def with_defaults(architecture: str, fields: Fields) -> Fields:
    """The same fields, and for those that are missing the family's own defaults, where these are not everyone's.

    Args:
        architecture: one of `ARCHITECTURES`.
        fields: of `config.json`.
    """
    given = {name: value for name, value in fields.values.items() if value is not None}
    return Fields(fields.path, {**fields.values, **getattr(_family(architecture), "DEFAULTS", {}), **given})


def _family(architecture: str) -> Any:
    return import_module(f"quire_engine.models.families.{ARCHITECTURES[architecture]}")
