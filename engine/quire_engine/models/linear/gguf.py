"""Weights in the quantised types of GGUF files (`checkpoints/gguf_blocks.py`)."""

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from quire_kernels import GroupedCodes, stack_linear
from quire_kernels.cpu import uses_triton

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import StoredTensor
from quire_engine.models.checkpoints.gguf_blocks import has_finite_scales, unpack, with_grouped_heads
from quire_engine.models.checkpoints.gguf_types import BLOCKS
from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat, bands

logger = logging.getLogger(__name__)


class Gguf(LinearMethod):
    """Weights of a quantised type that stay in blocks until they are packed, without rounding. On a GPU, for a router,
    and where the method of the setting `requantizes`, they are dequantised, and `packing` packs them.

    Args:
        kind: the type.
        packing: the method of the setting.
        mixed_heads: as in `WeightFormat`; None: columns are in order.
    """

    is_joinable = True

    def __init__(self, kind: str, packing: LinearMethod, mixed_heads: tuple[int, int] | None = None) -> None:
        numbers, size = BLOCKS[kind]
        self.kind, self.packing, self.mixed_heads = kind, packing, mixed_heads
        uncut = 1 if mixed_heads is None else mixed_heads[0]  # blocks with all heads of some heads of keys
        form = TensorFormat(dtype=torch.uint8, stored=(kind,), column_block=uncut * numbers, width=uncut * size)
        self.tensors = {"weight": form}

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        for piece in super().read(tensor, index):
            if tensor.dtype in BLOCKS and not has_finite_scales(piece, tensor.dtype):
                raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has scales that are no finite numbers")
            yield piece

    def unpack(self, blocks: torch.Tensor) -> GroupedCodes:
        """Codes of blocks, whose columns are in order."""
        codes = unpack(blocks, self.kind)
        if self.mixed_heads is None:
            return codes
        each, size = self.mixed_heads
        return with_grouped_heads(codes, each, size, BLOCKS[self.kind][0] // size)

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        blocks = loaded.tensors["weight"]
        numbers, size = BLOCKS[self.kind]
        weight = torch.empty(len(blocks), blocks.shape[1] // size * numbers, dtype=loaded.dtype, device=blocks.device)
        for band in bands(0, *weight.shape):
            weight[band] = self.unpack(blocks[band]).dequantize()
        return weight

    def packed_bits(self, activation_bits: int, weight: torch.Tensor) -> float | None:
        if activation_bits > 16 or self.packing.requantizes or uses_triton(weight):
            return self.packing.packed_bits(activation_bits, weight) or 8 * weight.itemsize
        numbers, size = BLOCKS[self.kind]
        stored_bits = 8 * size / numbers
        return None if stored_bits < 5 else max(stored_bits, 8.5)  # codes have 4 bits or 8

    def pack(self, loaded: LoadedLinear) -> Any:
        if self._stays_packed(loaded):
            return loaded.pack_codes(self.unpack(loaded.tensors["weight"]))
        return self.packing.pack(replace(loaded, tensors={"weight": self.dense(loaded)}))

    def pack_joined(self, parts: Sequence[tuple[LinearMethod, LoadedLinear]], whole: LoadedLinear) -> Any:
        if not whole.gated:
            return stack_linear([method.pack(loaded) for method, loaded in parts])
        codes = [
            method.unpack(loaded.tensors["weight"])
            for method, loaded in parts
            if isinstance(method, Gguf) and self._stays_packed(loaded)
        ]
        if len(codes) == len(parts):
            return whole.pack_codes(join_codes(codes))
        weight = torch.cat([method.dense(loaded) for method, loaded in parts])
        return self.packing.pack(replace(whole, tensors={"weight": weight}))

    def _stays_packed(self, loaded: LoadedLinear) -> bool:
        if uses_triton(loaded.tensors["weight"]):
            _log_once(f"GGUF's types have no kernels on a GPU: weights are dequantised to {loaded.dtype}")
            return False
        return loaded.activation_bits <= 16 and not self.packing.requantizes


def join_codes(parts: Sequence[GroupedCodes]) -> GroupedCodes:
    """One weight of several, one below the other, in a form that has the numbers of all: 8 bits, and float32 scales and
    offsets in the smallest of the groups."""
    group_size, zero = (min(one.group_size for one in parts), max(one.zero for one in parts))

    def spread(values_NG: torch.Tensor, part: GroupedCodes) -> torch.Tensor:
        return values_NG.repeat_interleave(part.group_size // group_size, dim=1)

    codes, scales, offsets = [], [], []
    for one in parts:
        values = one.codes if one.table is None else one.table[one.codes.int()]
        codes.append(values + (zero - one.zero))
        scales.append(spread(one.group_scales(), one))
        found = one.group_offsets()
        offsets.append(torch.zeros_like(scales[-1]) if found is None else spread(found, one))
    return GroupedCodes(
        codes=torch.cat(codes), bits=8, group_size=group_size, zero=zero, scales=torch.cat(scales),
        offsets=torch.cat(offsets),
    )  # fmt: skip


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)
