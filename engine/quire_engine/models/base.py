"""CausalLM: the interface between the worker and a model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from quire_kernels import rms_norm, store_rows

from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import StateSpec
from quire_engine.models.layers.parallel import Weight
from quire_engine.models.step_context import KVCaches, RowColumn, StepContext

OUTPUT = -1
"""Among the layers of `FeatureTaps`: the hidden states after the last norm."""


class FeatureTaps:
    """Where a model keeps hidden states for every slot of the KV cache: the residual stream at the inputs of some
    layers, or its output.

    Args:
        layers: their numbers in the checkpoint, or `OUTPUT`, in the order of the table's columns; may repeat.
        table_NE: [num_slots, len(layers) * E] of the model's dtype, written in each step at `slot_mapping`. A stage
            writes the columns of its own layers.
    """

    def __init__(self, layers: Sequence[int], table_NE: torch.Tensor) -> None:
        self.table_NE = table_NE
        self._columns = list(zip(layers, table_NE.chunk(len(layers), dim=1), strict=True))

    def store(self, layer: int, hidden_TE: torch.Tensor, context: StepContext) -> None:
        """Write the columns of a layer, if it is tapped."""
        for number, column_NE in self._columns:
            if number == layer:
                store_rows(hidden_TE, context.slot_mapping, column_NE)


def replace_rows(hidden_TE: torch.Tensor, embedded: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Replace the embeddings of some tokens, in place; see `CausalLM.forward`."""
    rows_P, hidden_PE = embedded
    hidden_TE[rows_P, : hidden_PE.shape[1]] = hidden_PE.to(hidden_TE.dtype)


def normed_pairs(
    embedded_TE: torch.Tensor,
    hidden_TE: torch.Tensor,
    norms: tuple[Weight, Weight],
    eps: float,
    embedding_first: bool = True,
) -> torch.Tensor:
    """[T, 2 · E], the input of a head that drafts: at each position the next token's embedding and the hidden state,
    each normed with its own weight; the hidden state may come first."""
    pairs_T2E = hidden_TE.new_empty(len(hidden_TE), 2 * hidden_TE.shape[1])
    halves = pairs_T2E.chunk(2, dim=-1)
    for row_TE, norm, half_TE in zip(
        (embedded_TE, hidden_TE), norms, halves if embedding_first else halves[::-1], strict=True
    ):
        rms_norm(row_TE, norm.weight, eps, out=half_TE)
    return pairs_T2E


class CausalLM(Protocol):
    """One rank's part of a model, over a flattened batch of tokens; with one rank, all of it."""

    parallel: ParallelState
    hidden_size: int
    dtype: torch.dtype
    """The dtype of the hidden states."""

    row_columns: Sequence[RowColumn]
    """What its layers need of each row besides token and position."""

    @property
    def recordable(self) -> "RecordableLM | None":
        """The model itself, if its steps can also be recorded and captured; None if each is computed op by op."""

    @property
    def state_specs(self) -> Sequence[StateSpec]:
        """What each attention or recurrence of this stage keeps in the cache, in order."""

    @property
    def layer_numbers(self) -> Sequence[int]:
        """Their numbers in the whole model."""

    def forward(
        self,
        token_ids_T: torch.Tensor,
        context: StepContext,
        kv_caches: KVCaches,
        embedded: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Compute one step. All ranks take part.

        Args:
            token_ids_T: int64, the scheduled tokens of all requests, concatenated.
            context: of these tokens; each layer takes its `for_layer`.
            kv_caches: written in place. Layers of different groups may share tensors, but no block.
            embedded: rows, [P], and the hidden states that replace the embeddings of their tokens, [P, E].

        Returns:
            [T, E] hidden states after the last norm; None on stages before the last.
        """

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V] float32, only for the positions that are sampled.

        All ranks of the last stage take part; those that do not sample get None, as do all of a model without a head.
        """

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Inside the block, the model has only these layers; for measuring memory."""

    def num_parameters(self) -> int:
        """The number of this rank's parameters."""


class RecordableLM(CausalLM, Protocol):
    """A model in three parts, of which the layers use only ops of `quire_kernels`.

    ::

        forward          embed ─► run_layers ─► final_norm     eager, of any stage
        recorded, graphs         ─► run_layers ─► final_norm   only ops of `quire_kernels`, in one stage
    """

    input_size: int
    """The width of what `embed` returns: more than `hidden_size` where layers have inputs of their own."""
    has_head: bool
    """Whether it computes logits; else all of its tokens are of prompts."""
    feature_taps: FeatureTaps | None
    """Set before the first step, as what is recorded or captured refers to its table; None: nothing is kept."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, input_size], of which the first E are the hidden states; on the first stage only."""

    def run_layers(
        self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None, context: StepContext, kv_caches: KVCaches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers of this stage. Uses only ops of `quire_kernels`, so that it can be recorded.

        Args:
            hidden_TE: from `embed`; its hidden states become the residual stream, in place, if `residual_TE` is None.
            residual_TE: written in place.
            context: see `forward`, like the caches.
            kv_caches: likewise.

        Returns:
            The last layer's output, not yet added to the residual stream, and the residual stream.
        """

    def final_norm(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The results of `run_layers` -> [T, E]; on the last stage only."""
