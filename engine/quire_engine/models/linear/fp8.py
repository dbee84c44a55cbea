"""Weights in fp8 with a scale for each block, as DeepSeek-V3 is published (https://arxiv.org/abs/2412.19437, section
3.3.2), and others::

    q_proj.weight             [N, K]                     e4m3
    q_proj.weight_scale_inv   [⌈N / 128⌉, ⌈K / 128⌉]     what the numbers of a block are multiplied by
"""

import dataclasses
from collections.abc import Mapping

import torch

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, StoredTensor
from quire_engine.models.linear.base import DequantizedMethod, LinearMethod

ENDING = "_scale_inv"


class Fp8Blocks(DequantizedMethod):
    """Matrices that have scales are quantised; others of the same checkpoint are not.

    Args:
        packing: see `DequantizedMethod`.
        block_size: rows and columns that share a scale.
    """

    def __init__(self, packing: LinearMethod, block_size: tuple[int, int]) -> None:
        super().__init__(packing)
        self.block_size = block_size

    def gather(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        return {
            name: self._scaled(tensor, tensors.get(f"{name}{ENDING}"))
            for name, tensor in tensors.items()
            if not name.endswith(ENDING) or name.removesuffix(ENDING) not in tensors
        }

    def _scaled(self, weight: StoredTensor, scales: StoredTensor | None) -> StoredTensor:
        if scales is None:
            return weight
        shape = tuple(-(-size // block) for size, block in zip(weight.shape, self.block_size, strict=False))
        if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            raise CheckpointError(
                f"{weight.path}: tensor {weight.name} is {weight.dtype} of shape {weight.shape}; with {scales.name} it "
                "must be a matrix of type F8_E4M3"
            )
        if scales.shape != shape or scales.dtype not in FLOATING:
            raise CheckpointError(
                f"{scales.path}: tensor {scales.name} is {scales.dtype} of shape {scales.shape}; its weight asks for "
                f"{shape}, of a floating-point type"
            )
        return dataclasses.replace(weight, companions={"scales": scales})

    def dequantize(self, tensor: StoredTensor, rows: slice, columns: slice) -> torch.Tensor:
        weight_NK = tensor.reader.read(tensor, (rows, columns))
        own, index = [], []
        for part, size in zip((rows, columns), self.block_size, strict=True):
            first = part.start // size
            own.append(slice(first, -(-part.stop // size)))
            index.append(torch.arange(part.start, part.stop) // size - first)
        scales_NK = tensor.reader.read(tensor.companions["scales"], tuple(own)).float()[index[0]][:, index[1]]
        numbers_NK = scales_NK.mul_(weight_NK.float())
        tensor.reader.release(weight_NK)
        return numbers_NK
