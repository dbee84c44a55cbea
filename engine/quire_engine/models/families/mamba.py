"""Mamba (Gu & Dao 2023, https://arxiv.org/abs/2312.00752), Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060),
and decoders that have them in some layers, or beside attention."""

from collections.abc import Callable, Mapping
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import read_attention, read_head_size, read_mlp, read_num_layers
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    LayerOptions,
    MambaOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
    SelectiveOptions,
    StateOptions,
)

MAMBA_NAMES = (
    *((f".mixer.{name}", f".mixer.{name}.weight") for name in ("A_log", "D", "dt_bias")),
    (".mixer.norm.", ".mixer.gated_norm."),
)
MAMBA_FUSED = (
    ("in_proj", ("z_proj", "x_proj", "b_proj", "c_proj", "dt_proj")), ("conv1d", ("x_conv", "b_conv", "c_conv")),
)  # fmt: skip
MAMBA_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
"""Of most families."""
SELECTIVE_FUSED = (("in_proj", ("u_proj", "z_proj")),)
# There is no attention: the last two are of no use, and any length is possible; 2048 is vLLM's default.
_ALONE: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5, "conv_kernel": 4, "expand": 2, "max_position_embeddings": 2048,
    "num_attention_heads": 1, "head_dim": 2,
}  # fmt: skip
_SELECTIVE: Mapping[str, Any] = {**_ALONE, "state_size": 16, "tie_word_embeddings": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {
        **MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    },
    "falcon_h1": {
        **MAMBA_DEFAULTS, "rms_norm_eps": 1e-5, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "falcon_mamba": _SELECTIVE,
    "jamba": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 262144, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2,
    },
    "mamba": _SELECTIVE,
    "mamba2": {**_ALONE, "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128},
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {
    name: {"layer_norm_epsilon": "rms_norm_eps"} for name in ("falcon_mamba", "mamba", "mamba2")
}
ALONE_NAMES = (
    *MAMBA_NAMES,
    (".norm.", ".input_layernorm."),
    ("backbone.", "model."),
    ("model.embedding.", "model.embed_tokens."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
)
HYBRID_NAMES = (
    (".mamba.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".mlp.router.", ".mlp.gate."),
    ("model.final_layernorm.", "model.norm."),
    *MAMBA_NAMES,
)
ALONE_NORMS, HYBRID_NORMS = (
    NormOptions(before_attention="input_layernorm"),
    NormOptions(before_attention="input_layernorm", before_mlp="pre_ff_layernorm"),
)
ATTENTION, RECURRENT = ("full_attention", "attention"), ("linear_attention", "mamba")
"""Kinds of layers, as transformers calls them now, and before."""


def mamba(fields: Fields) -> ModelOptions:
    return _alone(fields, _read_selective(fields, _read_channels(fields)), SELECTIVE_FUSED)


def falcon_mamba(fields: Fields) -> ModelOptions:
    """FalconMamba (https://arxiv.org/abs/2410.05355, section 3): dt, B and C are normed, without weights."""
    options = _read_selective(
        fields, _read_channels(fields), norm_eps=fields.positive("mixer_rms_eps", 1e-6), norm_weights=False
    )
    return _alone(fields, options, SELECTIVE_FUSED)


def mamba2(fields: Fields) -> ModelOptions:
    options = read_mamba(
        fields, num_heads="num_heads", head_size="head_dim", num_groups="n_groups", state_size="state_size",
        conv_size="conv_kernel", bias="use_bias", conv_bias="use_conv_bias",
    )  # fmt: skip
    return _alone(fields, options, MAMBA_FUSED)


def bamba(fields: Fields) -> ModelOptions:
    """Bamba (https://huggingface.co/blog/bamba): attention, of which half of each head is rotated, in some layers, and
    Mamba-2 in the others."""
    indices, num_layers = fields.values.get("attn_layer_indices") or [], read_num_layers(fields)
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < num_layers for i in indices):
        raise fields.error("attn_layer_indices", f"a list of layers' numbers, below {num_layers}")
    fields = fields.with_values({**fields.values, "partial_rotary_factor": 0.5})
    attention, mlp, options = read_attention(fields), read_mlp(fields, bias=None), read_mamba(fields)
    fields.choice("hidden_act", ("silu",), "silu")
    return ModelOptions(
        layers=tuple(
            LayerOptions(attention, mlp) if i in indices else LayerOptions(None, mlp, options)
            for i in range(num_layers)
        ),
        norms=HYBRID_NORMS,
        renamed=HYBRID_NAMES,
        fused=MAMBA_FUSED,
    )


def falcon_h1(fields: Fields) -> ModelOptions:
    """Falcon-H1 (https://arxiv.org/abs/2507.22448, section 2): attention and Mamba-2 see the same rows, and their
    results are added. Multipliers (section 3.2.3) are part of the weights that are loaded, or of their scales."""
    has_norm = fields.boolean("mamba_rms_norm", False)
    options = read_mamba(
        fields, has_norm=has_norm, gates_first=not fields.boolean("mamba_norm_before_gate", True),
        out_bias=fields.boolean("projectors_bias", False),
    )  # fmt: skip
    fields.choice("hidden_act", ("silu",), "silu")
    layer = LayerOptions(read_attention(fields), read_mlp(fields, bias=None), options)
    ssm = _read_multipliers(fields, "ssm_multipliers", 5)
    gate, down = _read_multipliers(fields, "mlp_multipliers", 2)
    into = {
        name: fields.positive(name, 1.0) for name in ("attention_in_multiplier", "ssm_in_multiplier", "key_multiplier")
    }
    for name, bias in (("attention_in_multiplier", "attention_bias"), ("ssm_in_multiplier", "mamba_proj_bias")):
        if into[name] != 1 and fields.boolean(bias, False):
            raise fields.error(bias, f"false, as {name} is {into[name]}")
    scaled = {
        "q_proj": into["attention_in_multiplier"],
        "k_proj": into["attention_in_multiplier"] * into["key_multiplier"],
        "v_proj": into["attention_in_multiplier"],
        "o_proj": fields.positive("attention_out_multiplier", 1.0),
        "out_proj": fields.positive("ssm_out_multiplier", 1.0),
        "gate_proj": gate,
        "down_proj": down,
        **{part: into["ssm_in_multiplier"] * one for part, one in zip(dict(MAMBA_FUSED)["in_proj"], ssm, strict=True)},
    }
    return ModelOptions(
        layers=(layer,) * read_num_layers(fields),
        norms=HYBRID_NORMS,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logits_divisor=1 / fields.positive("lm_head_multiplier", 1.0),
        renamed=HYBRID_NAMES,
        fused=MAMBA_FUSED,
        scaled=tuple((f".{name}", scale) for name, scale in scaled.items() if scale != 1),
        skipped=(".mup_vector",),
    )


def jamba(fields: Fields) -> ModelOptions:
    """Jamba (https://arxiv.org/abs/2403.19887, section 3): attention without positions in some layers, Mamba with norms
    in the others; experts in some."""
    has_attention = _read_period(fields, "attn_layer", 8, 4)
    number, mlp = fields.integer("num_experts", 1, MAX_EXPERTS, 16), read_mlp(fields)
    has_experts = _read_period(fields, "expert_layer", 2, 1) if number > 1 else lambda _: False
    read_head_size(fields)
    mlps: dict[bool, MLPOptions | ExpertsOptions] = {False: mlp, True: mlp}
    if number > 1:
        top_k = fields.integer("num_experts_per_tok", 1, number, min(2, number))
        mlps[True] = ExpertsOptions(num_experts=number, top_k=top_k, expert=mlp, norm_topk_prob=False)
    size = fields.integer("hidden_size", 1, MAX_SIZE) * fields.integer("mamba_expand", 1, MAX_SIZE)
    options = _read_selective(
        fields, size, state_size="mamba_d_state", conv_size="mamba_d_conv", dt_rank="mamba_dt_rank",
        bias="mamba_proj_bias", conv_bias="mamba_conv_bias", norm_eps=fields.positive("rms_norm_eps", 1e-6),
    )  # fmt: skip
    return ModelOptions(
        layers=tuple(
            LayerOptions(AttentionOptions(rope=None), mlps[has_experts(i)])
            if has_attention(i)
            else LayerOptions(None, mlps[has_experts(i)], options)
            for i in range(read_num_layers(fields))
        ),
        norms=HYBRID_NORMS,
        renamed=HYBRID_NAMES,
        fused=SELECTIVE_FUSED,
    )


def _alone(fields: Fields, state: StateOptions, fused: tuple[tuple[str, tuple[str, ...]], ...]) -> ModelOptions:
    """A decoder of such layers, each with one norm and no feed-forward."""
    return ModelOptions(
        layers=(LayerOptions(None, None, state),) * read_num_layers(fields),
        norms=ALONE_NORMS,
        renamed=ALONE_NAMES,
        fused=fused,
    )


def read_mamba(
    fields: Fields,
    *,
    num_heads: str = "mamba_n_heads",
    head_size: str = "mamba_d_head",
    num_groups: str = "mamba_n_groups",
    state_size: str = "mamba_d_state",
    conv_size: str = "mamba_d_conv",
    bias: str = "mamba_proj_bias",
    conv_bias: str = "mamba_conv_bias",
    out_bias: bool | None = None,
    **options: Any,
) -> MambaOptions:
    """Mamba-2's layers.

    Args:
        fields: of `config.json`.
        num_heads: the name of the field with the option of this name, as of the next six.
        head_size: see above; the field may be `auto` or missing.
        num_groups: see above.
        state_size: see above.
        conv_size: see above.
        bias: see above.
        conv_bias: see above.
        out_bias: whether the output projection has a bias; None: as the others.
        options: the other ones.
    """
    heads, groups = fields.integer(num_heads, 1, MAX_SIZE), fields.integer(num_groups, 1, MAX_SIZE)
    if heads % groups:
        raise fields.error(num_groups, f"a divisor of {num_heads}={heads}")
    if fields.values.get(head_size, "auto") in ("auto", None):
        whole = fields.integer("hidden_size", 1, MAX_SIZE) * fields.integer("mamba_expand", 1, MAX_SIZE)
        whole = fields.integer("mamba_d_ssm", 1, MAX_SIZE, whole)
        if whole % heads:
            raise fields.error(num_heads, f"a divisor of {whole}, the channels of all heads")
        size = whole // heads
    else:
        size = fields.integer(head_size, 1, MAX_SIZE)
    return MambaOptions(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=fields.integer(state_size, 1, MAX_SIZE),
        conv_size=fields.integer(conv_size, 2, MAX_SIZE),
        in_bias=(has_bias := fields.boolean(bias, False)),
        out_bias=has_bias if out_bias is None else out_bias,
        conv_bias=fields.boolean(conv_bias, True),
        dt_limits=_read_limits(fields),
        **options,
    )


def read_layer_kinds(fields: Fields, default: str) -> list[bool]:
    """Whether each layer is a recurrence; else it is attention.

    Args:
        fields: of `config.json`.
        default: the kind of all, if neither `layer_types` nor `layers_block_type` names them.
    """
    num_layers = read_num_layers(fields)
    name = "layers_block_type" if fields.values.get("layer_types") is None else "layer_types"
    kinds = fields.values.get(name) or [default] * num_layers
    known = (*ATTENTION, *RECURRENT)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise fields.error(name, f"one of {', '.join(known)} for each of {num_layers} layers")
    return [kind in RECURRENT for kind in kinds]


def _read_limits(fields: Fields) -> tuple[float, float]:
    """`time_step_limit`; infinity is a number of Python's JSON, or an object of transformers'."""
    limits = fields.values.get("time_step_limit") or [0.0, "Infinity"]
    try:
        low, high = (float(one["__float__"] if isinstance(one, dict) else one) for one in limits)
    except (TypeError, ValueError, KeyError):
        low = high = -1.0
    if not 0 <= low <= high:
        raise fields.error("time_step_limit", "two numbers from 0 on, the lower first")
    return low, high


def _read_selective(
    fields: Fields,
    num_channels: int,
    *,
    state_size: str = "state_size",
    conv_size: str = "conv_kernel",
    dt_rank: str = "time_step_rank",
    bias: str = "use_bias",
    conv_bias: str = "use_conv_bias",
    **options: Any,
) -> SelectiveOptions:
    """Mamba's layers. The other arguments are names of fields, as of `read_mamba`."""
    fields.choice("hidden_act", ("silu",), "silu")
    is_auto = fields.values.get(dt_rank, "auto") in ("auto", None)
    auto = -(-fields.integer("hidden_size", 1, MAX_SIZE) // 16)
    return SelectiveOptions(
        num_channels=num_channels,
        state_size=fields.integer(state_size, 1, MAX_SIZE),
        conv_size=fields.integer(conv_size, 2, MAX_SIZE),
        dt_rank=auto if is_auto else fields.integer(dt_rank, 1, MAX_SIZE),
        bias=fields.boolean(bias, False),
        conv_bias=fields.boolean(conv_bias, True),
        **options,
    )


def _read_channels(fields: Fields) -> int:
    """Those of a model that is Mamba alone: `intermediate_size`, or a multiple of `hidden_size`."""
    size = fields.integer("hidden_size", 1, MAX_SIZE) * fields.integer("expand", 1, MAX_SIZE)
    return fields.integer("intermediate_size", 1, MAX_SIZE, size)


def _read_period(fields: Fields, name: str, period: int, offset: int) -> Callable[[int], bool]:
    """Which layers are of a kind that comes once in a period; the numbers are defaults of fields."""
    period = fields.integer(f"{name}_period", 1, MAX_LAYERS, period)
    offset = fields.integer(f"{name}_offset", 0, period - 1, min(offset, period - 1))
    return lambda number: number % period == offset


def _read_multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.values.get(name) is None else fields.positive_numbers(name, count)
