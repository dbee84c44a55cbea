"""Maps the architecture name in `config.json` to the family that reads the rest of the file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families import bert, deepseek, gemma, gpt_oss, granite, llama, mamba, nemotron_h, qwen
from quire_engine.models.options import ModelOptions

FAMILIES: Mapping[str, Callable[[Fields], ModelOptions]] = {
    one.__name__: one
    for one in (
        bert.bert, bert.distilbert, bert.eurobert, bert.gte, bert.jina_embeddings_v3, bert.modernbert, bert.mpnet,
        bert.nomic_bert, bert.roberta,
        deepseek.deepseek_v2, deepseek.deepseek_v3, gemma.gemma2, gemma.gemma3, gpt_oss.gpt_oss, granite.granitemoe,
        granite.granitemoehybrid, granite.granitemoeshared, llama.granite,
        llama.llama, llama.ministral3, llama.mistral, llama.mixtral, llama.olmo2, llama.olmo3, llama.phi3,
        llama.smollm3, mamba.bamba, mamba.falcon_h1, mamba.falcon_mamba, mamba.jamba, mamba.mamba, mamba.mamba2,
        nemotron_h.nemotron_h, qwen.qwen2, qwen.qwen2_moe, qwen.qwen3, qwen.qwen3_moe, qwen.qwen3_vl,
    )
}  # fmt: skip
"""By the `model_type` of its checkpoints."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    **bert.DEFAULTS, **deepseek.DEFAULTS, **gemma.DEFAULTS, **gpt_oss.DEFAULTS, **granite.DEFAULTS, **llama.DEFAULTS,
    **mamba.DEFAULTS, **nemotron_h.DEFAULTS, **qwen.DEFAULTS,
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {**bert.ALIASES, **mamba.ALIASES, **nemotron_h.ALIASES}
"""Names of fields in a family's files → those in most."""
ARCHITECTURES = {
    "BambaForCausalLM": "bamba",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "falcon_mamba",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "JambaForCausalLM": "jamba",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
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
"""Architecture → family."""
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
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text",),
}
"""Architecture of which the text model alone is served → what `model_type` its `text_config` may have; the first if it
has none."""


def read_family(architecture: str, fields: Fields) -> tuple[Fields, ModelOptions]:
    """The fields of the text model, with the family's own defaults for those that are missing; and what the family
    makes of them. Raises CheckpointError if the model cannot be served."""
    name = ARCHITECTURES.get(architecture) or POOLING_ARCHITECTURES[architecture]
    if architecture in TEXT_TYPES:
        types, fields = TEXT_TYPES[architecture], fields.text()
        name = fields.choice("model_type", types, types[0]).removesuffix("_text")
    aliases = ALIASES.get(name, {})
    given = {aliases.get(theirs, theirs): value for theirs, value in fields.values.items() if value is not None}
    fields = fields.with_values({**fields.values, **DEFAULTS.get(name, {}), **given})
    options = FAMILIES[name](fields)
    return fields, options if architecture in ARCHITECTURES else replace(options, has_head=False)
