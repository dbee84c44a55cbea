"""WeightFormat: how a checkpoint stores the weights of its linear layers, as `quantization_config` says. Does not use
torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.checkpoints.files import read_json
from quire_engine.models.checkpoints.gguf_types import BLOCKS

MXFP4_BLOCK = 32
"""Numbers of a row that share an exponent (OCP Microscaling Formats 1.0, section 5.2)."""
UNIT = 16
"""Columns, of which any group has a multiple; a rank's slice may cut a group at multiples of so many."""
SERVED = (
    "awq, gptq and auto-round of 4 bits (gptq of 8 too); compressed-tensors in pack-quantized, int-quantized, "
    "float-quantized and nvfp4-pack-quantized; fp8, fbgemm_fp8, modelopt in FP8 and NVFP4; bitsandbytes; and mxfp4"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weights are stored. A layer without scales in the files is not quantised, whatever the method."""

    method: str = "unquantised"
    """A key of `models.linear.METHODS`."""
    bits: int = 16
    """Bits of a weight in memory, unless it is dequantised; 16: it is."""
    group_size: int | None = None
    """Columns that share a scale; None: all of a row."""
    is_symmetric: bool = True
    """There are no zero points, or they are all in the middle of the codes."""
    zero_shift: int = 0
    """Added to zero points as they are stored: 1 in GPTQ's first format."""
    has_act_order: bool = False
    """The columns of a group may be anywhere in the row."""
    block_size: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale, of `fp8`; None: the scales' shape says it."""
    is_per_tensor: bool = False
    """All of a weight shares one scale, of `int8`."""
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By a linear layer's name in the model, the quantised type of its weight; of `gguf` only."""
    mixed_heads: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    """Likewise, for weights whose blocks have columns of several heads: see `gguf_states.mixed_heads`."""


def read_weight_format(fields: Fields) -> WeightFormat:
    """Read the format from `config.json`, or from modelopt's `hf_quant_config.json` beside it. Raises CheckpointError
    if it is not served."""
    reject_mlx(fields)
    name = "compression_config" if fields.values.get("quantization_config") is None else "quantization_config"
    quantization = fields.inner(name)
    if not quantization.values:
        quantization, name = modelopt_config(fields), "quantization"
        if not quantization.values.get("quant_algo"):
            return WeightFormat()
    values = quantization.values
    method = values.get("quant_method")
    if method is None:
        method = "modelopt" if "quant_algo" in values else method
        method = "bitsandbytes" if "load_in_4bit" in values or "load_in_8bit" in values else method
    if isinstance(method, str) and method in _READERS:
        return _READERS[method](quantization)
    raise _rejected(quantization, f"{name} has quant_method {method or 'not named'!s:.60}")


def modelopt_config(fields: Fields) -> Fields:
    """The fields of modelopt's own file, empty without one."""
    path = fields.path.with_name("hf_quant_config.json")
    return Fields(path, read_json(path) if path.exists() else {}).inner("quantization")


def reject_mlx(fields: Fields) -> None:
    """Raise CheckpointError if `config.json` says that MLX has quantised the weights."""
    for name in ("quantization", "quantization_config"):
        values = fields.values.get(name)
        if isinstance(values, dict) and "group_size" in values and "bits" in values and "quant_method" not in values:
            raise CheckpointError(
                f"{fields.path}: {name} says that MLX has quantised the weights, which is not served; take the "
                "unquantised checkpoint, with the setting quantization if you like"
            )


def _rejected(fields: Fields, what: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.path}: {what}; of quantised checkpoints those of {SERVED} are served. From an unquantised checkpoint "
        "the setting quantization makes one of 8 or 4 bits"
    )


