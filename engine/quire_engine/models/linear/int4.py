"""Weights of 4 bits in groups that share a scale, quantised when they are packed."""

import torch
from quire_kernels import LinearWeight, quantize_grouped

from quire_engine.models.linear.base import LoadedLinear
from quire_engine.models.linear.int8 import QuantizedWhenLoaded

GROUP_SIZES = (32, 16)
"""The first that divides a layer's input features."""


class Int4(QuantizedWhenLoaded):
    """Weights that are stored in a floating-point type. Activations are quantised per token and 128 columns.

    A head has 8 bits, as does a layer whose input features no group size divides.
    """

    requantizes = False

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        weight_NK = self.dense(loaded)
        group_size = next((size for size in GROUP_SIZES if weight_NK.shape[1] % size == 0), None)
        if group_size is None or loaded.activation_bits > 8:
            return super().pack(loaded)
        return loaded.pack_codes(quantize_grouped(weight_NK, group_size))
