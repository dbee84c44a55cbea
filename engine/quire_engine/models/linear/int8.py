"""W8A8: weights with one scale per output feature, and activations that are quantised per token."""

from collections.abc import Mapping

import torch
from quire_kernels import LinearWeight
from quire_kernels.dispatch import uses_triton

from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat


class QuantizedWhenLoaded(LinearMethod):
    """Weights that are stored in a floating-point type and quantised when they are packed.

    Where no kernel takes activations of enough bits, the weight is not quantised: a head loses more accuracy to 8 bits
    than the layers do.

    Args:
        dtype: int8 or float8_e4m3fn.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        weight_NK, bits = self.dense(loaded), loaded.activation_bits
        takes_16_bits = self.dtype == torch.int8 and not uses_triton(weight_NK)
        is_quantized = bits == 8 or (bits == 16 and takes_16_bits)
        return loaded.pack(
            weight_NK, quantize=is_quantized, quantized_dtype=self.dtype, activation_bits=bits if is_quantized else 8
        )


class Int8(LinearMethod):
    """Weights that are int8 in the checkpoint already."""

    tensors: Mapping[str, TensorFormat] = {
        "weight": TensorFormat(dtype=torch.int8, stored=("I8",)),
        "weight_scale": TensorFormat(dtype=torch.float32, column_block=None),
    }

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        return (loaded.tensors["weight"] * loaded.tensors["weight_scale"]).to(loaded.dtype)

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        return loaded.pack(loaded.tensors["weight"], scales_N=loaded.tensors["weight_scale"][:, 0])
