"""CausalLM: what the worker asks of a model."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from quire_engine.distributed import ParallelState
from quire_engine.models.layers import AttentionMetadata

__all__ = ["CausalLM", "KVCaches"]

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""By layer of a stage: keys and values, each [N, K, B, D]; legend in `quire_kernels`."""


class CausalLM(Protocol):
    """One rank's part of a model, over a flattened batch of tokens; with one rank, all of it.

    ::

        forward          embed ─► run_layers ─► final_norm     eager, of any stage
        recorded, graphs         ─► run_layers ─► final_norm   ops of `quire_kernels` alone, in one stage
    """

    parallel: ParallelState
    hidden_size: int
    dtype: torch.dtype
    """Of the hidden states."""

    @property
    def num_heads(self) -> int:
        """Query heads of this rank, in each layer."""

    def forward(
        self, token_ids_T: torch.Tensor, kv_caches: KVCaches, metadata: AttentionMetadata
    ) -> torch.Tensor | None:
        """Compute one step. All ranks take part.

        Args:
            token_ids_T: int64, the scheduled tokens of all requests, one after the other.
            kv_caches: written in place.
            metadata: whose tokens they are.

        Returns:
            [T, E] hidden states after the last norm; None on stages before the last.
        """

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]; on the first stage only."""

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers of this stage: ops of `quire_kernels` and nothing else, so that they can be recorded.

        Args:
            hidden_TE: becomes the residual stream, in place, where there is none.
            residual_TE: written in place.
            kv_caches: as of `forward`.
            metadata: as of `forward`.

        Returns:
            What the last layer adds to the residual stream, and the stream without it.
        """

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """What `run_layers` has returned -> [T, E]; on the last stage only."""

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V] float32, for the positions that are sampled only.

        All ranks of the last stage take part; those that do not sample get None.
        """

    def first_layer_only(self) -> AbstractContextManager[None]:
        """While it lasts, a step computes one layer, and needs the KV cache of one; for measuring memory."""
