"""BERT (Devlin et al. 2019, https://arxiv.org/abs/1810.04805), and encoders that differ from it in a few options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.families.llama import llama
from quire_engine.models.families.reading import (
    make_layers,
    read_head_size,
    read_max_position_embeddings,
    read_rope,
    read_window_rope,
    read_windows,
)
from quire_engine.models.options import (
    AttentionOptions,
    EncoderOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
    RopeConfig,
)

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swiglu": "silu",
}  # fmt: skip
"""Names in `config.json` → those of `quire_kernels`."""
POSITION_BUCKETS = 32
ALIASES: Mapping[str, Mapping[str, str]] = {
    "bert": {"layer_norm_eps": "rms_norm_eps"},
    "distilbert": {
        "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size", "activation": "hidden_act",
    },
    "gte": {"layer_norm_eps": "rms_norm_eps"},
    "jina_embeddings_v3": {"layer_norm_eps": "rms_norm_eps"},
    "modernbert": {"norm_eps": "rms_norm_eps", "hidden_activation": "hidden_act", "global_rope_theta": "rope_theta"},
    "mpnet": {"layer_norm_eps": "rms_norm_eps"},
    "nomic_bert": {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps",
        "layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta",
        "rotary_emb_fraction": "partial_rotary_factor", "max_trained_positions": "max_position_embeddings",
    },
    "roberta": {"layer_norm_eps": "rms_norm_eps"},
}  # fmt: skip
"""Family → names of fields, and what other families call the same."""
BERT = {"rms_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu"}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": BERT,
    "distilbert": BERT,
    "eurobert": {"rms_norm_eps": 1e-5, "rope_theta": 250000.0, "max_position_embeddings": 8192},
    "gte": {**BERT, "type_vocab_size": 1, "max_position_embeddings": 8192, "rope_theta": 160000.0},
    "jina_embeddings_v3": {
        **BERT, "rms_norm_eps": 1e-5, "type_vocab_size": 1, "max_position_embeddings": 8194, "rope_theta": 20000.0,
    },
    "modernbert": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 160000.0, "hidden_act": "gelu",
    },
    "mpnet": BERT,
    "nomic_bert": {**BERT, "max_position_embeddings": 2048, "rope_theta": 1000.0, "hidden_act": "silu"},
    "roberta": {**BERT, "pad_token_id": 1},
}  # fmt: skip
EMBEDDINGS = (
    ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"),
    ("embeddings.word_embeddings.", "embed_tokens."), ("embeddings.position_embeddings.", "position_embeddings."),
    ("embeddings.token_type_embeddings.", "token_type_embeddings."), ("embeddings.LayerNorm.", "embedding_norm."),
)  # fmt: skip
BERT_NAMES = (
    ("roberta.", ""), ("bert.", ""), ("encoder.layer.", "layers."), *EMBEDDINGS,
    (".attention.self.query.", ".self_attn.q_proj."), (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."), (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".attn_norm."), (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."), (".output.LayerNorm.", ".mlp_norm."),
)  # fmt: skip
DISTILBERT_NAMES = (
    ("distilbert.", ""), ("transformer.layer.", "layers."), *EMBEDDINGS, (".attention.q_lin.", ".self_attn.q_proj."),
    (".attention.k_lin.", ".self_attn.k_proj."), (".attention.v_lin.", ".self_attn.v_proj."),
    (".attention.out_lin.", ".self_attn.o_proj."), (".sa_layer_norm.", ".attn_norm."), (".ffn.lin1.", ".mlp.up_proj."),
    (".ffn.lin2.", ".mlp.down_proj."), (".output_layer_norm.", ".mlp_norm."),
)  # fmt: skip
MODERNBERT_NAMES = (
    ("embeddings.tok_embeddings.", "embed_tokens."), ("embeddings.norm.", "embedding_norm."),
    ("final_norm.", "norm."), (".attn.Wqkv.", ".self_attn.qkv_proj."), (".attn.Wo.", ".self_attn.o_proj."),
    (".mlp.Wi.", ".mlp.gate_up_proj."), (".mlp.Wo.", ".mlp.down_proj."),
)  # fmt: skip
NOMIC_NAMES = (
    ("nomic_bert.", ""), ("bert.", ""), ("encoder.layers.", "layers."), ("emb_ln.", "embedding_norm."), *EMBEDDINGS,
    (".attn.Wqkv.", ".self_attn.qkv_proj."), (".attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.fc11.", ".mlp.up_proj."), (".mlp.fc12.", ".mlp.gate_proj."), (".mlp.fc2.", ".mlp.down_proj."),
    (".norm1.", ".attn_norm."), (".norm2.", ".mlp_norm."),
)  # fmt: skip
GTE_NAMES = (
    ("new.", ""), ("gte.", ""), ("encoder.layer.", "layers."), *EMBEDDINGS,
    (".attention.qkv_proj.", ".self_attn.qkv_proj."),
    (".attention.o_proj.", ".self_attn.o_proj."), (".attn_ln.", ".attn_norm."), (".mlp_ln.", ".mlp_norm."),
)  # fmt: skip
MPNET_NAMES = (
    ("mpnet.", ""), ("encoder.layer.", "layers."), ("encoder.relative_attention_bias.", "position_bias."), *EMBEDDINGS,
    (".attention.attn.q.", ".self_attn.q_proj."), (".attention.attn.k.", ".self_attn.k_proj."),
    (".attention.attn.v.", ".self_attn.v_proj."), (".attention.attn.o.", ".self_attn.o_proj."),
    (".attention.LayerNorm.", ".attn_norm."), (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."), (".output.LayerNorm.", ".mlp_norm."),
)  # fmt: skip
JINA_NAMES = (
    ("roberta.", ""), ("encoder.layers.", "layers."), ("emb_ln.", "embedding_norm."), *EMBEDDINGS,
    (".mixer.Wqkv.", ".self_attn.qkv_proj."), (".mixer.out_proj.", ".self_attn.o_proj."),
    (".mlp.fc1.", ".mlp.up_proj."), (".mlp.fc2.", ".mlp.down_proj."), (".norm1.", ".attn_norm."),
    (".norm2.", ".mlp_norm."), (".post_attention_layernorm.", ".attn_norm."), (".post_mlp_layernorm.", ".mlp_norm."),
)  # fmt: skip
QKV = ("qkv_proj", ("q_proj", "k_proj", "v_proj"))


def bert(fields: Fields) -> ModelOptions:
    return _with_positions(fields, BERT_NAMES)


def roberta(fields: Fields) -> ModelOptions:
    """RoBERTa (https://arxiv.org/abs/1907.11692), XLM-R and CamemBERT: the first position is the one after that of
    padding."""
    return _with_positions(fields, BERT_NAMES, fields.integer("pad_token_id", 0, MAX_SIZE) + 1)


def distilbert(fields: Fields) -> ModelOptions:
    """DistilBERT (https://arxiv.org/abs/1910.01108): BERT without token types."""
    return _with_positions(fields.with_values({**fields.values, "type_vocab_size": 0}), DISTILBERT_NAMES)


def mpnet(fields: Fields) -> ModelOptions:
    """MPNet (https://arxiv.org/abs/2004.09297): BERT without token types, whose layers share biases of distances. The
    first position is the one after that of padding, which is 1 whatever `pad_token_id` says."""
    buckets = fields.integer("relative_attention_num_buckets", 0, MAX_SIZE, POSITION_BUCKETS)
    if buckets != POSITION_BUCKETS:  # transformers' code has no other number
        raise fields.error("relative_attention_num_buckets", str(POSITION_BUCKETS))
    model = _with_positions(fields.with_values({**fields.values, "type_vocab_size": 0}), MPNET_NAMES, 2)
    assert model.encoder is not None
    return replace(model, encoder=replace(model.encoder, num_position_buckets=buckets))


def jina_embeddings_v3(fields: Fields) -> ModelOptions:
    """Jina Embeddings v3 (https://arxiv.org/abs/2409.10173): BERT with rotary positions. It has no adapters,
    unless one is merged into the weights."""
    mlp = _read_mlp(fields, is_gated=False, bias=True)
    encoder = EncoderOptions(num_token_types=_num_token_types(fields))
    return _encoder(make_layers(fields, _read_attention(read_rope(fields)), mlp), encoder, JINA_NAMES, (QKV,))


def modernbert(fields: Fields) -> ModelOptions:
    """ModernBERT (https://arxiv.org/abs/2412.13663): norms of inputs, gates, rotary positions, and windows in two of
    three layers."""
    bias = fields.boolean("attention_bias", False)
    attention = replace(_read_attention(read_rope(fields)), qkv_bias=bias, o_bias=bias)
    window = fields.integer("local_attention", 1, MAX_POSITIONS, 128) // 2 + 1
    period = fields.integer("global_attn_every_n_layers", 1, MAX_LAYERS, 3)
    windows = read_windows(fields, window, lambda i: i % period != 0)
    mlp = _read_mlp(fields, is_gated=True, bias=fields.boolean("mlp_bias", False))
    return _encoder(
        make_layers(fields, attention, mlp, windows, read_window_rope(fields, "local_rope_theta", 10000.0)),
        EncoderOptions(norm_bias=fields.boolean("norm_bias", False), pre_norm=True),
        MODERNBERT_NAMES, (QKV, ("gate_up_proj", ("gate_proj", "up_proj"))),
    )  # fmt: skip


def nomic_bert(fields: Fields) -> ModelOptions:
    """Nomic Embed (https://arxiv.org/abs/2402.01613): BERT with rotary positions and SwiGLU."""
    for name in ("prenorm", "rotary_emb_interleaved"):
        if fields.boolean(name, False):
            raise fields.error(name, "false")
    for name in ("rotary_emb_scale_base", "rotary_scaling_factor", "num_experts"):
        if fields.values.get(name):
            raise fields.error(name, "left out")
    attention = replace(_read_attention(read_rope(fields)), qkv_bias=fields.boolean("qkv_proj_bias", False))
    attention = replace(attention, o_bias=attention.qkv_bias)
    mlp = _read_mlp(fields, is_gated=True, bias=fields.boolean("mlp_fc1_bias", False))
    encoder = EncoderOptions(num_token_types=_num_token_types(fields))
    return _encoder(make_layers(fields, attention, mlp), encoder, NOMIC_NAMES, (QKV,))


def gte(fields: Fields) -> ModelOptions:
    """GTE (https://arxiv.org/abs/2407.19669): BERT with rotary positions and gates."""
    scaling = fields.inner("rope_scaling")
    if "ntk" in (scaling.values.get("type"), scaling.values.get("rope_type")):  # the model's own
        factor, size = scaling.positive("factor"), read_head_size(fields)
        if scaling.values.get("mixed_b") is not None:
            raise scaling.error("mixed_b", "left out")
        theta = fields.positive("rope_theta") * factor
        rope = RopeConfig(rope_type="linear", rope_theta=theta, factor=factor ** (2 / size))
    else:
        rope = read_rope(fields)
    for name in ("logn_attention_scale", "logn_attention_clip1"):
        if fields.boolean(name, False):
            raise fields.error(name, "false")
    fields.choice("layer_norm_type", ("layer_norm",), "layer_norm")
    mlp = _read_mlp(fields, is_gated=True, bias=False, down_bias=True)
    encoder = EncoderOptions(num_token_types=_num_token_types(fields))
    fused = (QKV, ("up_gate_proj", ("up_proj", "gate_proj")))
    return _encoder(make_layers(fields, _read_attention(rope), mlp), encoder, GTE_NAMES, fused)


def eurobert(fields: Fields) -> ModelOptions:
    """EuroBERT (https://arxiv.org/abs/2503.05500): Llama with attention to both sides."""
    model = llama(fields)
    layers = []
    for layer in model.layers:
        assert isinstance(layer.attention, AttentionOptions)
        layers.append(replace(layer, attention=replace(layer.attention, is_causal=False)))
    return replace(model, layers=tuple(layers), has_head=False)


def _with_positions(fields: Fields, names: tuple[tuple[str, str], ...], first: int = 0) -> ModelOptions:
    """Learned positions, of which the first is in this row."""
    if fields.boolean("is_decoder", False):
        raise fields.error("is_decoder", "false")
    fields.choice("position_embedding_type", ("absolute",), "absolute")
    num_positions = read_max_position_embeddings(fields)
    if num_positions <= first:
        raise fields.error("max_position_embeddings", f"above {first}, as the rows up to that of padding are unused")
    encoder = EncoderOptions(
        num_positions=num_positions, first_position=first, num_token_types=_num_token_types(fields)
    )
    mlp = _read_mlp(fields, is_gated=False, bias=True)
    return _encoder(make_layers(fields, _read_attention(None), mlp), encoder, names)


def _encoder(
    layers: tuple[LayerOptions, ...],
    encoder: EncoderOptions,
    names: tuple[tuple[str, str], ...],
    fused: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> ModelOptions:
    return ModelOptions(layers=layers, norms=NormOptions(), renamed=names, fused=fused, has_head=False, encoder=encoder)


def _read_attention(rope: RopeConfig | None) -> AttentionOptions:
    return AttentionOptions(rope=rope, qkv_bias=True, o_bias=True, is_causal=False)


def _read_mlp(fields: Fields, *, is_gated: bool, bias: bool, down_bias: bool | None = None) -> MLPOptions:
    return MLPOptions(
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
        activation=ACTIVATIONS[fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu")],
        bias=bias,
        down_bias=down_bias,
        is_gated=is_gated,
    )


def _num_token_types(fields: Fields) -> int:
    return fields.integer("type_vocab_size", 0, MAX_SIZE)
