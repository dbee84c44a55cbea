"""The methods of linear layers, one file each, and which layer has which."""

from collections.abc import Callable

import torch

from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat
from quire_engine.models.linear.fp8 import Fp8Blocks
from quire_engine.models.linear.int4 import Int4
from quire_engine.models.linear.int8 import Int8, QuantizedWhenLoaded
from quire_engine.models.linear.mxfp4 import Mxfp4
from quire_engine.models.weight_format import WeightFormat

__all__ = ["METHODS", "LinearMethod", "LoadedLinear", "MethodChoice", "TensorFormat", "draft_methods", "linear_methods"]

MADE: dict[str | None, LinearMethod] = {
    None: LinearMethod(),
    "int4": Int4(),
    "int8": QuantizedWhenLoaded(torch.int8),
    "fp8": QuantizedWhenLoaded(torch.float8_e4m3fn),
}
"""By the setting `quantization`: the method of weights that are stored in a floating-point type."""


MethodChoice = Callable[[str, int], LinearMethod]
"""(name of a linear layer in the checkpoint, without the leading `model.`; its `activation_bits`) → its method."""
METHODS: dict[str, Callable[[WeightFormat, LinearMethod, str, int], LinearMethod]] = {
    "unquantised": lambda stored, made, name, bits: made,
    "int8": lambda stored, made, name, bits: Int8() if bits == 8 else made,
    "fp8": lambda stored, made, name, bits: Fp8Blocks(made, stored.block_size),
    "mxfp4": lambda stored, made, name, bits: Mxfp4(made),
}
"""By the method of the checkpoint's `WeightFormat`: (the format, the method of the setting, a layer's name, its
`activation_bits`) → the layer's method."""


def linear_methods(weight_format: WeightFormat, quantization: str | None) -> MethodChoice:
    """The method of each linear layer of a model, by its checkpoint's format and the setting `quantization`."""
    made, choose = MADE[quantization], METHODS[weight_format.method]
    return lambda name, activation_bits: choose(weight_format, made, name, activation_bits)


def draft_methods(target: WeightFormat, quantization: str | None) -> MethodChoice:
    """The same of heads that draft: their own weights are not quantised in the checkpoint; an embedding or an output
    matrix may be the target's, in its format."""
    layers, vocabularies = linear_methods(WeightFormat(), quantization), linear_methods(target, quantization)
    return lambda name, activation_bits: (layers if activation_bits == 8 else vocabularies)(name, activation_bits)
