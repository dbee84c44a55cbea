"""EAGLE-3: one decoder layer that drafts from hidden states of several of the target's layers (Li et al. 2025,
https://arxiv.org/abs/2503.01840, section 3).

Its input at position p is the token at p + 1, which is known there, and a feature of position p: of the target's hidden
states where the target has computed the position (`features`), else the head's own output. ::

    token ── embed ── input_layernorm ─┐
                                       ├─ attention ─ + ─┬─ post_attention_layernorm ─ mlp ─ + ─┬─ next feature
    feature ──┬────── hidden_norm ─────┘              │  │                                   │  └─ norm ─ lm_head
              └───────────────────────────────────────┘  └───────────────────────────────────┘

Heads that were trained with vLLM's speculators, and EAGLE-3.1's, have further norms, and may go on with the output of
`norm`: see `Eagle3Variant`.

Its logits are of some of the target's tokens only, the frequent ones (`target_ids`). It is not cut into slices: one
rank has all of it, and computes alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dc_fields
from pathlib import Path

import torch
from quire_kernels import add_residual, add_rms_norm, rms_norm
from torch import nn

from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.kv_cache import StateSpec
from quire_engine.models.base import normed_pairs
from quire_engine.models.checkpoints import StoredTensor, open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig, read_architecture
from quire_engine.models.checkpoints.fields import Fields, read_config
from quire_engine.models.decoder import Decoder
from quire_engine.models.families.llama import llama
from quire_engine.models.layers.attention import Attention
from quire_engine.models.layers.experts import GatedMLP
from quire_engine.models.layers.parallel import ColumnParallel, VocabParallel, Weight, load_targets
from quire_engine.models.layers.rope import rope_tables
from quire_engine.models.loader import build, check_tensors, load_draft_model, vocabulary_tensor
from quire_engine.models.options import AttentionOptions, MLPOptions
from quire_engine.models.registry import EAGLE3_ARCHITECTURES
from quire_engine.models.step_context import StepContext

ALONE = ParallelState()
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Variant:
    """Where a head differs from the paper's, with the names of `config.json`."""

    norm_before_fc: bool = False
    """`input_norm` is of all the target's hidden states together, before `fc`."""
    fc_norm: bool = False
    """Those of each layer have a norm of their own."""
    norm_before_residual: bool = False
    """The residual stream begins with the output of `hidden_norm`."""
    norm_output: bool = False
    """The next feature is the output of `norm`."""

    @classmethod
    def of(cls, fields: Fields) -> "Eagle3Variant":
        """From `config.json`, or its `eagle_config`."""
        eagle = fields.inner("eagle_config")
        return cls(**{one.name: fields.boolean(one.name, eagle.boolean(one.name, False)) for one in dc_fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Checkpoint:
    """What `config.json` and the headers of the weight files say about a head."""

    decoder: CheckpointConfig
    """A decoder with the head's one layer; its vocabulary is the target's."""
    draft_vocab_size: int
    """How many tokens of the vocabulary can be drafted."""
    tapped_layers: tuple[int, ...]
    """The target's layers, counted from 0, at whose input the residual stream is read."""
    target_hidden_size: int
    variant: Eagle3Variant
    tensors: Mapping[str, StoredTensor]
    """By the names of `Eagle3`. Without `embed_tokens.weight` it uses the target's embedding; without `d2t.weight` the
    drafted tokens have the target's numbers."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "Eagle3Checkpoint":
        """Read and check everything but the weights themselves. Tensors have the names that the authors publish. Raises
        CheckpointError if something is missing, truncated or of the wrong shape, or does not fit the target."""
        fields = read_config(folder, "speculative_config: model")
        given = {name: value for name, value in fields.values.items() if value is not None}
        fields = fields.with_values({**fields.inner("transformer_layer_config").values, **given})
        architecture = read_architecture(fields, EAGLE3_ARCHITECTURES)
        decoder = CheckpointConfig.from_fields(folder, fields, architecture, llama(fields))
        if decoder.num_layers != 1:
            raise fields.error("num_hidden_layers", "1")
        if decoder.weight_format.method != "unquantised":
            raise fields.error(
                "quantization_config", "unset: an unquantised head is quantised as its target is, when it is loaded"
            )
        fields.same_as_target("vocab_size", target.vocab_size)
        fields.same_as_target("target_hidden_size", target.hidden_size)
        _check_features(fields)
        draft_vocab_size = fields.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size)
        tensors = {_our_name(name): tensor for name, tensor in open_checkpoint(folder).tensors.items()}
        if "d2t.weight" not in tensors and draft_vocab_size < target.vocab_size:
            raise CheckpointError(
                f"{folder}: its safetensors files hold no d2t, which draft_vocab_size={draft_vocab_size} of "
                f"vocab_size={target.vocab_size} needs"
            )
        if "embed_tokens.weight" not in tensors and decoder.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{folder}: its safetensors files hold no embed_tokens.weight; the target's has hidden_size="
                f"{target.hidden_size}, and this head {decoder.hidden_size}"
            )
        head = cls(
            decoder=decoder,
            draft_vocab_size=draft_vocab_size,
            tapped_layers=_tapped_layers(fields, target.num_layers),
            target_hidden_size=target.hidden_size,
            variant=Eagle3Variant.of(fields),
            tensors=tensors,
        )
        embed = None if "embed_tokens.weight" in tensors else torch.zeros_like
        module = build(lambda: Eagle3(head, 1, embed), torch.float32, torch.device("meta"))
        check_tensors(folder, tensors, load_targets(module), _is_derived)
        return head


class _MidLayer(nn.Module):
    def __init__(self, config: CheckpointConfig, max_model_len: int) -> None:
        super().__init__()
        size, options = config.hidden_size, config.options.layers[0]
        assert isinstance(options.attention, AttentionOptions)
        assert isinstance(options.mlp, MLPOptions)
        self.self_attn = Attention(config, options.attention, ALONE, rope_tables(max_model_len), in_features=2 * size)
        self.mlp = GatedMLP(size, options.mlp, ALONE)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Weight(size) for _ in range(3))


class Eagle3(nn.Module):
    """A head, which uses the target's embedding, [T] -> [T, E], if that is given, or has its own."""

    def __init__(
        self, config: Eagle3Checkpoint, max_model_len: int, embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        decoder = config.decoder
        self.dtype = torch.get_default_dtype()
        self.hidden_size, self.eps = decoder.hidden_size, decoder.rms_norm_eps
        if embed is None:
            self.embed_tokens = VocabParallel(decoder.vocab_size, self.hidden_size, ALONE, is_head=False)
            embed = self.embed_tokens.embed
        self._embed = embed
        self.tapped_layers = config.tapped_layers
        self.variant, num_layers = config.variant, len(config.tapped_layers)
        in_features = num_layers * config.target_hidden_size
        self.input_norm = Weight(in_features) if self.variant.norm_before_fc else None
        num_norms = num_layers if self.variant.fc_norm else 0
        self.fc_norm = nn.ModuleList([Weight(config.target_hidden_size) for _ in range(num_norms)])
        self.fc = ColumnParallel(in_features, {"fc": self.hidden_size}, False, ALONE)
        self.layers = nn.ModuleList([_MidLayer(decoder, max_model_len)])
        self.norm = Weight(self.hidden_size)
        self.lm_head = VocabParallel(config.draft_vocab_size, self.hidden_size, ALONE, is_head=True)
        self.d2t = Weight(config.draft_vocab_size, dtype=torch.int64) if "d2t.weight" in config.tensors else None
        self.target_ids = torch.arange(config.draft_vocab_size)
        """[draft vocabulary] int64, the target's number of each token; right once `d2t` is loaded."""

    @property
    def state_specs(self) -> list[StateSpec]:
        """The spec of its layer, which needs a KV cache like one of the target's."""
        return [self._layer.self_attn.spec]

    @property
    def _layer(self) -> _MidLayer:
        layer = self.layers[0]
        assert isinstance(layer, _MidLayer)
        return layer

    def features(self, states_TE: torch.Tensor) -> torch.Tensor:
        """The target's hidden states at the inputs of the tapped layers, side by side, -> [T, E] features."""
        if self.input_norm is not None:
            states_TE = rms_norm(states_TE, self.input_norm.weight, self.eps)
        if self.fc_norm:
            normed_TE = states_TE.new_empty(states_TE.shape)
            parts = (one.chunk(len(self.fc_norm), dim=-1) for one in (states_TE, normed_TE))
            for norm, part_TE, out_TE in zip(self.fc_norm, *parts, strict=True):
                assert isinstance(norm, Weight)
                rms_norm(part_TE, norm.weight, self.eps, out=out_TE)
            states_TE = normed_TE
        feature_TE: torch.Tensor = self.fc(states_TE)
        return feature_TE

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return self._embed(token_ids_T)

    def run_layer(
        self,
        embedded_TE: torch.Tensor,
        feature_TE: torch.Tensor,
        context: StepContext,
        kv_cache: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        layer = self._layer
        pairs = normed_pairs(embedded_TE, feature_TE, (layer.input_layernorm, layer.hidden_norm), self.eps)
        if self.variant.norm_before_residual:
            rms_norm(feature_TE, layer.hidden_norm.weight, self.eps, out=feature_TE)
        hidden = layer.self_attn(pairs, *kv_cache, context)
        hidden = add_rms_norm(hidden, feature_TE, layer.post_attention_layernorm.weight, self.eps)
        add_residual(layer.mlp(hidden), feature_TE)
        if self.variant.norm_output:
            rms_norm(feature_TE, self.norm.weight, self.eps, out=feature_TE)
        return feature_TE

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """Results of `run_layer`, [S, E] -> [S, draft vocabulary] float32."""
        if not self.variant.norm_output:
            out_SE = rms_norm(out_SE, self.norm.weight, self.eps)
        logits = self.lm_head.logits(out_SE)
        assert logits is not None
        return logits


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t.weight" if name == "d2t" else name


def _is_derived(name: str) -> bool:
    """`t2d` lists the tokens that `d2t` has."""
    return name == "t2d" or name.endswith("rotary_emb.inv_freq")


def _check_features(fields: Fields) -> None:
    eagle = fields.inner("eagle_config")
    if not eagle.boolean("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "true: EAGLE-3 reads hidden states of several layers")


def _tapped_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read.

    Published files number either inputs or outputs: some name the default layers by the layers before them.
    """
    default = [2, num_layers // 2, num_layers - 3]
    eagle = fields.inner("eagle_config")
    source = fields if eagle.values.get(LAYER_IDS) is None else eagle
    layers = source.values.get(LAYER_IDS)
    if layers is None or layers == [number - 1 for number in default]:
        layers = default
    return tuple(source.target_layers(LAYER_IDS, layers, num_layers))


def load_eagle3(
    folder: Path,
    target_folder: Path,
    target_config: CheckpointConfig,
    target: Decoder,
    max_model_len: int,
    quantization: str | None = None,
    device: torch.device = CPU,
) -> Eagle3:
    """Load the head of a folder, on a rank of the target's last stage. Raises CheckpointError if a folder or a weight
    is wrong.

    If it has no embedding of its own, it uses the target's, unless this rank does not have all of it: then it is loaded
    from the target's folder.

    Args:
        folder: of the head.
        target_folder: the target's checkpoint.
        target_config: its configuration.
        target: this rank's part of it.
        max_model_len: of the target.
        quantization: the setting; None: the matrices are not quantised.
        device: of the target.
    """
    config = Eagle3Checkpoint.from_folder(folder, target_config)
    tensors, embed = dict(config.tensors), None
    if "embed_tokens.weight" not in tensors:
        if target.parallel.tensor_parallel_size == 1 and hasattr(target, "embed_tokens"):
            embed = target.embed_tokens.embed
        else:
            tensors |= vocabulary_tensor(target_folder, target_config, "embed_tokens.weight")
    head = load_draft_model(
        lambda: Eagle3(config, max_model_len, embed), target, target_config, tensors, quantization, device
    )
    if head.d2t is not None:
        head.target_ids += head.d2t.weight
        low, high = (int(bound) for bound in head.target_ids.aminmax())
        if low < 0 or high >= target_config.vocab_size:
            raise CheckpointError(
                f"{folder}: tensor d2t leads to token {low if low < 0 else high}; it must be from 0 to "
                f"{target_config.vocab_size - 1}"
            )
    return head
