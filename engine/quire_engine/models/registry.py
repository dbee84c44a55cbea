"""Maps the architecture name in `config.json` to the family that reads the rest of the file."""

from importlib import import_module
from typing import Any

from quire_engine.models.fields import Fields
from quire_engine.models.options import ModelOptions

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Architecture → file in `models/families/`."""
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
}
"""Architecture of which the text model alone is served → what `model_type` its `text_config` may have; the first if it
has none."""


def read_family(architecture: str, fields: Fields) -> tuple[Fields, ModelOptions]:
    """Read the family's options from `config.json`.

    Args:
        architecture: one of `ARCHITECTURES`.
        fields: of `config.json`.

    Returns:
        The fields of the text model, with the family's own defaults for those that are missing; and its options.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    name = ARCHITECTURES[architecture]
    if architecture in TEXT_TYPES:
        types, fields = TEXT_TYPES[architecture], fields.text()
        name = fields.choice("model_type", types, types[0]).removesuffix("_text")
    family: Any = import_module(f"quire_engine.models.families.{name}")
    given = {name: value for name, value in fields.values.items() if value is not None}
    fields = fields.with_values({**fields.values, **getattr(family, "DEFAULTS", {}), **given})
    return fields, family.read_options(fields)
