"""Reads and checks a folder with an EAGLE-3 head, and finds the tensors in it. Does not use torch."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig, read_architecture
from quire_engine.models.families.llama import read_options
from quire_engine.models.fields import Fields, read_config
from quire_engine.models.files import StoredTensor
from quire_engine.models.weights import FLOATING, INDICES, check_tensors, expected_shapes, read_tensors

__all__ = ["Eagle3Checkpoint"]

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Checkpoint:
    """What `config.json` and the headers of the weight files say about a head."""

    decoder: CheckpointConfig
    """Of a decoder with the head's one layer; its vocabulary is the target's."""
    draft_vocab_size: int
    """How many tokens of the vocabulary can be drafted."""
    tapped_layers: tuple[int, ...]
    """The target's layers, counted from 0, at whose input the residual stream is read."""
    target_hidden_size: int
    has_embedding: bool
    """Whether it has an embedding of its own; else it uses the target's."""
    has_offsets: bool
    """Whether it holds `d2t`; else the drafted tokens have the target's numbers."""
    files: Mapping[Path, Mapping[str, StoredTensor]]
    """The tensors of each file, by name as `expected_shapes` gives it."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "Eagle3Checkpoint":
        """Read and check everything but the weights themselves.

        Args:
            folder: `config.json` and safetensors files, with the names that the authors publish.
            target: the model that the head is for.

        Raises:
            CheckpointError: something is missing, truncated or of the wrong shape, or does not fit the target.
        """
        fields = read_config(folder, "speculative_config: model")
        architecture = read_architecture(fields, ARCHITECTURES)
        decoder = CheckpointConfig.from_fields(folder, fields, architecture, read_options(fields))
        if decoder.num_layers != 1:
            raise fields.error("num_hidden_layers", "1")
        if decoder.weight_format.method != "unquantised":
            raise fields.error(
                "quantization_config", "unset: an unquantised head is quantised as its target is, when it is loaded"
            )
        fields.same_as_target("vocab_size", target.vocab_size)
        fields.same_as_target("target_hidden_size", target.hidden_size)
        _refuse_variants(fields)
        draft_vocab_size = fields.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size)
        files = read_tensors(folder, _our_name)
        names = {name for file in files.values() for name in file}
        if "d2t.weight" not in names and draft_vocab_size < target.vocab_size:
            raise CheckpointError(
                f"{folder}: its safetensors files hold no d2t, which draft_vocab_size={draft_vocab_size} of "
                f"vocab_size={target.vocab_size} needs"
            )
        if "embed_tokens.weight" not in names and decoder.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"{folder}: its safetensors files hold no embed_tokens.weight; the target's has hidden_size="
                f"{target.hidden_size}, and this head {decoder.hidden_size}"
            )
        head = cls(
            decoder=decoder,
            draft_vocab_size=draft_vocab_size,
            tapped_layers=_tapped_layers(fields, target.num_layers),
            target_hidden_size=target.hidden_size,
            has_embedding="embed_tokens.weight" in names,
            has_offsets="d2t.weight" in names,
            files=files,
        )
        check_tensors(folder, files, head.expected_shapes, _kinds, _is_derived)
        return head

    def expected_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name of each tensor and its shape; the layer is `layers.0`, as in a decoder."""
        config, size = self.decoder, self.decoder.hidden_size
        projections = {f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
        for name, shape in expected_shapes(
            dataclasses.replace(config, vocab_size=self.draft_vocab_size, tie_word_embeddings=False)
        ):
            if name in projections:
                yield name, (shape[0], 2 * size)
            elif name != "embed_tokens.weight":
                yield name, shape
        yield "layers.0.hidden_norm.weight", (size,)
        yield "fc.weight", (size, len(self.tapped_layers) * self.target_hidden_size)
        if self.has_embedding:
            yield "embed_tokens.weight", (config.vocab_size, size)
        if self.has_offsets:
            yield "d2t.weight", (self.draft_vocab_size,)


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    return "d2t.weight" if name == "d2t" else name


def _kinds(name: str) -> tuple[str, ...]:
    return INDICES if name == "d2t.weight" else FLOATING


def _is_derived(name: str) -> bool:
    """`t2d` says which tokens `d2t` has."""
    return name == "t2d" or name.endswith("rotary_emb.inv_freq")


def _refuse_variants(fields: Fields) -> None:
    """Refuse heads that compute something else than the paper's.

    Raises:
        CheckpointError: it is one of those that are known.
    """
    for name in ("norm_before_residual", "norm_before_fc"):
        if fields.boolean(name, False):
            raise fields.error(name, "false: this variant is not served")
    eagle = fields.inner("eagle_config")
    if not eagle.boolean("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "true: EAGLE-3 reads hidden states of several layers")


def _tapped_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read.

    Published files number either inputs or outputs: some name the default layers by the layers before them.

    Raises:
        CheckpointError: the target has no such layers.
    """
    default = [2, num_layers // 2, num_layers - 3]
    eagle = fields.inner("eagle_config")
    source = fields if eagle.values.get(LAYER_IDS) is None else eagle
    layers = source.values.get(LAYER_IDS)
    if layers is None or layers == [number - 1 for number in default]:
        layers = default
    if (
        not isinstance(layers, list)
        or not layers
        or not all(type(number) is int and 0 <= number < num_layers for number in layers)
    ):
        raise source.error(LAYER_IDS, f"a list of integers from 0 to {num_layers - 1}, layers of the target")
    return tuple(layers)
