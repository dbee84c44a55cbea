"""CausalLM: what the worker asks of a model."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from quire_kernels import AttentionPlan

from quire_engine.distributed import ParallelState

__all__ = ["AttentionSpec", "CausalLM", "ForwardContext", "KVCaches"]

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""By layer of a stage: keys and values, each [N, K, B, D]; legend in `quire_kernels`."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of a layer, as far as its KV cache and its kernels depend on it; layers may differ.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key and value heads of this rank.
        head_size: of all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """What the layers know of a step's tokens besides their hidden states. All int64; legend in `quire_kernels`."""

    positions: torch.Tensor
    """[T], each token's position in its sequence."""
    slot_mapping: torch.Tensor
    """[T], where its key and value go."""
    block_table: torch.Tensor
    """[S, M], block ids in order."""
    query_start_loc: torch.Tensor
    """[S + 1], cumulative number of scheduled tokens."""
    seq_lens: torch.Tensor
    """[S], context and scheduled tokens together."""
    plans: Mapping[AttentionSpec, AttentionPlan]
    """How the attention is divided among threads, in layers of each kind; a layer whose kind is not there makes its
    own."""


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
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """By layer of this stage."""

    def forward(self, token_ids_T: torch.Tensor, context: ForwardContext, kv_caches: KVCaches) -> torch.Tensor | None:
        """Compute one step. All ranks take part.

        Args:
            token_ids_T: int64, the scheduled tokens of all requests, one after the other.
            context: whose tokens they are.
            kv_caches: written in place.

        Returns:
            [T, E] hidden states after the last norm; None on stages before the last.
        """

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]; on the first stage only."""

    def run_layers(
        self,
        hidden_TE: torch.Tensor,
        residual_TE: torch.Tensor | None,
        context: ForwardContext,
        kv_caches: KVCaches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers of this stage: ops of `quire_kernels` and nothing else, so that they can be recorded.

        Args:
            hidden_TE: becomes the residual stream, in place, where there is none.
            residual_TE: written in place.
            context: as of `forward`.
            kv_caches: as of `forward`.

        Returns:
            What the last layer adds to the residual stream, and the stream without it.
        """

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """What `run_layers` has returned -> [T, E]; on the last stage only."""

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V] float32, for the positions that are sampled only.

        All ranks of the last stage take part; those that do not sample get None.
        """

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """While it lasts, these are all the layers there are; for measuring memory."""
