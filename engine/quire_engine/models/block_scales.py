"""Weights in fp8 with a scale for each block, as DeepSeek-V3 is published (https://arxiv.org/abs/2412.19437, section
3.3.2), and others. Does not use torch::

    q_proj.weight             [N, K]                     e4m3
    q_proj.weight_scale_inv   [⌈N / 128⌉, ⌈K / 128⌉]     what the numbers of a block are multiplied by
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.files import StoredTensor

__all__ = ["with_scales"]

ENDING = "_scale_inv"


def with_scales(
    files: Mapping[Path, Mapping[str, StoredTensor]], block_size: tuple[int, int], floating: tuple[str, ...]
) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each file by name, in which weights have their scales, whichever file holds these.

    Args:
        files: their tensors, by name.
        block_size: rows and columns that share a scale.
        floating: types that a scale may have.

    Raises:
        CheckpointError: scales do not fit their weight.
    """
    everything = {name: tensor for file in files.values() for name, tensor in file.items()}

    def scaled(name: str, weight: StoredTensor) -> StoredTensor:
        scales = everything.get(f"{name}{ENDING}")
        if scales is None:
            return weight
        shape = tuple(-(-size // block) for size, block in zip(weight.shape, block_size, strict=False))
        if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            raise CheckpointError(
                f"{weight.path}: tensor {weight.name} is {weight.dtype} of shape {weight.shape}; with {scales.name} it "
                "must be a matrix of type F8_E4M3"
            )
        if scales.shape != shape or scales.dtype not in floating:
            raise CheckpointError(
                f"{scales.path}: tensor {scales.name} is {scales.dtype} of shape {scales.shape}; its weight asks for "
                f"{shape}, of a floating-point type"
            )
        return dataclasses.replace(weight, scales=scales, block_size=block_size)

    return {
        path: {
            name: scaled(name, tensor)
            for name, tensor in file.items()
            if not name.endswith(ENDING) or name.removesuffix(ENDING) not in everything
        }
        for path, file in files.items()
    }
