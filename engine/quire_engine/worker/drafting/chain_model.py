"""ChainModel: a model that drafts one token after the other."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches

__all__ = ["ChainModel"]


class ChainModel(Protocol):
    """What `ChainDrafter` drafts with. Its input at a position may be the token after that position."""

    token_offset: int
    """0: the input at position p is token p, as for any decoder. 1: it is token p + 1."""
    input_widths: Sequence[int]
    """Features of each of its inputs."""
    out_width: int
    """E, features of its output."""
    dtype: torch.dtype
    attention_specs: Sequence[AttentionSpec]
    """By layer."""

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        """The inputs at positions of known tokens, [T, width] each; uses only ops of `quire_kernels`, so that it can be
        recorded."""

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        """The inputs at positions of drafts, [T, width] each.

        Args:
            token_ids_T: the drafts.
            out_TE: what `layers` returned for the positions before them.
        """

    def layers(self, inputs: Sequence[torch.Tensor], context: ForwardContext, kv_caches: KVCaches) -> torch.Tensor:
        """[T, width] each → [T, E]; uses only ops of `quire_kernels`, so that it can be recorded."""

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """[S, E] → [S, V] float32, overwritten by the next call. It is recorded as well."""

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        """Keys and values for so many blocks, by layer. What else the model keeps for blocks is replaced, too."""
