"""Weights that are quantised when they are packed; and W8A8: int8 weights with one scale per output feature, and
activations that are quantised per token."""

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from quire_kernels import LinearWeight, quantize_grouped
from quire_kernels.cpu import uses_triton

from quire_engine.models.checkpoints import StoredTensor
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat, Tensors

GROUP_SIZES = (32, 16)
"""`Int4` takes the first that divides a layer's input features."""
LARGEST = 127.0
"""What bitsandbytes' scales are the absolute value of."""


class QuantizedWhenLoaded(LinearMethod):
    """Weights that are stored in a floating-point type and quantised to int8 or float8_e4m3fn when they are packed.
    Where no kernel takes activations of enough bits, the weight is not quantised: a head loses more accuracy to 8 bits
    than the layers do."""

    requantizes = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def packed_bits(self, activation_bits: int, weight: torch.Tensor) -> float | None:
        takes_16_bits = self.dtype == torch.int8 and not uses_triton(weight)
        return 8 if activation_bits == 8 or (activation_bits == 16 and takes_16_bits) else None

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        weight_NK, bits = self.dense(loaded), loaded.activation_bits
        is_quantized = self.packed_bits(bits, weight_NK) is not None
        asymmetric = loaded.asymmetric and self.dtype == torch.int8 and not uses_triton(weight_NK)
        return loaded.pack(
            weight_NK, quantize=is_quantized, quantized_dtype=self.dtype, asymmetric=asymmetric,
            activation_bits=bits if is_quantized and not asymmetric else 8,
            column_factors_K=loaded.column_factors if asymmetric else None,
        )  # fmt: skip


class Int4(QuantizedWhenLoaded):
    """Weights that are stored in a floating-point type. Activations are quantised per token and 128 columns.

    A head has 8 bits, as does a layer whose input features no group size divides.
    """

    requantizes = False

    def __init__(self) -> None:
        super().__init__(torch.int8)

    def packed_bits(self, activation_bits: int, weight: torch.Tensor) -> float | None:
        scale_bits = 16 / GROUP_SIZES[0]
        return 4 + scale_bits if activation_bits == 8 else super().packed_bits(activation_bits, weight)

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        weight_NK = self.dense(loaded)
        group_size = next((size for size in GROUP_SIZES if weight_NK.shape[1] % size == 0), None)
        if group_size is None or loaded.activation_bits > 8:
            return super().pack(loaded)
        return loaded.pack_codes(quantize_grouped(weight_NK, group_size))


class Int8(LinearMethod):
    """Weights that are int8 in the checkpoint already: compressed-tensors' and bitsandbytes'. If `is_per_tensor`, a
    projection has one scale."""

    def __init__(self, is_per_tensor: bool = False) -> None:
        self.tensors: Mapping[str, TensorFormat] = {
            "weight": TensorFormat(dtype=torch.int8, stored=("I8",)),
            "weight_scale": TensorFormat(
                dtype=torch.float32, row_block=None if is_per_tensor else 1, column_block=None
            ),
        }

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        kind = tensor.name.rpartition(".")[2]
        if kind not in ("weight_scale", "SCB"):
            yield from super().read(tensor, index)
            return
        is_whole = self.tensors["weight_scale"].row_block is None
        inside = () if is_whole else (tensor.rows_in_file(index[0].start, index[0].stop),)
        scales_N1 = tensor.reader.read(tensor, inside).reshape(-1, 1)
        yield scales_N1 / LARGEST if kind == "SCB" else scales_N1

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        return (loaded.tensors["weight"] * self._scales(loaded)).to(loaded.dtype)

    def pack(self, loaded: LoadedLinear) -> LinearWeight:
        return loaded.pack(loaded.tensors["weight"], scales_N=self._scales(loaded)[:, 0])

    def _scales(self, loaded: LoadedLinear) -> torch.Tensor:
        scales = loaded.tensors["weight_scale"]
        return loaded.by_row(scales) if self.tensors["weight_scale"].row_block is None else scales


def gather_int8(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """Scales as columns, under one name."""
    gathered = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_format":  # bitsandbytes'; it has only one
            continue
        if kind in ("weight_scale", "SCB"):
            name, sizes = f"{module}.weight_scale", tensor.shape or (1,)
            tensor = dataclasses.replace(tensor, shape=(*sizes, 1)) if len(sizes) == 1 else tensor
        gathered[name] = tensor
    return gathered
