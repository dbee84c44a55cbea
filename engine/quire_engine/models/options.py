"""DecoderOptions: the differences between the layers of families."""

import dataclasses
from dataclasses import dataclass

from quire_engine.models.experts_options import ExpertsOptions
from quire_engine.models.fields import Fields

__all__ = [
    "ACTIVATIONS",
    "POST_NORMS",
    "PRE_AND_POST_NORMS",
    "PRE_NORMS",
    "DecoderOptions",
    "LatentAttentionOptions",
    "LayerNorms",
    "read_activation",
]

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names in `config.json` → those of `quire_kernels`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorms:
    """Where a layer has norms, by their names in the checkpoint; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    """Of its output, before that is added to the residual stream."""
    before_mlp: str | None = None
    after_mlp: str | None = None
    """Of its output, likewise."""

    @property
    def names(self) -> list[str]:
        """Of those that there are."""
        return [name for name in dataclasses.astuple(self) if name is not None]


PRE_NORMS = LayerNorms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""As in Llama."""
PRE_AND_POST_NORMS = LayerNorms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
"""As in Gemma 2 (https://arxiv.org/abs/2408.00118, section 2)."""
POST_NORMS = LayerNorms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
"""As in OLMo 2 (https://arxiv.org/abs/2501.00656, section 3.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionOptions:
    """Sizes of latent attention, with the letters of `models/latent_attention.py`."""

    query_rank: int | None
    """Of the latent vector that queries are products of; None: they are products of the hidden state."""
    kv_rank: int
    """C"""
    rope_size: int
    """R"""
    nope_size: int
    """N"""
    value_size: int
    """V"""
    interleaved: bool
    """Features that are rotated together lie side by side in the checkpoint; else as in other families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderOptions:
    """The same for all layers; see `models/decoder.py`."""

    qkv_bias: bool = False
    """The projections of queries, keys and values have biases."""
    o_bias: bool = False
    """The output projection of the attention has a bias."""
    mlp_bias: bool = False
    """The linear layers of the feed-forward have biases."""
    latent: LatentAttentionOptions | None = None
    """The attention is latent attention, with an `attention_scale` of its own; `head_size` is what is rotated."""
    qk_norm: bool = False
    """Each head of queries and keys is normed before the rotation, with one weight per head feature."""
    qk_projection_norm: bool = False
    """All queries of a token are normed together before the rotation, and so are all keys."""
    norms: LayerNorms = PRE_NORMS
    norm_offset: float = 0.0
    """Added to the weight of every norm when it is loaded."""
    float32_norms: bool = False
    """The weights of norms are float32 in any dtype: a result is rounded once, after its weight has multiplied it."""
    activation: str | None = None
    """Of the gate in the feed-forward, as `quire_kernels` names it; unset: that in the field `hidden_act`."""
    layers_without_rope: frozenset[int] = frozenset()
    """Numbers of the layers whose queries and keys are not rotated."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that are one tensor in the checkpoint, one after the other: (its name, theirs)."""
    embedding_scale: float = 1.0
    """Multiplies the embeddings; rounded to the model's dtype."""
    attention_scale: float | None = None
    """Multiplies the products of queries and keys; unset: the inverse of the root of the head size."""
    attention_soft_cap: float | None = None
    """The scores become `cap * tanh(scores / cap)`."""
    attention_sinks: bool = False
    """Each query head has a learned logit that takes part in its softmax and has no value (`paged_attention`)."""
    residual_multiplier: float = 1.0
    """Multiplies the outputs of attention and feed-forward before they are added to the residual stream."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """The logits become `cap * tanh(logits / cap)`."""
    experts: ExpertsOptions | None = None
    """The feed-forward of some or all layers is a mixture of experts."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names in the family's checkpoints, and what stands there in ours."""
    num_extra_layers: int = 0
    """Layers in the checkpoint after those of the model, which are not computed."""
    default_head_size: int | None = None
    """Used if `config.json` has no `head_dim`; unset: `hidden_size` divided by the number of heads."""
    windows: tuple[int | None, ...] = ()
    """By layer, how many of its last keys each row sees at most, None if all; empty: all layers see all."""
    window_rope_theta: float | None = None
    """Base of the rotation in layers with a window, where it is not scaled; unset: theirs is that of all layers."""


def read_activation(fields: Fields, name: str, default: str) -> str:
    """The activation of the gate.

    Args:
        fields: of `config.json`.
        name: of the field.
        default: if it is missing.

    Returns:
        The name that `quire_kernels` has for it.

    Raises:
        CheckpointError: it is none of `ACTIVATIONS`.
    """
    return ACTIVATIONS[fields.choice(name, tuple(ACTIVATIONS), default)]
