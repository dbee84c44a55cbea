"""Maps the architecture name in `config.json` to the family that reads the rest of the file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families import (
    bert,
    cohere,
    deepseek,
    ernie,
    exaone,
    gated_delta,
    gemma,
    glm,
    gpt_neox,
    gpt_oss,
    granite,
    griffin,
    hunyuan,
    kimi,
    lfm,
    llama,
    mamba,
    nemotron,
    nemotron_h,
    qwen,
    zamba,
)
from quire_engine.models.options import ModelOptions

MODULES = (
    bert, cohere, deepseek, ernie, exaone, gated_delta, gemma, glm, gpt_neox, gpt_oss, granite, griffin, hunyuan, kimi,
    lfm, llama, mamba, nemotron, nemotron_h, qwen, zamba,
)  # fmt: skip
ARCHITECTURES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "AyaVisionForConditionalGeneration": "cohere2",
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "Exaone4_5_ForConditionalGeneration": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "GemmaForCausalLM": "gemma",
    "Glm46VForConditionalGeneration": "glm4v",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "GlmForCausalLM": "glm",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "JambaForCausalLM": "jamba",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm3ForCausalLM": "lfm3",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MellumForCausalLM": "mellum",
    "MiMoForCausalLM": "mimo",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "RecurrentGemmaForCausalLM": "recurrent_gemma",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SmolVLMForConditionalGeneration": "llama",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "VaultGemmaForCausalLM": "vaultgemma",
    "Zamba2ForCausalLM": "zamba2",
}
"""Architecture → family."""
OTHER_NAMES = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Names in published checkpoints, from their own code → transformers' names of the same."""
ENCODERS = {
    "Gemma3TextModel": "gemma3",
    **{
        f"{prefix}{kind}": family
        for prefix, family in (
            ("Bert", "bert"), ("Camembert", "roberta"), ("DistilBert", "distilbert"), ("EuroBert", "eurobert"),
            ("Gte", "gte"), ("JinaEmbeddingsV3", "jina_embeddings_v3"), ("ModernBert", "modernbert"),
            ("MPNet", "mpnet"), ("New", "gte"), ("NomicBert", "nomic_bert"), ("Roberta", "roberta"),
            ("XLMRoberta", "roberta"),
        )
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
}  # fmt: skip
"""The same of encoders. `New` is Alibaba's GTE, whose code is elsewhere."""
POOLING_ARCHITECTURES = {
    f"{prefix}{kind}": family
    for prefix, family in (
        ("Gemma2", "gemma2"), ("Gemma3Text", "gemma3"), ("Llama", "llama"), ("Mistral", "mistral"), ("Phi3", "phi3"),
        ("Qwen2", "qwen2"), ("Qwen3", "qwen3"),
    )
    for kind in (
        "Model", "ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "ForProcessRewardModel",
    )
} | ENCODERS  # fmt: skip
"""The same of all models that do not generate."""
_READERS = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__  # not imported there
}
FAMILIES: Mapping[str, Callable[[Fields], ModelOptions]] = {
    name: _READERS[name] for name in (*ARCHITECTURES.values(), *POOLING_ARCHITECTURES.values())
}
"""By the `model_type` of its checkpoints, the function of this name, which reads their files."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    name: values for module in MODULES for name, values in getattr(module, "DEFAULTS", {}).items()
}
"""By family, what stands for fields that are missing."""
ALIASES: Mapping[str, Mapping[str, str]] = {
    name: values for module in MODULES for name, values in getattr(module, "ALIASES", {}).items()
}
"""By family, names of fields in its files → those in most."""
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
ASSISTANT_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
DFLASH_ARCHITECTURES = ("DFlashDraftModel",)
TEXT_TYPES: Mapping[str, tuple[str, ...]] = {
    name: (f"{family}_text",) for name, family in ARCHITECTURES.items() if name.endswith("ForConditionalGeneration")
} | {
    "AyaVisionForConditionalGeneration": ("cohere2", "cohere"),
    "Cohere2VisionForConditionalGeneration": ("cohere2",),
    "Exaone4_5_ForConditionalGeneration": ("exaone4", "exaone4_5_text"),
    "Idefics3ForConditionalGeneration": ("llama",),
    "InternVLForConditionalGeneration": ("qwen2", "llama", "qwen3", "qwen3_moe"),
    "LlavaForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaNextForConditionalGeneration": ("llama", "mistral", "qwen2"),
    "LlavaOnevisionForConditionalGeneration": ("qwen2", "llama", "mistral"),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", "qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", "qwen2_5_vl"),
    "SmolVLMForConditionalGeneration": ("llama",),
}
"""Architecture of which the text model alone is served → what `model_type` its `text_config` may have; the first if it
has none."""
_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000,
}  # fmt: skip
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
"""What published files leave out of `text_config`, by family."""


def unlisted_family(architecture: object, fields: Fields) -> str | None:
    """The family of the text model in `text_config`, of an architecture that takes images and that is not listed; None
    if it is listed, or there is no such family."""
    is_other = isinstance(architecture, str) and architecture.endswith("ForConditionalGeneration")
    if not is_other or architecture in ARCHITECTURES or not isinstance(fields.values.get("text_config"), dict):
        return None
    name = str(fields.inner("text_config").values.get("model_type")).removesuffix("_text")
    return name if name in ARCHITECTURES.values() else None


def read_family(architecture: str, fields: Fields) -> tuple[Fields, ModelOptions]:
    """The fields of the text model, with the family's own defaults for those that are missing; and what the family
    makes of them. Raises CheckpointError if the model cannot be served."""
    unlisted = unlisted_family(architecture, fields)
    name = unlisted or ARCHITECTURES.get(architecture) or POOLING_ARCHITECTURES[architecture]
    outer, levels = fields, 0
    if architecture in TEXT_TYPES or unlisted is not None:
        indices = fields.inner("vision_config").values.get("deepstack_visual_indexes") or ()
        levels = len(indices) if isinstance(indices, list) and unlisted is None else 0
        types, fields = TEXT_TYPES.get(architecture, (name, f"{name}_text")), fields.text()
        named = fields.choice("model_type", types, types[0]).removesuffix("_text")
        name = named if named in FAMILIES else name
        given = {field: value for field, value in fields.values.items() if value is not None}
        fields = fields.with_values({**TEXT_DEFAULTS.get(name, {}), **given})
    aliases = ALIASES.get(name, {})
    given = {aliases.get(theirs, theirs): value for theirs, value in fields.values.items() if value is not None}
    fields = fields.with_values({**fields.values, **DEFAULTS.get(name, {}), **given})
    options = FAMILIES[name](fields)
    if levels:
        options = replace(options, num_deepstack_layers=levels)
    if options.layer_inputs is not None and architecture in TEXT_TYPES:
        options = replace(options, layer_inputs=gemma.with_placeholders(options.layer_inputs, outer, fields))
    scales = options.embedding_scale, options.logits_divisor, options.logits_soft_cap
    if unlisted is not None and scales != (1, 1, None):
        raise CheckpointError(
            f"{fields.path}: {architecture} has a text model that scales its embeddings or logits ({name}); such an "
            "architecture is served where it is listed only"
        )
    return fields, replace(options, has_head=False) if architecture in POOLING_ARCHITECTURES else options
