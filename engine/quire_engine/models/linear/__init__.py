"""The methods of linear layers, one file for those that share code, and which layer has which."""

from collections.abc import Callable

import torch

from quire_engine.models.checkpoints import FLOATING, StoredTensor
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.linear.base import LinearMethod, LoadedLinear, TensorFormat, Tensors
from quire_engine.models.linear.fp4 import DIVISOR, BitsAndBytes, Mxfp4, Nvfp4, gather_bitsandbytes, gather_nvfp4
from quire_engine.models.linear.fp8 import Fp8, gather_fp8
from quire_engine.models.linear.gguf import Gguf
from quire_engine.models.linear.grouped import ActOrder, PackedWords, gather_words
from quire_engine.models.linear.int8 import Int4, Int8, QuantizedWhenLoaded, gather_int8

__all__ = [
    "METHODS", "LinearMethod", "LoadedLinear", "MethodChoice", "TensorFormat", "conversion", "draft_methods", "gather",
    "linear_methods",
]  # fmt: skip

BY_SETTING: dict[str | None, LinearMethod] = {
    None: LinearMethod(),
    "int4": Int4(),
    "int8": QuantizedWhenLoaded(torch.int8),
    "fp8": QuantizedWhenLoaded(torch.float8_e4m3fn),
}
"""By the setting `quantization`: the method of weights that are stored in a floating-point type."""


MethodChoice = Callable[[str, int], LinearMethod]
"""(name of a linear layer in the checkpoint, without the leading `model.`; its `activation_bits`) → its method."""


def _words(stored: WeightFormat, packing: LinearMethod, name: str, bits: int, tensors: Tensors | None) -> LinearMethod:
    if f"{name}.weight_g_idx" in (tensors or ()):
        return ActOrder(stored, packing, is_plain=bits != 8 or ".experts." in name)
    return PackedWords(stored, packing)


METHODS: dict[str, Callable[[WeightFormat, LinearMethod, str, int, Tensors | None], LinearMethod]] = {
    "unquantised": lambda stored, packing, name, bits, tensors: packing,
    "int8": lambda stored, packing, name, bits, tensors: Int8(stored.is_per_tensor),
    "fp8": lambda stored, packing, name, bits, tensors: Fp8(packing, stored.block_size),
    "mxfp4": lambda stored, packing, name, bits, tensors: Mxfp4(packing) if ".experts." in name else packing,
    "nvfp4": lambda stored, packing, name, bits, tensors: Nvfp4(packing, f"{name}.{DIVISOR}" in (tensors or ())),
    "nf4": lambda stored, packing, name, bits, tensors: BitsAndBytes(packing, stored.method),
    "fp4": lambda stored, packing, name, bits, tensors: BitsAndBytes(packing, stored.method),
    "awq": _words,
    "gptq": _words,
    "pack-quantized": _words,
    "gguf": lambda stored, packing, name, bits, tensors: (
        Gguf(stored.types[name], packing, stored.mixed_heads.get(name)) if name in stored.types else packing
    ),
}
"""By the method of the checkpoint's `WeightFormat`: (the format, the method of the setting, a layer's name, its
`activation_bits`, the checkpoint's tensors if it has any) → the method of a layer that is quantised."""
GATHER: dict[str, Callable[[WeightFormat, Tensors], dict[str, StoredTensor]]] = {
    "int8": gather_int8,
    "fp8": gather_fp8,
    "nvfp4": gather_nvfp4,
    "nf4": gather_bitsandbytes,
    "fp4": gather_bitsandbytes,
    "awq": gather_words,
    "gptq": gather_words,
    "pack-quantized": gather_words,
}
OF_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".input_global_scale",
    ".input_scale_ub", ".input_zero_point", ".output_zero_point", ".weight_shape",
)  # fmt: skip
"""Ends of names that are not read: activations are quantised by their own range, and shapes are known."""


def gather(stored: WeightFormat, tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by the names that the methods have for them, with what `read` needs. Raises
    CheckpointError if those of a layer do not fit each other."""
    if stored.method not in GATHER:
        return dict(tensors)
    return GATHER[stored.method](
        stored, {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    )


def conversion(stored: WeightFormat, dtype: torch.dtype, quantization: str | None) -> str | None:
    """What becomes of numbers that are not computed with as they are stored, for the log."""
    if stored.method == "fp8":
        there = (
            f"{quantization}" if quantization else f"{str(dtype).removeprefix('torch.')}, or with quantization in int8"
        )
        return f"weights in fp8 are served in {there}"
    if stored.method in ("nf4", "fp4"):
        return f"the numbers that {stored.method} stands for are rounded to 8 bits"
    return None


def linear_methods(
    weight_format: WeightFormat, quantization: str | None, tensors: Tensors | None = None
) -> MethodChoice:
    """The method of each linear layer of a model.

    Args:
        weight_format: of its checkpoint.
        quantization: the setting.
        tensors: of the checkpoint, from `gather`, which say which layers are quantised; None: there are none, and all
            are but heads and routers.
    """
    packing, choose = BY_SETTING[quantization], METHODS[weight_format.method]

    def method_of(name: str, activation_bits: int) -> LinearMethod:
        is_stored = activation_bits == 8 if tensors is None else _is_quantized(name, tensors)
        is_read_alike = weight_format.method == "fp8"  # with scales or without: they may be one product
        return choose(weight_format, packing, name, activation_bits, tensors) if is_stored or is_read_alike else packing

    return method_of


def _is_quantized(name: str, tensors: Tensors) -> bool:
    weight = tensors.get(f"{name}.weight")
    return f"{name}.weight_scale" in tensors or (weight is not None and weight.dtype not in FLOATING)


def draft_methods(target: WeightFormat, quantization: str | None, tensors: Tensors) -> MethodChoice:
    """The same of heads that draft: their own weights are not quantised in the checkpoint; an embedding or an output
    matrix may be the target's, in its format."""
    layers, vocabularies = linear_methods(WeightFormat(), quantization), linear_methods(target, quantization, tensors)
    return lambda name, activation_bits: (layers if activation_bits == 8 else vocabularies)(name, activation_bits)
