"""What adapters may change of a model, and with which settings of an engine."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from quire_engine.config import EngineCoreConfig, LoRAConfig
from quire_engine.lora import AdaptableModules
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.encoder import Encoder
from quire_engine.models.layers.experts import ExpertLinears, MixtureOfExperts
from quire_engine.models.layers.parallel import Packable, VocabParallel
from quire_engine.models.loader import META, build, new_model

AdaptableLayer: TypeAlias = Packable | ExpertLinears


def adaptable_layers(model: torch.nn.Module) -> list[Packable]:
    """The layers of a model that adapters may change, without those of experts, which are computed together."""
    modules = model.named_modules()
    return [
        one for path, one in modules if isinstance(one, Packable) and one.takes_adapters and ".experts." not in path
    ]


def expert_linears(model: torch.nn.Module) -> list[ExpertLinears]:
    """Those of experts, of each mixture both. Mixtures whose experts move, or are elsewhere, have none."""
    mixtures = [one for one in model.modules() if type(one) is MixtureOfExperts]
    return [one for mixture in mixtures for one in mixture.adaptable_linears()]


def _is_on_gpu(config: EngineCoreConfig) -> bool:
    return config.parallel.device != "cpu" and torch.cuda.is_available()


def why_not_experts(config: EngineCoreConfig) -> str:
    """Why the adapters of an engine may not change experts; empty if they may."""
    if _is_on_gpu(config):
        return "on a GPU"
    if config.parallel.num_redundant_experts is not None:
        return "with enable_eplb: set it to false"
    return "where replicas share experts: leave enable_expert_parallel out" if config.parallel.is_lockstep else ""


def why_not_dora(config: EngineCoreConfig, checkpoint: CheckpointConfig) -> str:
    """Why an engine computes no DoRA; empty if it does: it needs the norms of the base's rows."""
    method = checkpoint.weight_format.method
    if _is_on_gpu(config):
        return "on a GPU"
    if method != "unquantised" or config.model.quantization == "fp8":
        return f"with a base in {config.model.quantization if method == 'unquantised' else method}"
    return ""


def adaptable_modules(checkpoint: CheckpointConfig, config: EngineCoreConfig | None = None) -> AdaptableModules:
    """What an adapter may change of a checkpoint's model, with the settings of an engine."""
    model = build(lambda: new_model(checkpoint, 1), torch.float32, META)
    why_not = "" if config is None else why_not_experts(config)
    experts = checkpoint.experts
    layers: list[AdaptableLayer] = [*adaptable_layers(model), *([] if why_not else expert_linears(model))]
    return AdaptableModules(
        {name: one.shape for layer in layers for name, one in zip(layer.names, layer.projections, strict=True)},
        list(checkpoint.options.renamed),
        {name: list(parts) for name, parts in dict(checkpoint.options.fused).items()},
        {name: table.projections[0].shape for name, table in replaceable_tables(model).items()},
        checkpoint.tie_word_embeddings,
        experts is not None and experts.stack == "interleaved",
        why_not,
        "" if config is None else why_not_dora(config, checkpoint),
    )


def replaceable_tables(model: torch.nn.Module) -> dict[str, VocabParallel]:
    """The embedding and the head of a stage, by the names of the model; a tied one has both. Those of encoders are not
    replaced."""
    tables: dict[str, VocabParallel] = {}
    if isinstance(model, Decoder) and not isinstance(model, Encoder):
        if model.parallel.is_first_stage:
            tables["embed_tokens"] = model.embed_tokens
        if model.parallel.is_last_stage and model.has_head:
            tables["lm_head"] = model.head
    return tables


def planned_bytes(config: LoRAConfig, layers: Sequence[Packable], like: torch.Tensor) -> int:
    """Bytes of the KV cache's memory that a rank sets aside for adapters of the largest rank: on the CPU for all that
    are ready, on a GPU for those in slots. For adapters of experts none is: they may be larger than all else.

    Args:
        config: the settings.
        layers: that adapters may change, without those of experts.
        like: any tensor on the device, of the dtype of activations.
    """
    sizes: list[int] = [
        size + one.columns.stop - one.columns.start
        for layer in layers
        for one, size in zip(layer.projections, layer.sizes, strict=True)
    ]
    number = config.max_loras if like.is_cuda else config.num_ready
    return number * config.max_lora_rank * sum(sizes) * like.itemsize
