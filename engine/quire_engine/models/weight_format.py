"""WeightFormat: how a checkpoint stores the weights of its linear layers, as `quantization_config` says. Does not use
torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.fields import Fields

__all__ = ["MXFP4_BLOCK", "WeightFormat", "read_weight_format"]

MXFP4_BLOCK = 32
"""Numbers of a row that share an exponent (OCP Microscaling Formats 1.0, section 5.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How weights are stored."""

    method: str = "unquantised"
    """Or `int8`, with a scale per output feature and for int8 activations; `mxfp4`, four bits and blocks of
    `MXFP4_BLOCK`, of experts alone."""


def read_weight_format(fields: Fields) -> WeightFormat:
    """Read the format from `config.json`.

    Raises:
        CheckpointError: it is one that is not read.
    """
    name = "compression_config" if fields.values.get("quantization_config") is None else "quantization_config"
    quantization = fields.inner(name).values
    if not quantization:
        return WeightFormat()
    match quantization:
        case {"quant_method": "mxfp4"}:
            return WeightFormat(method="mxfp4")
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
        "checkpoints only mxfp4 is read, and compressed-tensors with int8 weights per channel and dynamic int8 "
        "activations per token, both symmetric, of all linear layers but lm_head and routers. From an unquantised "
        "checkpoint the setting quantization makes one of the latter"
    )


def _stays_unquantised(name: object) -> bool:
    """Whether a name in the list of what is not quantised, or the pattern there, is the head or a router of experts."""
    return name == "lm_head" or (isinstance(name, str) and name.rstrip("$").endswith((".gate", ".shared_expert_gate")))


def _is_symmetric_int8(kind: Mapping[Any, Any], strategy: str, dynamic: bool) -> bool:
    return (
        (kind.get("num_bits"), kind.get("type"), kind.get("strategy")) == (8, "int", strategy)
        and bool(kind.get("symmetric", True))
        and bool(kind.get("dynamic", False)) == dynamic
    )
