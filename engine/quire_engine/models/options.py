"""What a model consists of, as data: a family makes it of `config.json`, and `models/decoder.py` builds the shared
layers (`models/layers/`) of it. Does not use torch, as the frontend reads checkpoints too."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

from quire_engine.kv_cache.state import STATE

StackLayout: TypeAlias = Literal["interleaved", "halves", "transposed_halves"]
"""Drawn in `checkpoints/parts.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, with the names of `config.json`."""

    rope_type: str = "default"
    """As in `config.json`; or `none`: all angles are 0, and queries may grow with their position."""
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    """The part of each head, from its first feature on, that is rotated."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Length of the sequences before the context was extended."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines, and so the products of queries and keys by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """The bounds of YaRN's ramp are rounded to whole pairs of features."""
    llama_4_scaling_beta: float | None = None
    """Queries, and not keys, are multiplied by `1 + beta * log(1 + position // original_max_position_embeddings)`."""
    short_factor: tuple[float, ...] = ()
    """One for each pair of features, up to the original length; with `longrope`."""
    long_factor: tuple[float, ...] = ()
    """Likewise, for longer models."""
    mrope_section: tuple[int, ...] = ()
    """Positions have three dimensions, frame, row and column (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1):
    how many pairs of features turn by each. Empty: positions have one."""
    mrope_interleaved: bool = False
    """Pairs turn by the three dimensions in turn; else those of one dimension lie side by side."""

    def rotary_size(self, head_size: int) -> int:
        """How many features of a head are in pairs that have an angle; with `proportional` it may be 0."""
        return head_size if self.rope_type == "proportional" else int(head_size * self.partial_rotary_factor)

    @property
    def extended_length(self) -> int:
        """The length up to which the factor extends the context, if it says so."""
        return int(self.original_max_position_embeddings * self.factor) if self.rope_type in ("yarn", "dynamic") else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Grouped-query attention (`layers/attention.py`)."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated."""
    head_size: int | None = None
    """This layer's; None: the model's."""
    num_kv_heads: int | None = None
    """Likewise."""
    window: int | None = None
    """How many of its last keys each row sees at most; None: all."""
    is_causal: bool = True
    """Each row sees no key after its own; else as many as before."""
    has_bidirectional_parts: bool = True
    """Rows of a prompt's part that is bidirectional see all of it."""
    fused_name: str | None = None
    """Queries, keys and values are one matrix of the checkpoint, with this name: group by group the queries that share
    a key, then that key and its value. None: they are three, or parts of one that follow each other."""
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False
    """Each head of queries and keys is normed before the rotation, with one weight per head feature."""
    norms_after_rope: bool = False
    """The norms of heads are after the rotation."""
    interleaved: bool = False
    """Features that are rotated together lie side by side in the checkpoint; else half of those that are rotated apart.
    Not with weights of norms of queries and keys."""
    unit_norms: bool = False
    """Each head of queries and keys is normed without a weight."""
    is_chunked: bool = False
    """A row sees no key before its chunk of `window`, counted from the sequence's first."""
    value_norms: bool = False
    """Each head of values is normed, without a weight."""
    keys_are_values: bool = False
    """One projection makes both; keys are then normed and rotated."""
    cache_of: int | None = None
    """The number of an earlier layer, whose keys and values are this layer's too; None: it makes its own."""
    head_layer_norms: bool = False
    """Each head of queries and keys has a LayerNorm of its own before the rotation, without a bias."""
    projection_norms: bool = False
    """All queries of a token are normed together before the rotation, and so are all keys."""
    scale: float | None = None
    """Multiplies the products of queries and keys; None: the inverse of the root of the head size."""
    soft_cap: float | None = None
    """The scores become `cap * tanh(scores / cap)`."""
    output_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a gate, whose rows of `q_proj` follow the head's own."""
    head_gates: bool = False
    """The output of each head is multiplied by the sigmoid of one number, of `gate_proj`."""
    sinks: bool = False
    """Each query head has a learned logit that takes part in its softmax and has no value (`paged_attention`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionOptions:
    """Latent attention, with the letters of `layers/latent_attention.py`."""

    rope: RopeConfig
    scale: float
    """Multiplies the products of queries and keys."""
    bias: bool
    query_rank: int | None
    """The rank of the latent vector that queries are products of; None: they are products of the hidden state."""
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
    window: ClassVar[None] = None
    """Each row sees all keys up to its own."""
    is_causal: ClassVar[bool] = True


class StateOptions(Protocol):
    """A recurrence: `layers/gated_delta.py`, `layers/mamba.py`, `layers/rg_lru.py` or `layers/short_conv.py`."""

    @property
    def num_numbers(self) -> int:
        """How many numbers the state of a request has, on all ranks."""

    def indivisible(self, num_ranks: int) -> str | None:
        """Why it cannot be cut into so many slices, which names fields of `config.json`; None if it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaOptions:
    """A gated delta rule (`layers/gated_delta.py`)."""

    num_key_heads: int
    num_value_heads: int
    """Each head of keys is for as many of them, one after the other."""
    key_size: int
    """The size of a head's keys."""
    value_size: int
    """Likewise."""
    conv_size: int
    """How many tokens the convolution sees."""
    by_key_head: bool = False
    """In the checkpoint, the input projections are two matrices: of each head of keys its query, its key, and values
    and output gates of its heads; and betas and gates of these."""
    norm_eps: float | None = None
    """Epsilon of the output's norm; None: as in the other norms."""
    beta_scale: float = 1.0
    """Scale of the sigmoid that says how much of a key's value is replaced."""
    gate_rank: int | None = None
    """Each channel of the keys has a decay of its own; its gate and the output's, which is a sigmoid's, are products of
    this rank. None: each head has a decay, and the output's gate is a SiLU's."""

    @property
    def num_numbers(self) -> int:
        return self.num_value_heads * self.key_size * self.value_size

    def indivisible(self, num_ranks: int) -> str | None:
        name = "linear_num_key_heads" if self.gate_rank is None else "linear_num_heads"
        return f"{name}={self.num_key_heads} is no multiple of it" if self.num_key_heads % num_ranks else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvOptions:
    """A gated short convolution (`layers/short_conv.py`)."""

    size: int
    """Channels."""
    conv_size: int
    """How many tokens it sees."""
    bias: bool = False
    """Whether convolution and projections have biases."""

    @property
    def num_numbers(self) -> int:
        return (self.conv_size - 1) * self.size

    def indivisible(self, num_ranks: int) -> str | None:
        return f"hidden_size={self.size} is no multiple of it" if self.size % num_ranks else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaOptions:
    """A state space of heads, as in Mamba-2 (`layers/mamba.py`)."""

    num_heads: int
    head_size: int
    num_groups: int
    """Heads of one group have the same B and C."""
    state_size: int
    conv_size: int
    """How many tokens the convolution sees."""
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    has_norm: bool = True
    """The result is normed with its gate; else the gate alone multiplies it."""
    gates_first: bool = True
    """The gate multiplies before the norm."""
    norm_eps: float | None = None
    """Epsilon of this norm; None: as in the other norms."""
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def num_numbers(self) -> int:
        return self.num_heads * self.head_size * self.state_size

    def indivisible(self, num_ranks: int) -> str | None:
        if self.num_heads % num_ranks:
            return f"the number of Mamba's heads, {self.num_heads}, is no multiple of it"
        if self.num_groups % num_ranks and num_ranks % self.num_groups:
            return f"the number of Mamba's groups, {self.num_groups}, is neither a multiple nor a divisor of it"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveOptions:
    """A state space of channels, as in Mamba (`layers/mamba.py`)."""

    num_channels: int
    state_size: int
    conv_size: int
    """How many tokens the convolution sees."""
    dt_rank: int
    """Numbers of a token of which dt is a product."""
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = None
    """These numbers, B and C are normed, with this eps; None: they are not."""
    norm_weights: bool = True
    """These norms have weights."""

    @property
    def num_numbers(self) -> int:
        return self.num_channels * self.state_size

    def indivisible(self, num_ranks: int) -> str | None:
        is_even = self.num_channels % num_ranks == 0
        return None if is_even else f"the number of Mamba's channels, {self.num_channels}, is no multiple of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class RgLruOptions:
    """A gated linear recurrence of channels, as in Griffin (`layers/rg_lru.py`)."""

    width: int
    """Channels of all heads."""
    num_heads: int
    """The gates of a channel are products of those of its head."""
    conv_size: int
    """How many tokens the convolution sees."""
    activation: str
    """Of the gate of its output."""

    @property
    def num_numbers(self) -> int:
        return self.width

    def indivisible(self, num_ranks: int) -> str | None:
        is_even = self.num_heads % num_ranks == 0
        return None if is_even else f"num_attention_heads={self.num_heads} is no multiple of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPOptions:
    """A feed-forward (`layers/experts.py`)."""

    intermediate_size: int
    activation: str = "silu"
    """The gate's, as `quire_kernels` names it; or `xielu`, without a gate."""
    bias: bool = False
    down_bias: bool | None = None
    """Whether the output has a bias; None: as the others."""
    is_gated: bool = True
    """Else the activation is that of the only input projection."""
    sparsity: float = 0.0
    """Above 0, only the numbers of a token's gate that are above this quantile of a normal distribution with their mean
    and deviation are not zero, and that cutoff is subtracted from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRouting:
    """How DeepSeek's models choose experts; see `quire_kernels.grouped_topk`."""

    num_groups: int
    top_groups: int
    scoring: str
    has_bias: bool
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsOptions:
    """A mixture of experts (`layers/experts.py`)."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    expert: MLPOptions
    """The router has a bias if the experts have."""
    norm_topk_prob: bool
    """The weights of a token's experts add up to 1; else they are the softmax over all experts."""
    shared: MLPOptions | None = None
    """The expert that all tokens share."""
    shared_has_gate: bool = True
    """The output of that expert is multiplied by a number of each token's own."""
    input_norm: bool = False
    """The router's input is the normed residual stream, and not that of the experts."""
    expert_scales: bool = False
    """Each expert's results are multiplied by a number of its own."""
    scales_input: bool = False
    """The sigmoid of a token's only expert's logit multiplies the input of that expert, and not its output."""
    stack: StackLayout | None = None
    """The layout of a tensor that holds all experts of a layer, where the checkpoint has one; None: it has none."""
    jitter: float = 0.0
    """Above 0, their weights are SparseMixer's; see `quire_kernels.topk_softmax`."""
    latent_size: int | None = None
    """Experts, but for the shared one, take and give vectors of this size, which two projections make of the hidden
    states and of which they make these; None: there are none."""
    grouped: GroupedRouting | None = None
    """Experts are chosen in another way than by a softmax over all of them."""


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """One layer: attention or a recurrence or both, and a feed-forward; a part that is None is not there."""

    attention: AttentionOptions | LatentAttentionOptions | None
    mlp: MLPOptions | ExpertsOptions | None
    state: StateOptions | None = None
    experts: ExpertsOptions | None = None
    """Experts that take the residual stream, beside the feed-forward; their outputs are added."""
    norms: "NormOptions | None" = None
    """None: those of the model."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For attention and for recurrence, how many of the last keys a row sees; None: all; `STATE`: a state."""
        attention = self.attention
        own = () if attention is None else (attention.window if attention.is_causal else None,)
        return own if self.state is None else (*own, STATE)

    @property
    def mixture(self) -> ExpertsOptions | None:
        """Its experts, if it has any."""
        return self.mlp if isinstance(self.mlp, ExpertsOptions) else self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPOptions:
    """The layer of multi-token prediction (`models/mtp.py`). A family's `ModelOptions.renamed` gives its tensors the
    names of Qwen3-Next's: `mtp.fc`, `mtp.pre_fc_norm_embedding`, `mtp.pre_fc_norm_hidden`, `mtp.layers.0`, `mtp.norm`.
    """

    layer: LayerOptions
    embedding_first: bool = True
    """The input of `mtp.fc` is the embedding and then the hidden state; else the other way round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormOptions:
    """Where a layer has norms, by their names in the checkpoint; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    """The norm of its output, before that is added to the residual stream."""
    before_mlp: str | None = None
    after_mlp: str | None = None
    """The norm of its output, likewise."""
    after_dense: str | None = None
    """The norm of a feed-forward's output, before that is added to the output of the experts beside it."""
    before_experts: str | None = None
    after_experts: str | None = None
    after_layer_input: str | None = None
    """The norm of what a layer's own input contributes, before that is added to the residual stream."""
    offset: float = 0.0
    """Added to the weight of every norm when it is loaded."""
    is_float32: bool = False
    """Weights are float32 in any dtype: a result is rounded once, after its weight has multiplied it."""
    is_layer_norm: bool = False
    """They are LayerNorms, whose weights are always float32; else RMSNorms."""
    bias: bool = False
    """LayerNorms have a bias."""
    eps: float | None = None
    """None: `rms_norm_eps`."""

    @property
    def names(self) -> list[str]:
        """The names of those that there are."""
        names = (
            self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, self.after_dense,
            self.before_experts, self.after_experts, self.after_layer_input,
        )  # fmt: skip
        return [name for name in names if name is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions:
    """What an encoder has instead of RMSNorms and a head (`models/encoder.py`)."""

    num_positions: int = 0
    """Rows of the table of learned positions; 0: there is none."""
    first_position: int = 0
    """The row of the first position."""
    num_token_types: int = 0
    """Kinds of tokens, such as those of the two texts of a pair; 0: there are none."""
    num_position_buckets: int = 0
    """Buckets of distances between tokens: each has a number for each head, which is added to scores. 0: none."""
    norm_bias: bool = True
    pre_norm: bool = False
    """Norms are of the inputs of attention and feed-forward, but for the first; else of the stream after each."""


PRE_NORMS = NormOptions(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""As in Llama."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStep:
    """A linear layer of a head, and what follows it."""

    name: str
    """In the checkpoint, without the leading `model.`."""
    size: int
    """Output features."""
    bias: bool = True
    activation: str = "none"
    """A key of `ACTIVATIONS` in `tasks/pooler.py`."""
    norm: str | None = None
    """The name of the LayerNorm after the activation, if there is one."""
    norm_bias: bool = True
    norm_eps: float = 1e-5

    def shapes(self, in_features: int) -> dict[str, tuple[int, ...]]:
        """The tensors that it reads, by name."""
        found: dict[str, tuple[int, ...]] = {f"{self.name}.weight": (self.size, in_features)}
        if self.bias:
            found[f"{self.name}.bias"] = (self.size,)
        if self.norm is not None:
            found[f"{self.norm}.weight"] = (self.size,)
            if self.norm_bias:
                found[f"{self.norm}.bias"] = (self.size,)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What a checkpoint computes of hidden states instead of logits: scores of classes."""

    steps: tuple[HeadStep, ...]
    labels: tuple[str, ...]
    pooling_type: str
    """`ALL` of a head that scores each token, `STEP` of one that scores some."""
    activation: str
    """What makes probabilities of the scores: `none`, `softmax` or `sigmoid`."""
    token_ids: tuple[int, ...] = ()
    """The score is the logit of this token, or that of the second minus that of the first; empty: the tensors of the
    steps are the checkpoint's own."""

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The tensors that it reads, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for step in self.steps:
            found |= step.shapes(hidden_size)
            hidden_size = step.size
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputOptions:
    """Each layer has an input of its own, from the token's embedding (`Decoder.embed`)."""

    size: int
    """Features for each layer."""
    vocab_size: int
    """Rows of the table; other tokens have the first."""
    activation: str
    placeholders: tuple[int, ...] = ()
    """Tokens that stand for images, videos and sounds."""
    padding: int = 0
    """The token whose row these have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpOptions:
    """There are several residual streams, of which each layer computes one (`models/altup.py`)."""

    num_streams: int
    active: int
    """The stream that layers compute."""
    scales_output: bool
    """This stream, as the layer has corrected it, is scaled before the layer's own input gates it."""
    laurel_rank: int
    """Of the product that is added beside attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTransformerOptions:
    """The layers with attention share blocks of attention and feed-forward, each block in turn
    (`models/shared_transformer.py`)."""

    num_blocks: int
    rank: int
    """Of the products that each layer adds to the input projections of its block's feed-forward."""
    adapts_attention: bool
    """Each layer adds such products to queries, keys and values, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """A model."""

    layers: tuple[LayerOptions, ...]
    norms: NormOptions = PRE_NORMS
    embedding_scale: float = 1.0
    """Multiplies the embeddings; rounded to the model's dtype."""
    layer_inputs: LayerInputOptions | None = None
    altup: AltUpOptions | None = None
    """None: there is one residual stream."""
    shared_transformer: SharedTransformerOptions | None = None
    """None: no layers share weights."""
    layer_scales: bool = False
    """Each layer has a number that multiplies the residual stream after it."""
    residual_multiplier: float = 1.0
    """Multiplies the outputs of attention and feed-forward before they are added to the residual stream."""
    parallel_residual: bool = False
    """The feed-forward of a layer does not see the output of its attention: both are computed of the same residual
    stream (Wang & Komatsuzaki 2021, https://github.com/kingoflolz/mesh-transformer-jax), of the same normed one where
    there is no norm before the feed-forward."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """The logits become `cap * tanh(logits / cap)`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names in the family's checkpoints, and what stands there in ours."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that are one tensor in the checkpoint, one after the other: (its name, theirs)."""
    scaled: tuple[tuple[str, float], ...] = ()
    """Endings of projections' names, and what multiplies their weights and biases when they are loaded."""
    num_kv_heads: int | None = None
    """None: as many as `num_key_value_heads`."""
    num_extra_layers: int = 0
    """Layers in the checkpoint after those of the model, which are not computed, but for that of `mtp`."""
    mtp: MTPOptions | None = None
    """None: the checkpoint has no layer of multi-token prediction."""
    skipped: tuple[str, ...] = ()
    """Parts of the names of other tensors that the checkpoint may have and the model has not."""
    max_model_len: int | None = None
    """Longer sequences are not computed; None: the positions decide."""
    num_deepstack_layers: int = 0
    """How many of the first layers are followed by features of images, which are added to the residual stream
    (DeepStack, https://arxiv.org/abs/2406.04334). They follow an image's hidden states in the same rows."""
    has_head: bool = True
    """Whether it computes logits."""
    head_bias: bool = False
    """Whether the output matrix, which is not tied then, has a bias."""
    encoder: EncoderOptions | None = None
    """None: the model is a decoder."""

    @property
    def num_joined_layers(self) -> int:
        """Layers at the end that are on one stage: those that share a cache, and all between them."""
        caches = [one.attention.cache_of for one in self.layers if isinstance(one.attention, AttentionOptions)]
        return len(self.layers) - min((one for one in caches if one is not None), default=len(self.layers))
