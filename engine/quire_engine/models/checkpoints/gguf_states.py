"""Layers with states in GGUF files: fields of `config.json`, names of tensors, and what llama.cpp's conversion changes
in these.

Where a key's head is of several heads of values, the values of Qwen3.5 are in another order than the model's, so that
llama.cpp can repeat keys as a whole. With two heads of keys, K and L, and three heads of values of each::

    the model   K0 K1 K2 L0 L1 L2
    the file    K0 L0 K1 L1 K2 L2
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import StoredTensor
from quire_engine.models.checkpoints.gguf_types import BLOCKS, Array, ModelValues

if TYPE_CHECKING:
    import torch

LFMS = ("lfm2", "lfm2moe")
TILED = ("qwen35", "qwen35moe")
"""Architectures whose heads of values are reordered."""
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
ALONE = ("mamba", "mamba2")
"""Architectures without attention."""
MAMBAS = ("falcon-h1", "granitehybrid", "mamba2", *NEMOTRONS)
"""Those with Mamba-2."""
MODULES = {
    **dict.fromkeys(MAMBAS, "mamba"), **dict.fromkeys(("qwen3next", *TILED), "linear_attn"),
    **dict.fromkeys((*ALONE, *NEMOTRONS), "mixer"),
}  # fmt: skip
"""Architectures with `ssm_` tensors, and what transformers calls the module that they are of."""
PROJECTIONS = {"attn_gate": "z_proj", "ssm_alpha": "a_proj", "ssm_beta": "b_proj", "ssm_out": "out_proj"}
"""The projections of gated delta rules that are one tensor here and there."""


def state_fields(metadata: ModelValues) -> dict[str, Any]:
    """The fields of `config.json` that only models with such layers have."""
    if metadata.kind in LFMS:
        return _lfm(metadata)
    if metadata.kind == "granitehybrid":
        return _mamba(metadata) | _granite_hybrid(metadata)
    if metadata.kind == "falcon-h1":  # multipliers are in the weights
        return {
            **_mamba(metadata),
            "mamba_d_ssm": metadata.size("ssm.inner_size"),
            "mamba_rms_norm": metadata.has_any(".ssm_norm.weight"),
            "mamba_norm_before_gate": False,  # as llama.cpp computes
            "projectors_bias": metadata.has_any(".ssm_out.bias"),
        }
    if metadata.kind in ALONE:
        return _alone(metadata)
    if metadata.kind in NEMOTRONS:
        return _nemotron(metadata)
    return _gated_delta(metadata) if metadata.kind in MODULES else {}


def _lfm(metadata: ModelValues) -> dict[str, Any]:
    return {
        "num_key_value_heads": max(metadata.kv_heads) or None,
        "layer_types": ["full_attention" if number else "conv" for number in metadata.kv_heads],
        "conv_L_cache": metadata.get("shortconv.l_cache"),
        "conv_bias": metadata.has_any(".shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,  # llama.cpp writes the size that it makes
        "num_dense_layers": metadata.get("leading_dense_block_count"),
        "use_expert_bias": metadata.has_any(".exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": metadata.get("expert_weights_scale") or 1.0,
    }


def _alone(metadata: ModelValues) -> dict[str, Any]:
    """Mamba, and Mamba-2. llama.cpp writes no heads of attention, and a feed-forward of size 0."""
    get, inner, rank = metadata.get, metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
    fields = {
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "intermediate_size": inner,
        "state_size": get("ssm.state_size"),
        "conv_kernel": get("ssm.conv_kernel"),
        "use_bias": metadata.has_any(".ssm_in.bias"),
        "use_conv_bias": metadata.has_any(".ssm_conv1d.bias"),
    }
    if metadata.kind == "mamba":
        return {**fields, "time_step_rank": rank}
    return {**fields, "num_heads": rank, "head_dim": inner // rank, "n_groups": get("ssm.group_count")}


def _nemotron(metadata: ModelValues) -> dict[str, Any]:
    """A layer without heads of keys has states, experts or a feed-forward, by its tensors."""
    get, letters = metadata.get, {"ssm_in.weight": "M", "ffn_gate_inp.weight": "E"}
    num_heads = metadata.size("ssm.time_step_rank")
    sizes = get("feed_forward_length")
    return {
        "hybrid_override_pattern": "".join(
            "*" if heads else
            next((one for end, one in letters.items() if f"blk.{number}.{end}" in metadata.stored), "-")
            for number, heads in enumerate(metadata.kv_heads)
        ),
        "num_key_value_heads": max(metadata.kv_heads) or None,
        "intermediate_size": max(metadata.per_layer("feed_forward_length")) if isinstance(sizes, Array) else sizes,
        "mlp_bias": metadata.has_any(".ffn_up.bias"),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": metadata.size("ssm.inner_size") // num_heads,
        "n_groups": get("ssm.group_count"),
        "ssm_state_size": get("ssm.state_size"),
        "conv_kernel": get("ssm.conv_kernel"),
        "use_conv_bias": metadata.has_any(".ssm_conv1d.bias"),
        "use_bias": metadata.has_any(".ssm_in.bias"),
        "moe_shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
        "moe_latent_size": get("moe_latent_size"),
    }  # fmt: skip


def _mamba(metadata: ModelValues) -> dict[str, Any]:
    num_heads = metadata.size("ssm.time_step_rank")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": metadata.size("ssm.inner_size") // num_heads,
        "mamba_n_groups": metadata.get("ssm.group_count"),
        "mamba_d_state": metadata.get("ssm.state_size"),
        "mamba_d_conv": metadata.get("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_any(".ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_any(".ssm_in.bias"),
    }


def _granite_hybrid(metadata: ModelValues) -> dict[str, Any]:
    get, num_experts = metadata.get, metadata.get("expert_count")
    fields: dict[str, Any] = {
        "num_key_value_heads": max(metadata.kv_heads) or None,
        "layer_types": ["attention" if number else "mamba" for number in metadata.kv_heads],
        "position_embedding_type": "rope" if get("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": num_experts or 0,
    }
    if not num_experts:
        fields["shared_intermediate_size"] = get("feed_forward_length")
    if not get("attention.scale"):  # Bamba's files have none
        size = get("attention.key_length")
        size = size or metadata.size("embedding_length") // metadata.size("attention.head_count")
        fields["attention_multiplier"] = size**-0.5
    return fields


def _gated_delta(metadata: ModelValues) -> dict[str, Any]:
    num_heads, newer = metadata.size("ssm.time_step_rank"), "attention.recurrent_layers"
    recurrent = None if metadata.get(newer) is None else metadata.per_layer(newer)
    return {
        "layer_types": recurrent and ["linear_attention" if one else "full_attention" for one in recurrent],
        "full_attention_interval": metadata.get("full_attention_interval"),
        "linear_conv_kernel_dim": metadata.get("ssm.conv_kernel"),
        "linear_num_key_heads": metadata.get("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": metadata.get("ssm.state_size"),
        "linear_value_head_dim": metadata.size("ssm.inner_size") // num_heads,
        "linear_by_key_head": False,
    }


def is_of_state(kind: str, part: str) -> bool:
    """Whether a tensor of a layer, by the part of its name after the layer's number, is one of those below."""
    return kind in MODULES and part.startswith(("ssm_", "attn_qkv", "attn_gate"))


