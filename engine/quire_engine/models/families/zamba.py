"""Zamba2 (https://arxiv.org/abs/2411.15242, section 2): Mamba-2 in all layers, of which some see the output of a block
of attention and feed-forward, too, which they share."""

from collections.abc import Mapping
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.mamba import ALONE_NORMS, MAMBA_FUSED, MAMBA_NAMES, RECURRENT, read_mamba
from quire_engine.models.families.reading import read_mlp, read_num_layers, read_rope
from quire_engine.models.options import AttentionOptions, LayerOptions, ModelOptions, SharedTransformerOptions

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "zamba2": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "gelu",
        "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2,
    }
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {"zamba2": {"attention_head_dim": "head_dim"}}
HYBRID = "hybrid"
"""The kind of a layer that uses a block."""
MAX_USERS = 256
"""More would be a mistake in the file: each has names of its own among those of a block's tensors."""
NORM_EPS = 1e-5
"""Of the norms in Mamba-2, not `rms_norm_eps`."""
NAMES = (
    *((f".attention_products.{name}.1.", f".attention_products.up.{name}.") for name in "qkv"),
    (".mlp_products.gate_up.1.", ".mlp_products.up.gate_up."),
    (".feed_forward.", "."),
    (".mamba_decoder.", "."),
    (".mamba.", ".mixer."),
    ("model.final_layernorm.", "model.norm."),
    *MAMBA_NAMES,
)
FUSED = (*MAMBA_FUSED, ("gate_up_proj", ("gate_proj", "up_proj")), ("gate_up", ("gate", "up")))


def zamba2(fields: Fields) -> ModelOptions:
    hidden_size, num_heads = (fields.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads"))
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size={hidden_size}")
    if fields.boolean("use_long_context", False):  # which scaled the rotation in earlier versions of transformers
        raise fields.error("use_long_context", "false")
    if not fields.boolean("tie_word_embeddings", True):
        raise fields.error("tie_word_embeddings", "true, as transformers shares the blocks only then")
    adapts_attention = fields.boolean("use_shared_attention_adapter", False)
    if adapts_attention and fields.integer("num_key_value_heads", 1, num_heads, num_heads) != num_heads:
        raise fields.error("num_key_value_heads", f"{num_heads}, as use_shared_attention_adapter is true")
    head_size = 2 * hidden_size // num_heads
    if fields.integer("head_dim", 1, MAX_SIZE, head_size) != head_size:
        raise fields.error("attention_head_dim", f"{head_size}, as attention sees twice the hidden_size")
    attention = AttentionOptions(
        rope=read_rope(fields, head_size) if fields.boolean("use_mem_rope", False) else None,
        head_size=head_size, scale=(head_size / 2) ** -0.5,
    )  # fmt: skip
    fields = fields.with_values({
        **fields.values, "intermediate_size": fields.integer("intermediate_size", 1, MAX_SIZE, 4 * hidden_size),
        "mlp_bias": fields.boolean("add_bias_linear", False),
    })  # fmt: skip
    # `time_step_min` is of the initialisation: transformers limits dt by it in prompts alone.
    mamba = read_mamba(
        fields, num_heads="n_mamba_heads", head_size="mamba_headdim", num_groups="mamba_ngroups",
        bias="add_bias_linear", norm_eps=NORM_EPS,
    )  # fmt: skip
    layers = {False: LayerOptions(None, None, mamba), True: LayerOptions(attention, read_mlp(fields, bias=None), mamba)}
    is_user = _read_users(fields)
    users = [number for number, uses_block in enumerate(is_user) if uses_block]
    shared = SharedTransformerOptions(
        num_blocks=fields.integer("num_mem_blocks", 1, MAX_USERS, 1),
        rank=fields.integer("adapter_rank", 1, MAX_SIZE, 128),
        adapts_attention=adapts_attention,
    )
    return ModelOptions(
        layers=tuple(layers[uses_block] for uses_block in is_user),
        norms=ALONE_NORMS,
        shared_transformer=shared,
        renamed=(*_block_names(users, shared.num_blocks), *NAMES),
        fused=FUSED,
        skipped=(".shared_transformer.",),  # of layers that use a block after its first one: copies
    )


def _read_users(fields: Fields) -> list[bool]:
    """Whether each layer uses a block."""
    num_layers, known = read_num_layers(fields), (*RECURRENT, HYBRID)
    name = "layer_types" if fields.values.get("layers_block_type") is None else "layers_block_type"
    kinds = fields.values.get(name)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.error(name, f"one of {', '.join(known)} for each of {num_layers} layers")
    if kinds.count(HYBRID) > MAX_USERS:
        raise fields.error(name, f"{HYBRID} for at most {MAX_USERS} layers")
    return [kind == HYBRID for kind in kinds]


def _block_names(users: list[int], num_blocks: int) -> list[tuple[str, str]]:
    """A block's tensors are those of the first layer that uses it; so are the products of the others, numbered."""
    names = [(f"model.layers.{number}.shared_transformer.", f"model.shared_transformer.{block}.")
             for block, number in enumerate(users[:num_blocks])]  # fmt: skip
    for i, number in enumerate(users):
        block, layer = f"model.shared_transformer.{i % num_blocks}.", f"model.layers.{number}."
        names += [
            (f"{block}self_attn.linear_{one}_adapter_list.{i}.", f"{layer}attention_products.{one}.") for one in "qkv"
        ]
        names.append((f"{block}feed_forward.gate_up_proj_adapter_list.{i}.", f"{layer}mlp_products.gate_up."))
    return names
