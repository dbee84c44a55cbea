"""Medusa heads: each drafts one more token from the target's last hidden state (Cai et al. 2024,
https://arxiv.org/abs/2401.10774, section 2.1).

Head k is some residual blocks, `h + SiLU(W h + b)`, and an output matrix, whose logits are of the token k + 2 places
after the one that the hidden state is of (the target itself gives the one at place 1). As all heads read the same
hidden state, their first blocks are one matrix multiplication::

    hidden_SE ─ blocks of all heads ─ [S, num_heads, E] ─ output matrix, of each or of all ─ logits_SHV

The heads are not cut into slices: one rank has all of them, and computes alone.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from quire_kernels import LinearWeight, linear
from torch import nn

from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import build, load_tensors
from quire_engine.models.medusa_checkpoint import MedusaCheckpoint
from quire_engine.models.parallel import ColumnParallel, VocabParallel
from quire_engine.models.weights import vocabulary_tensor

__all__ = ["MedusaHeads", "load_medusa"]

ALONE = ParallelState()


class _Blocks(nn.Module):
    """The residual blocks of a head after the first one."""

    def __init__(self, config: MedusaCheckpoint) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleDict(
            {str(j): ColumnParallel(size, {str(j): size}, config.has_bias, ALONE) for j in range(1, config.num_layers)}
        )


class MedusaHeads(nn.Module):
    """All heads of a model.

    Args:
        config: their checkpoint.
        shared_head: the target's output matrix, of its whole vocabulary, if they use it; None: they have their own.
    """

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
        """The target's hidden states after its last norm, [S, E] -> what the output matrices read, [S * num_heads, E].

        Row `s * num_heads + k` is head k's of sequence s.
        """
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


def _output_matrix(config: MedusaCheckpoint) -> VocabParallel:
    return VocabParallel(config.vocab_size, config.hidden_size, ALONE, is_head=True)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x, inplace=True)


def load_medusa(
    folder: Path,
    target_folder: Path,
    target_config: CheckpointConfig,
    target: Decoder,
    dtype: torch.dtype,
    quantized_dtype: torch.dtype | None = None,
    device: torch.device = CPU,
) -> MedusaHeads:
    """Load the heads of a folder, on a rank of the target's last stage.

    Where they use the target's output matrix, they share its memory, unless the target has only a slice of it: then
    all of it is loaded from the target's folder.

    Args:
        folder: see `MedusaCheckpoint.from_folder`.
        target_folder: the target's checkpoint.
        target_config: its configuration.
        target: this rank's part of it.
        dtype: of the activations, as in the target.
        quantized_dtype: of the matrices; None: they are not quantised.
        device: of the target.

    Raises:
        CheckpointError: a folder or a weight in it is not as it has to be.
    """
    config = MedusaCheckpoint.from_folder(folder, target_config)
    files, shared_head = dict(config.files), None
    if not config.num_output_matrices:
        if target.parallel.tensor_parallel_size == 1:
            shared_head = target.head.packed
        else:
            files |= vocabulary_tensor(target_folder, target_config, "lm_head.weight")
    heads = build(lambda: MedusaHeads(config, shared_head), dtype, device)
    load_tensors(heads, files, quantized_dtype)
    return heads.eval()
