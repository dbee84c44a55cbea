"""Weights: from safetensors files, memory-mapped, into a model's parameters, converted on the way.

Each rank reads its own slice of each tensor and nothing else; tensors of other stages are not touched.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig, check_safetensors, weight_files
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.parallel import LoadTarget, load_targets, pack_weights
from quire_engine.models.registry import MODELS

__all__ = ["load_model"]


def load_model(
    folder: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    max_model_len: int,
    parallel: ParallelState = ParallelState(),
    quantize: bool = False,
) -> LlamaForCausalLM:
    """Build a rank's part of the model, fill every parameter, and pack the matrices; to int8 if they are quantised.

    Raises:
        CheckpointError: a file is truncated, or a tensor is missing, superfluous or of the wrong shape.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = MODELS[config.architecture](config, max_model_len, parallel)
    finally:
        torch.set_default_dtype(previous)
    targets = load_targets(model)
    elsewhere: Collection[str] = ()
    if parallel.pipeline_parallel_size > 1:
        with torch.device("meta"):
            elsewhere = load_targets(MODELS[config.architecture](config, max_model_len)).keys()
    missing = set(targets)
    for path in weight_files(folder):
        check_safetensors(path)
        missing -= _load_file(path, targets, elsewhere)
    if missing:
        raise CheckpointError(f"{folder}: its safetensors files hold no {', '.join(sorted(missing)[:3])}")
    del targets  # they hold the parameters, which are freed as they are packed
    pack_weights(model, quantize)
    return model.eval()


def _load_file(path: Path, targets: Mapping[str, LoadTarget], elsewhere: Collection[str]) -> set[str]:
    """Copy what the file holds; returns the names that were filled.

    Args:
        path: a safetensors file.
        targets: where this rank's slices go.
        elsewhere: names that other stages want.
    """
    filled = set()
    try:
        with safe_open(path, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                name = key.removeprefix("model.")
                target = targets.get(name)
                if target is None:
                    # The copy of a tied head, and the frequency tables of old checkpoints, are derived here.
                    if name in elsewhere or name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                        continue
                    raise CheckpointError(f"{path}: tensor {key} has no place in this architecture")
                tensor = tensors.get_slice(key)
                shape = tuple(tensor.get_shape())
                if shape != target.shape:
                    raise CheckpointError(
                        f"{path}: tensor {key} has shape {shape}; config.json asks for {target.shape}"
                    )
                if (tensor.get_dtype() == "I8") != (target.parameter.dtype == torch.int8):
                    raise CheckpointError(
                        f"{path}: tensor {key} is {tensor.get_dtype()}; quantization_config in config.json asks for "
                        f"{'I8' if target.parameter.dtype == torch.int8 else 'a floating-point type'}"
                    )
                target.parameter.copy_(tensor[target.index])
                filled.add(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return filled
