"""What a model consists of, as data: a family makes it of `config.json`, and `models/decoder.py` builds the shared
layers (`models/layers/`) of it. Does not use torch, as the frontend reads checkpoints too."""

import math
from dataclasses import dataclass
from typing import Protocol

from quire_engine.kv_cache.state import STATE


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, with the names of `config.json`."""

    rope_type: str = "default"
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

    def rotary_size(self, head_size: int) -> int:
        """How many features of a head are rotated."""
        return int(head_size * self.partial_rotary_factor)

    @property
    def extended_length(self) -> int:
        """The length up to which the factor extends the context, if it says so."""
        return int(self.original_max_position_embeddings * self.factor) if self.rope_type in ("yarn", "dynamic") else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Grouped-query attention (`layers/attention.py`)."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated."""
    window: int | None = None
    """How many of its last keys each row sees at most; None: all."""
    is_causal: bool = True
    """Each row sees no key after its own; else as many as before."""
    qkv_bias: bool = False
    o_bias: bool = False
    head_norms: bool = False
    """Each head of queries and keys is normed before the rotation, with one weight per head feature."""
    projection_norms: bool = False
    """All queries of a token are normed together before the rotation, and so are all keys."""
    scale: float | None = None
    """Multiplies the products of queries and keys; None: the inverse of the root of the head size."""
    soft_cap: float | None = None
    """The scores become `cap * tanh(scores / cap)`."""
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

    @property
    def window(self) -> None:
        """None: each row sees all keys."""

    @property
    def is_causal(self) -> bool:
        """True."""
        return True


class StateOptions(Protocol):
    """A recurrence (`layers/recurrent.py`)."""

    @property
    def num_numbers(self) -> int:
        """How many numbers the state of a request has, on all ranks."""

    def indivisible(self, num_ranks: int) -> str | None:
        """Why it cannot be cut into so many slices, which names fields of `config.json`; None if it can."""


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
class MLPOptions:
    """A feed-forward (`layers/experts.py`)."""

    intermediate_size: int
    activation: str = "silu"
    """The gate's, as `quire_kernels` names it."""
    bias: bool = False
    down_bias: bool | None = None
    """Whether the output has a bias; None: as the others."""
    is_gated: bool = True
    """Else the activation is that of the only input projection."""


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
    are_stacked: bool = False
    """In the checkpoint the experts of a layer are one tensor; see `checkpoints/parts.py`."""
    are_halves: bool = False
    """In that tensor, gate and up are the halves of each expert's rows; else they alternate, and it is transposed."""
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

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of attention and recurrence, how many of its last keys a row sees; None: all; `STATE`: it keeps a state."""
        attention = self.attention
        own = () if attention is None else (attention.window if attention.is_causal else None,)
        return own if self.state is None else (*own, STATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormOptions:
    """Where a layer has norms, by their names in the checkpoint; None: there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    """The norm of its output, before that is added to the residual stream."""
    before_mlp: str | None = None
    after_mlp: str | None = None
    """The norm of its output, likewise."""
    offset: float = 0.0
    """Added to the weight of every norm when it is loaded."""
    is_float32: bool = False
    """Weights are float32 in any dtype: a result is rounded once, after its weight has multiplied it."""

    @property
    def names(self) -> list[str]:
        """The names of those that there are."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
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
    """Of distances between tokens: each has a number for each head, which is added to scores. 0: there are none."""
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
class ModelOptions:
    """A model."""

    layers: tuple[LayerOptions, ...]
    norms: NormOptions = PRE_NORMS
    embedding_scale: float = 1.0
    """Multiplies the embeddings; rounded to the model's dtype."""
    residual_multiplier: float = 1.0
    """Multiplies the outputs of attention and feed-forward before they are added to the residual stream."""
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """The logits become `cap * tanh(logits / cap)`."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names in the family's checkpoints, and what stands there in ours."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that are one tensor in the checkpoint, one after the other: (its name, theirs)."""
    scaled: tuple[tuple[str, float], ...] = ()
    """Endings of projections' names, and what multiplies their weights and biases when they are loaded."""
    num_extra_layers: int = 0
    """Layers in the checkpoint after those of the model, which are not computed."""
    skipped: tuple[str, ...] = ()
    """Parts of the names of other tensors that the checkpoint may have and the model has not."""
    has_head: bool = True
    """Whether it computes logits."""
    encoder: EncoderOptions | None = None
    """None: the model is a decoder."""