def state_parts(
    metadata: ModelValues, layer: str, part: str, kind: str, tensor: StoredTensor
) -> dict[str, StoredTensor]:
    """The tensors that one in the file stands for, by their names here.

    Args:
        metadata: of the file.
        layer: what the layer is called here.
        part: the tensor's name after the layer's number, without its last part.
        kind: the last part.
        tensor: in the file.
    """
    module, rows = f"{layer}.{MODULES[metadata.kind]}", tensor.shape[0]
    match part, kind:
        case "ssm_a" | "ssm_d", _:  # [H, 1]
            flat = dataclasses.replace(tensor, shape=(rows,)) if tensor.shape[1:] == (1,) else tensor
            return {f"{module}.{'A_log' if part == 'ssm_a' else 'D'}": flat}
        case ("ssm_dt" | "ssm_x", _) if metadata.kind == "mamba":
            return {f"{module}.{part.removeprefix('ssm_')}_proj.{kind}": tensor}
        case "ssm_dt", "bias":
            return {f"{module}.dt_bias": tensor}
        case "ssm_conv1d", "weight" if len(tensor.shape) == 2:
            return {f"{module}.conv1d.weight": dataclasses.replace(tensor, shape=(rows, 1, tensor.shape[1]))}
        case "ssm_conv1d", "bias":
            return {f"{module}.conv1d.bias": tensor}
        case "ssm_norm", "weight":  # [G, I / G]
            return {f"{module}.norm.weight": dataclasses.replace(tensor, shape=(math.prod(tensor.shape),))}
        case "attn_qkv", "weight":
            keys = metadata.size("ssm.group_count") * metadata.size("ssm.state_size")
            sizes = {"q": keys, "k": keys, "v": metadata.size("ssm.inner_size")}
            return split_rows(tensor, {f"{layer}.mixer.{one}_proj.weight": own for one, own in sizes.items()})
        case (("attn_gate" | "ssm_alpha" | "ssm_beta" | "ssm_out"), _):
            return {f"{layer}.mixer.{PROJECTIONS[part]}.{kind}": tensor}
        case "ssm_ba", "weight":
            return split_rows(tensor, {f"{layer}.mixer.{one}_proj.weight": 1 for one in "ba"})
        case "ssm_in", _ if metadata.kind == "mamba":
            return split_rows(tensor, {f"{layer}.mixer.{one}_proj.{kind}": 1 for one in "uz"})
        case "ssm_in", _ if metadata.kind in MAMBAS:
            size, heads = metadata.size("ssm.inner_size"), metadata.size("ssm.time_step_rank")
            group_size = metadata.size("ssm.group_count") * metadata.size("ssm.state_size")
            sizes = {"z": size, "x": size, "b": group_size, "c": group_size, "dt": heads}
            return split_rows(tensor, {f"{layer}.mixer.{one}_proj.{kind}": own for one, own in sizes.items()})
    return {tensor.name: tensor}


