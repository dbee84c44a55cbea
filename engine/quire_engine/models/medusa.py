"""Medusa heads: each drafts one more token from the target's last hidden state (Cai et al. 2024,
https://arxiv.org/abs/2401.10774, section 2.1).

Head k is some residual blocks, `h + SiLU(W h + b)`, and an output matrix, whose logits are of the token k + 2 places
after the one that the hidden state is of (the target itself gives the one at place 1). As all heads read the same
hidden state, their first blocks are one matrix multiplication::

    hidden_SE ─ blocks of all heads ─ [S, num_heads, E] ─ output matrix, of each or of all ─ logits_SHV

The heads are not cut into slices: one rank has all of them, and computes alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from quire_kernels import LinearWeight, linear
from torch import nn

from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints import StoredTensor, open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.checkpoints.fields import Fields, read_config
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import ColumnParallel, VocabParallel, load_targets
from quire_engine.models.loader import build, check_tensors, load_draft_model, vocabulary_tensor

ALONE = ParallelState()
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
    tensors: Mapping[str, StoredTensor]
    """By vLLM's names, which `MedusaHeads` has."""

    @classmethod
    def from_folder(cls, folder: Path, target: CheckpointConfig) -> "MedusaCheckpoint":
        """Read and check everything but the weights themselves. Tensors have the names of vLLM or of the authors' code.
        Raises CheckpointError if something is missing, truncated or of the wrong shape, or does not fit the target."""
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
        stored = open_checkpoint(folder).tensors
        tensors = {_our_name(name, num_layers): tensor for name, tensor in stored.items()}
        first, second = (f"lm_heads.{i}.weight" in tensors for i in range(2))
        if first and (num_heads == 1 or (uses_targets and not second)):
            tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
        num_output_matrices = 0 if uses_targets and not first else num_heads
        if "lm_head.weight" in tensors:
            num_output_matrices = 1
        checkpoint = cls(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            has_bias=any(name.endswith(".bias") for name in tensors),
            num_output_matrices=num_output_matrices,
            tensors=tensors,
        )
        targets = load_targets(build(lambda: MedusaHeads(checkpoint), torch.float32, torch.device("meta")))
        if not num_output_matrices:
            del targets["lm_head.weight"]  # the target's
        check_tensors(folder, tensors, targets, checkpoint._is_unused)
        return checkpoint

    def _is_unused(self, name: str) -> bool:
        """Heads beyond `num_heads` are left out, so that fewer can be used than were trained."""
        match = re.match(r"(?:blocks|lm_heads)\.(\d+)\.", name)
        return match is not None and int(match[1]) >= self.num_heads


class _Blocks(nn.Module):
    def __init__(self, config: MedusaCheckpoint) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleDict(
            {str(j): ColumnParallel(size, {str(j): size}, config.has_bias, ALONE) for j in range(1, config.num_layers)}
        )


class MedusaHeads(nn.Module):
    """All heads of a model. They share the target's output matrix of its whole vocabulary, if it is given, or have
    their own."""

    def __init__(self, config: MedusaCheckpoint, shared_head: LinearWeight | None = None) -> None:
        super().__init__()
        self.num_heads, size = config.num_heads, config.hidden_size
        parts = {f"blocks.{i}.layers.0": size for i in range(self.num_heads)}
        self.first_layers = ColumnParallel(size, parts, config.has_bias, ALONE)
        self.blocks = nn.ModuleList(_Blocks(config) for _ in range(self.num_heads))
        self._shared_head = shared_head
        self.lm_head, self.lm_heads = None, nn.ModuleList()
        if config.num_output_matrices > 1:
            self.lm_heads.extend(_output_matrix(config) for _ in range(self.num_heads))
        elif shared_head is None:
            self.lm_head = _output_matrix(config)

    def hidden(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """The target's hidden states after its last norm, [S, E] -> the inputs of the output matrices, [S * num_heads,
        E]. Row `s * num_heads + k` is head k's of sequence s."""
        hidden_SHE = _silu(self.first_layers(hidden_SE)).view(len(hidden_SE), self.num_heads, -1)
        hidden_SHE += hidden_SE.unsqueeze(1)
        for i, blocks in enumerate(self.blocks):
            assert isinstance(blocks, _Blocks)
            own_SE = hidden_SHE[:, i]
            for layer in blocks.layers.values():
                own_SE += _silu(layer(own_SE))
        return hidden_SHE.flatten(0, 1)

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """The target's hidden states after its last norm, [S, E] -> [S, num_heads, V] float32."""
        hidden = self.hidden(hidden_SE)
        if len(self.lm_heads):
            each = [head.packed for head in self.lm_heads if isinstance(head, VocabParallel)]
            hidden_SHE = hidden.view(len(hidden_SE), self.num_heads, -1)
            return torch.stack([linear(hidden_SHE[:, i], head, torch.float32) for i, head in enumerate(each)], dim=1)
        head = self._shared_head if self.lm_head is None else self.lm_head.packed
        assert head is not None
        return linear(hidden, head, torch.float32).view(len(hidden_SE), self.num_heads, -1)


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


def _output_matrix(config: MedusaCheckpoint) -> VocabParallel:
    return VocabParallel(config.vocab_size, config.hidden_size, ALONE, is_head=True)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x, inplace=True)


def load_medusa(
    folder: Path,
    target_folder: Path,
    target_config: CheckpointConfig,
    target: Decoder,
    quantization: str | None = None,
    device: torch.device = CPU,
) -> MedusaHeads:
    """Load the heads of a folder, on a rank of the target's last stage. Raises CheckpointError if a folder or a weight
    is wrong.

    Where they use the target's output matrix, they share its memory, unless the target has only a slice of it: then all
    of it is loaded from the target's folder.

    Args:
        folder: of the heads.
        target_folder: the target's checkpoint.
        target_config: its configuration.
        target: this rank's part of it.
        quantization: the setting; None: the matrices are not quantised.
        device: of the target.
    """
    config = MedusaCheckpoint.from_folder(folder, target_config)
    tensors, shared_head = dict(config.tensors), None
    if not config.num_output_matrices:
        if target.parallel.tensor_parallel_size == 1:
            shared_head = target.head.packed
        else:
            tensors |= vocabulary_tensor(target_folder, target_config, "lm_head.weight")
    return load_draft_model(
        lambda: MedusaHeads(config, shared_head), target, target_config, tensors, quantization, device
    )
