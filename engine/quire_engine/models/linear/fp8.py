"""Weights in fp8 (e4m3) that are dequantised when they are read. Scales are of blocks, as DeepSeek-V3 is published
(https://arxiv.org/abs/2412.19437, section 3.3.2), of output features, or of a whole weight::

    q_proj.weight             [N, K]
    q_proj.weight_scale_inv   [⌈N / 128⌉, ⌈K / 128⌉]     what the numbers of a block are multiplied by
    q_proj.weight_scale       [N, 1], [N], [1] or []     or as above
"""

import dataclasses
import math

import torch

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, StoredTensor
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.linear.base import DequantizedMethod, LinearMethod, Tensors

ENDINGS = ("_scale_inv", "_scale")


class Fp8(DequantizedMethod):
    """Matrices that have scales are quantised; others of the same checkpoint are not. Without a `block_size`, rows and
    columns that share a scale, the scales' shape says it."""

    def __init__(self, packing: LinearMethod, block_size: tuple[int, int] | None) -> None:
        super().__init__(packing)
        self.block_size = block_size

    def dequantize(self, tensor: StoredTensor, rows: slice, columns: slice) -> torch.Tensor:
        scales = tensor.companions["scales"]
        weight_NK = tensor.reader.read(tensor, (rows, columns))
        numbers_NK = weight_NK.float()
        tensor.reader.release(weight_NK)
        if math.prod(scales.shape) == 1:
            return numbers_NK.mul_(tensor.reader.read(scales, ()).float().flatten())
        if self.block_size is None:
            return numbers_NK.mul_(tensor.reader.read(scales, (rows,)).float().reshape(-1, 1))
        own, index = [], []
        for part, size in zip((rows, columns), self.block_size, strict=True):
            first = part.start // size
            own.append(slice(first, -(-part.stop // size)))
            index.append(torch.arange(part.start, part.stop) // size - first)
        scales_NK = tensor.reader.read(scales, tuple(own)).float()[index[0]][:, index[1]]
        return scales_NK.mul_(numbers_NK)


def gather_fp8(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """Weights with their scales as companions."""
    of_weights = {f"{name}{ending}": name for name in tensors for ending in ENDINGS if f"{name}{ending}" in tensors}
    gathered = {name: tensor for name, tensor in tensors.items() if name not in of_weights}
    for scales, name in of_weights.items():
        gathered[name] = _scaled(tensors[name], tensors[scales], stored.block_size)
    return gathered


def _scaled(weight: StoredTensor, scales: StoredTensor, block_size: tuple[int, int] | None) -> StoredTensor:
    if weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.path}: tensor {weight.name} is {weight.dtype} of shape {weight.shape}; with {scales.name} it "
            "must be a matrix of type F8_E4M3"
        )
    if block_size is None:
        shapes: tuple[tuple[int, ...], ...] = ((weight.shape[0], 1), weight.shape[:1], (1, 1), (1,), ())
    else:
        shapes = (tuple(-(-size // block) for size, block in zip(weight.shape, block_size, strict=True)),)
    if scales.shape not in shapes or scales.dtype not in FLOATING:
        raise CheckpointError(
            f"{scales.path}: tensor {scales.name} is {scales.dtype} of shape {scales.shape}; its weight asks for "
            f"{' or '.join(map(str, shapes))}, of a floating-point type"
        )
    return dataclasses.replace(weight, companions={"scales": scales})