def split_rows(tensor: StoredTensor, parts: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Parts of a tensor, one after the other, by their names and their shares of its rows."""
    unit, rest = divmod(tensor.shape[0], sum(parts.values()))
    if rest:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has {tensor.shape[0]} rows; "
            f"its metadata asks for parts of {[*parts.values()]}"
        )
    first, found = 0, {}
    for name, share in parts.items():
        found[name] = dataclasses.replace(
            tensor, shape=(share * unit, *tensor.shape[1:]), first_row=first,
            num_bytes=tensor.num_bytes * share // sum(parts.values()),
        )  # fmt: skip
        first += share * unit
    return found


def restored(metadata: ModelValues, tensor: StoredTensor, whole: "torch.Tensor") -> "torch.Tensor":
    """What the file has of a tensor, as the model has it; blocks of columns may still have several heads of values
    (`mixed_heads`)."""
    import torch

    part = tensor.name.split(".", 2)[-1]
    if part == "ssm_ba.weight":  # of each head of keys a part of two kinds
        key_heads = metadata.size("ssm.group_count")
        return whole.view(key_heads, 2, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
    if part == "ssm_a":  # llama.cpp has the decay itself
        whole = whole.neg().log()
    each = _values_per_key(metadata)
    if each == 1:
        return whole
    key_heads = metadata.size("ssm.group_count")
    match part:
        case "attn_qkv.weight" | "ssm_conv1d.weight":  # queries and keys first
            first = len(whole) - metadata.size("ssm.inner_size")
            return torch.cat((whole[:first], _grouped(whole[first:], 0, each, key_heads)))
        case "attn_gate.weight" | "ssm_alpha.weight" | "ssm_beta.weight" | "ssm_a" | "ssm_dt.bias":
            return _grouped(whole, 0, each, key_heads)
        case "ssm_out.weight":
            return _grouped(whole, 1, each, key_heads // _heads_per_block(metadata, tensor))
    return whole


def mixed_heads(metadata: ModelValues, tensor: StoredTensor) -> tuple[int, int] | None:
    """How many heads of values a head of keys has, and the size of each, where a block of a quantised tensor's columns
    has heads of several ones of keys, which only its numbers can be put in order of; None elsewhere."""
    each = _values_per_key(metadata) if tensor.name.endswith(".ssm_out.weight") else 1
    if each == 1 or _heads_per_block(metadata, tensor) == 1:
        return None
    return each, metadata.size("ssm.inner_size") // metadata.size("ssm.time_step_rank")


def _values_per_key(metadata: ModelValues) -> int:
    """How many heads of values are reordered for each head of keys; 1: none is."""
    if metadata.kind not in TILED:
        return 1
    heads, key_heads = metadata.size("ssm.time_step_rank"), metadata.size("ssm.group_count")
    if heads % key_heads:
        raise CheckpointError(
            f"{metadata.path}: {metadata.kind}.ssm.time_step_rank is {heads}; it must be a multiple of "
            f"ssm.group_count={key_heads}"
        )
    return heads // key_heads


def _heads_per_block(metadata: ModelValues, tensor: StoredTensor) -> int:
    """Of how many heads of keys values are in a block of columns; 1: of one."""
    numbers, _ = BLOCKS.get(tensor.dtype, (1, 1))
    size = metadata.size("ssm.inner_size") // metadata.size("ssm.time_step_rank")
    if size and size % numbers == 0:
        return 1
    if not size or numbers % size or metadata.size("ssm.group_count") % (numbers // size):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} is {tensor.dtype} with blocks of {numbers} columns; its heads of "
            f"values, of {size} columns, cannot be put in order"
        )
    return numbers // size


def _grouped(tensor: "torch.Tensor", dim: int, each: int, units: int) -> "torch.Tensor":
    """Put what belongs to each of so many units side by side: the file has one of each unit after the other."""
    shape = tensor.shape
    parts = tensor.reshape(*shape[:dim], each, units, -1, *shape[dim + 1 :])
    return parts.transpose(dim, dim + 1).reshape(shape)
