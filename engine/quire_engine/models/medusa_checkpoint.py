"""Reads and checks a folder with Medusa heads, and finds the tensors in it. Does not use torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.fields import Fields, read_config
from quire_engine.models.files import StoredTensor
from quire_engine.models.weights import FLOATING, check_tensors, read_tensors

__all__ = ["MedusaCheckpoint"]

MAX_HEADS = 64
"""Upper bound; published models have at most 5."""
MAX_LAYERS = 64
"""Upper bound on the residual blocks of a head; published models have 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaCheckpoint:
    """What `config.json` and the headers of the weight files say about some heads."""

    num_heads: int
    num_layers: int
    """Residual blocks of each head."""
    hidden_size: int
    vocab_size: int
    has_bias: bool
    """Whether the blocks have biases."""
    num_output_matrices: int
    """One for each head, `lm_heads.N`; or 1 for all of them, `lm_head`; or 0: they use the target's."""
    files: Mapping[Path, Mapping[str, StoredTensor]]
    """The tensors of each file, by name as `expected_shapes` gives it."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "MedusaCheckpoint":
        """Read and check everything but the weights themselves.

        Args:
            folder: `config.json` and safetensors files, with the names of vLLM or of the authors' code.
            target: the model that the heads are for.

        Raises:
            CheckpointError: something is missing, truncated or of the wrong shape, or does not fit the target.
        """
        fields = read_config(folder, "speculative_config: model")
        fields.same_as_target("hidden_size", target.hidden_size)
        fields.same_as_target("vocab_size", target.vocab_size)
        if fields.integer("truncated_vocab_size", 1, target.vocab_size, target.vocab_size) != target.vocab_size:
            raise fields.error(
                "truncated_vocab_size", f"vocab_size={target.vocab_size}: heads over a part of it are not served"
            )
        num_heads = fields.integer(_one_of(fields, "medusa_num_heads", "num_heads"), 1, MAX_HEADS)
        num_layers = fields.integer(_one_of(fields, "medusa_num_layers", "num_hidden_layers"), 1, MAX_LAYERS, 1)
        uses_targets = fields.boolean("original_lm_head", False)
        files = read_tensors(folder, lambda name: _our_name(name, num_layers))
        names = {name for file in files.values() for name in file}
        if "lm_heads.0.weight" in names and (num_heads == 1 or (uses_targets and "lm_heads.1.weight" not in names)):
            for file in files.values():
                if "lm_heads.0.weight" in file:
                    file["lm_head.weight"] = file.pop("lm_heads.0.weight")
            names.add("lm_head.weight")
        if "lm_head.weight" in names:
            num_output_matrices = 1
        else:
            num_output_matrices = 0 if uses_targets and "lm_heads.0.weight" not in names else num_heads
        checkpoint = cls(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            has_bias=any(name.endswith(".bias") for name in names),
            num_output_matrices=num_output_matrices,
            files=files,
        )
        check_tensors(folder, files, checkpoint.expected_shapes, lambda name: FLOATING, checkpoint._is_unused)
        return checkpoint

    def expected_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name of each tensor, as in vLLM, and its shape."""
        size = self.hidden_size
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                yield f"blocks.{i}.layers.{j}.weight", (size, size)
                if self.has_bias:
                    yield f"blocks.{i}.layers.{j}.bias", (size,)
        names = (f"lm_heads.{i}" for i in range(self.num_output_matrices))
        for name in names if self.num_output_matrices > 1 else ["lm_head"] * self.num_output_matrices:
            yield f"{name}.weight", (self.vocab_size, size)

    def _is_unused(self, name: str) -> bool:
        """Heads beyond `num_heads` are left out, so that fewer can be used than were trained."""
        match = re.match(r"(?:blocks|lm_heads)\.(\d+)\.", name)
        return match is not None and int(match[1]) >= self.num_heads


def _one_of(fields: Fields, name: str, other: str) -> str:
    """The one of two names for a field that is in use; the first if neither is."""
    return other if fields.values.get(name) is None and fields.values.get(other) is not None else name


def _our_name(name: str, num_layers: int) -> str:
    """vLLM's name for a tensor; the authors have a sequence of blocks and an output matrix for each head."""
    match = re.fullmatch(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name)
    if match is None:
        return name
    head, layer, is_block, kind = match.groups()
    if is_block:
        return f"blocks.{head}.layers.{layer}.{kind}"
    return f"lm_heads.{head}.{kind}" if int(layer) == num_layers else name
