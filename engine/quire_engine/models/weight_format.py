"""WeightFormat: how a checkpoint stores the weights of its linear layers, as `quantization_config` says. Does not use
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.gguf_metadata import BLOCKS
from quire_engine.models.fields import Fields
from quire_engine.models.files import brief, read_json

MXFP4_BLOCK = 32
"""Numbers of a row that share an exponent (OCP Microscaling Formats 1.0, section 5.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weights are stored."""

    method: str = "unquantised"
    """Or `int8`, with a scale per output feature and for int8 activations; `mxfp4`, four bits and blocks of
    `MXFP4_BLOCK`, of experts alone; `fp8`, e4m3 and blocks of `block_size`, where a weight has scales; or `gguf`, of
    the types `types`."""
    block_size: tuple[int, int] = (1, 1)
    """Rows and columns of a weight that share a scale; of `fp8` only."""
    types: Mapping[str, str] = field(default_factory=dict)
    """By a linear layer's name in the model, the quantised type of its weight; of `gguf` only."""


def read_weight_format(fields: Fields) -> WeightFormat:
    """Read the format from `config.json`.

    Raises:
        CheckpointError: it is one that is not read.
    """
    reject_other_quantisers(fields)
    name = "compression_config" if fields.values.get("quantization_config") is None else "quantization_config"
    quantization = fields.inner(name).values
    if not quantization:
        return WeightFormat()
    match quantization:
        case {"quant_method": "mxfp4"}:
            return WeightFormat(method="mxfp4")
        case {"quant_method": "gguf", "types": {**types}} if all(one in BLOCKS for one in types.values()):
            return WeightFormat(method="gguf", types=types)
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if (
            quantization.get("fmt", "e4m3") == "e4m3" and rows > 0 and columns > 0
        ):
            return WeightFormat(method="fp8", block_size=(rows, columns))
        case {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": [*ignored],
            "config_groups": {**groups},
        } if len(groups) == 1 and "lm_head" in ignored and all(map(_stays_unquantised, ignored)):
            match next(iter(groups.values())):
                case {"targets": ["Linear"], "weights": {**weights}, "input_activations": {**activations}} if (
                    _is_symmetric_int8(weights, "channel", dynamic=False)
                    and _is_symmetric_int8(activations, "token", dynamic=True)
                ):
                    return WeightFormat(method="int8")
    method, form = (str(quantization.get(key, "not named")) for key in ("quant_method", "format"))
    raise CheckpointError(
        f"{fields.path}: {name} has quant_method {method:.60}, format {form:.60}; of quantised "
        "checkpoints only mxfp4, fp8 (e4m3) with a weight_block_size, and compressed-tensors with int8 weights per "
        "channel and dynamic int8 activations per token, both symmetric, of all linear layers but lm_head and routers, "
        "are served. From an unquantised checkpoint the setting quantization makes one of the last"
    )


def reject_other_quantisers(fields: Fields) -> None:
    """Reject weights that are quantised in a way of which `quantization_config` says nothing, or not all.

    Args:
        fields: of `config.json`.

    Raises:
        CheckpointError: they are MLX's or modelopt's.
    """
    mend = "is not served; take the unquantised checkpoint, with the setting quantization if you like"
    for name in ("quantization", "quantization_config"):
        values = fields.values.get(name)
        if isinstance(values, dict) and "group_size" in values and "bits" in values and "quant_method" not in values:
            raise CheckpointError(f"{fields.path}: {name} says that MLX has quantised the weights, which {mend}")
    path = fields.path.with_name("hf_quant_config.json")
    if path.exists():
        algorithm = Fields(path, read_json(path)).inner("quantization").values.get("quant_algo")
        if algorithm:
            raise CheckpointError(f"{path}: modelopt has quantised the weights ({brief(algorithm)}), which {mend}")


def _stays_unquantised(name: object) -> bool:
    """Whether a name in the list of what is not quantised, or the pattern there, is the head or a router of experts."""
    return name == "lm_head" or (isinstance(name, str) and name.rstrip("$").endswith((".gate", ".shared_expert_gate")))


def _is_symmetric_int8(kind: Mapping[Any, Any], strategy: str, dynamic: bool) -> bool:
    return (
        (kind.get("num_bits"), kind.get("type"), kind.get("strategy")) == (8, "int", strategy)
        and bool(kind.get("symmetric", True))
        and bool(kind.get("dynamic", False)) == dynamic
    )