def _one_of(fields: Fields, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = fields.values.get(name)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise fields.error(name, " or ".join(map(str, allowed)))
    return value


def _group_size(fields: Fields) -> int | None:
    size = fields.values.get("group_size")
    if size in (None, -1):
        return None
    if type(size) is not int or not UNIT <= size <= MAX_SIZE or size % UNIT:
        raise fields.error("group_size", f"-1 or a multiple of {UNIT}")
    return size


def _awq(fields: Fields) -> WeightFormat:
    _one_of(fields, "bits", (4,), 4)
    _one_of(fields, "version", ("gemm", "GEMM"), "gemm")
    zeros = fields.boolean("zero_point", True)
    return WeightFormat(method="awq", bits=4, group_size=_group_size(fields), is_symmetric=not zeros)


def _gptq(fields: Fields) -> WeightFormat:
    return WeightFormat(
        method="gptq",
        bits=_one_of(fields, "bits", (4, 8), None),
        group_size=_group_size(fields),
        is_symmetric=fields.boolean("sym", True),
        zero_shift=int(_one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"),
        has_act_order=fields.boolean("desc_act", False),
    )


def _auto_round(fields: Fields) -> WeightFormat:
    """As of GPTQ or AWQ; its own forms differ in zero points."""
    packing = str(fields.values.get("packing_format", fields.values.get("backend", "auto_round:auto_gptq")))
    if "awq" in packing:
        return _awq(fields)
    if "gptq" not in packing and not fields.boolean("sym", True):
        raise fields.error("packing_format", "one of gptq or awq, as the weights are not symmetric")
    return _gptq(fields)


def _bitsandbytes(fields: Fields) -> WeightFormat:
    if fields.boolean("load_in_8bit", False):
        return WeightFormat(method="int8", bits=8)
    if not fields.boolean("load_in_4bit", False):
        raise fields.error("load_in_4bit", "true, or load_in_8bit")
    return WeightFormat(method=_one_of(fields, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4"), bits=4)


def _fp8(fields: Fields) -> WeightFormat:
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    size = fields.values.get("weight_block_size")
    match size:
        case None:
            return WeightFormat(method="fp8")
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return WeightFormat(method="fp8", block_size=(rows, columns))
    raise fields.error("weight_block_size", "two positive integers")


def _modelopt(fields: Fields) -> WeightFormat:
    algorithm = fields.values.get("quant_algo")
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return WeightFormat(method="fp8")
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return WeightFormat(method="nvfp4", bits=4, group_size=_one_of(fields, "group_size", (16,), 16))
    raise fields.error("quant_algo", "FP8 or NVFP4; take the unquantised checkpoint, with the setting quantization if "
                       "you like")  # fmt: skip


def _compressed_tensors(fields: Fields) -> WeightFormat:
    """All groups of layers must have the same format."""
    if fields.inner("sparsity_config").values.get("format", "dense") != "dense":
        raise _rejected(fields, "the weights are sparse (sparsity_config)")
    if fields.inner("transform_config").values.get("config_groups"):
        raise _rejected(fields, "activations are rotated (transform_config)")
    groups = fields.inner("config_groups")
    formats = [_scheme(fields, groups.inner(name)) for name in groups.values]
    if not formats or any(one != formats[0] for one in formats):
        raise fields.error("config_groups", "one or more groups of the same weights")
    return formats[0]


def _scheme(fields: Fields, group: Fields) -> WeightFormat:
    form = group.values.get("format") or fields.values.get("format")
    weights = group.inner("weights")
    kind, bits, strategy = (weights.values.get(name) for name in ("type", "num_bits", "strategy"))
    is_symmetric = weights.boolean("symmetric", True)
    match form, kind, bits, strategy:
        case "pack-quantized", "int", (4 | 8), ("channel" | "group"):
            size = _group_size(weights) if strategy == "group" else None
            order = weights.values.get("actorder")
            return WeightFormat(
                method="pack-quantized", bits=int(bits), group_size=size, is_symmetric=is_symmetric,
                has_act_order=order is True or order in ("group", "dynamic"),
            )  # fmt: skip
        case (("int-quantized" | "naive-quantized"), "int", 8, ("channel" | "tensor")) if is_symmetric:
            return WeightFormat(method="int8", bits=8, is_per_tensor=strategy == "tensor")
        case (("float-quantized" | "naive-quantized"), "float", 8, ("channel" | "tensor")):
            return WeightFormat(method="fp8")
        case (("float-quantized" | "naive-quantized"), "float", 8, "block"):
            return _fp8(weights.with_values({"weight_block_size": weights.values.get("block_structure")}))
        case "nvfp4-pack-quantized", "float", 4, _:
            return WeightFormat(method="nvfp4", bits=4, group_size=_one_of(weights, "group_size", (16,), 16))
    raise _rejected(
        fields, f"quantization_config has quant_method compressed-tensors, format {form!s:.60}, with weights of "
        f"{bits!s:.20} bits, type {kind!s:.20}, strategy {strategy!s:.20}, symmetric: {is_symmetric}",
    )  # fmt: skip


def _gguf(quantization: Fields) -> WeightFormat:
    types, mixed_heads = quantization.values.get("types"), quantization.values.get("mixed_heads")
    if (
        not isinstance(types, dict)
        or not isinstance(mixed_heads, dict)
        or not all(one in BLOCKS for one in types.values())
    ):
        raise _rejected(quantization, "quant_method is gguf, which is of GGUF files alone")
    return WeightFormat(method="gguf", types=types, mixed_heads=mixed_heads)


_READERS: Mapping[str, Callable[[Fields], WeightFormat]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: WeightFormat(method="fp8"),
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "mxfp4": lambda _: WeightFormat(method="mxfp4", bits=4, group_size=MXFP4_BLOCK),
}
"""By `quant_method`."""
