"""Presence, frequency and repetition penalties, at a cost that depends on the tokens seen, not on the vocabulary.

`PenaltyState` keeps for each slot the tokens that its request has seen; `apply_penalties` changes only their logits.
Everything can be rebuilt from a request's token ids, and nothing is kept for slots that use no penalty.

::

    slot │ seen_token_ids      │ output_counts       │ num_seen │ column_of[token id]: 0, or 1 + its column
    ─────┼─────────────────────┼─────────────────────┼──────────┼───────────────────────────────────────────
      2  │ 5 8 77 301 · · · · ·│ 0 2  1   1 · · · · ·│    4     │ 0 0 0 0 0 1 0 0 2 0 …
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.sampling_params import SamplingParams

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """A step's penalties: P pairs of a row and a token that it has seen, each pair once."""

    positions: torch.Tensor
    """[P] int64, row * V + token id."""
    output_counts: torch.Tensor
    """[P] float32, how often the token occurs in the row's output; 0 if only in its prompt."""
    presence: torch.Tensor
    """[P] float32, the row's presence penalty; 0 changes nothing."""
    frequency: torch.Tensor
    """[P] float32; 0 changes nothing."""
    repetition: torch.Tensor
    """[P] float32; 1 changes nothing."""


def apply_penalties(logits_SV: torch.Tensor, penalties: Penalties) -> None:
    """Change the logits of seen tokens in place, in vLLM's order:

    1. repetition (prompt and output): positive logits are divided by it, others multiplied by it.
    2. frequency (output): subtracted once per occurrence.
    3. presence (output): subtracted once.
    """
    flat = logits_SV.view(-1)
    logits = flat.index_select(0, penalties.positions)
    logits = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits -= penalties.frequency * penalties.output_counts
    logits -= penalties.presence * (penalties.output_counts > 0)
    flat.index_copy_(0, penalties.positions, logits)


class PenaltyState:
    """The penalties of each slot, and the tokens that it has seen, of at most `max_num_tokens` in a request."""

    def __init__(self, max_num_seqs: int, vocab_size: int, max_num_tokens: int) -> None:
        self.is_used = np.zeros(max_num_seqs, dtype=np.bool_)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._vocab_size = vocab_size
        self._num_seen = np.zeros(max_num_seqs, dtype=np.int64)
        # New pages are zero, and take memory only when a slot first writes to them.
        max_seen = min(max_num_tokens, vocab_size)
        self._seen_token_ids = np.zeros((max_num_seqs, max_seen), dtype=np.int64)
        self._output_counts = np.zeros((max_num_seqs, max_seen), dtype=np.float32)
        self._column_of = np.zeros((max_num_seqs, vocab_size), dtype=np.int32)

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Set every field of a free slot for a new request: its prompt, and its output from `num_prompt_tokens` on."""
        last_seen = self._seen_token_ids[slot, : self._num_seen[slot]]
        self._column_of[slot, last_seen] = 0
        self._num_seen[slot] = 0
        self.is_used[slot] = params.has_penalties
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty
        if not params.has_penalties:
            return
        seen = np.unique(np.asarray(token_ids, dtype=np.int64))
        self._num_seen[slot] = len(seen)
        self._seen_token_ids[slot, : len(seen)] = seen
        self._output_counts[slot, : len(seen)] = 0
        self._column_of[slot, seen] = np.arange(1, len(seen) + 1)
        output, counts = np.unique(np.asarray(token_ids[num_prompt_tokens:], dtype=np.int64), return_counts=True)
        self._output_counts[slot, self._column_of[slot, output] - 1] = counts

    def append(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """Count one new output token per slot; slots that use no penalty are skipped."""
        used = self.is_used[slots]
        if not used.any():
            return
        slots, token_ids = slots[used], token_ids[used]
        columns = self._column_of[slots, token_ids] - 1
        new = columns < 0
        columns[new] = self._num_seen[slots[new]]
        self._seen_token_ids[slots[new], columns[new]] = token_ids[new]
        self._output_counts[slots[new], columns[new]] = 0
        self._column_of[slots[new], token_ids[new]] = columns[new] + 1
        self._num_seen[slots[new]] += 1
        self._output_counts[slots, columns] += 1

    def gather(self, slots: Int64Array, drafts: Mapping[int, Int64Array] = MappingProxyType({})) -> Penalties | None:
        """The penalties of a step with these slots as its rows; None if no row uses any. By row, `drafts` count as seen
        in addition."""
        rows = np.flatnonzero(self.is_used[slots])
        if not len(rows):
            return None
        num_seen = self._num_seen[slots[rows]]
        columns = [(slot, slice(number)) for slot, number in zip(slots[rows].tolist(), num_seen.tolist(), strict=True)]
        seen = [(self._seen_token_ids[column], self._output_counts[column]) for column in columns]
        if drafts:
            for i, row in enumerate(rows.tolist()):
                if row in drafts:
                    seen[i] = self._with_drafts(slots[row], *seen[i], drafts[row])
                    num_seen[i] = len(seen[i][0])
        token_ids = np.concatenate([own for own, _ in seen])
        return Penalties(
            positions=torch.from_numpy(token_ids + np.repeat(rows * self._vocab_size, num_seen)),
            output_counts=torch.from_numpy(np.concatenate([counts for _, counts in seen])),
            presence=torch.from_numpy(np.repeat(self._presence[slots[rows]], num_seen)),
            frequency=torch.from_numpy(np.repeat(self._frequency[slots[rows]], num_seen)),
            repetition=torch.from_numpy(np.repeat(self._repetition[slots[rows]], num_seen)),
        )

    def _with_drafts(
        self, slot: int, token_ids: Int64Array, output_counts: Float32Array, drafts: Int64Array
    ) -> tuple[Int64Array, Float32Array]:
        """The tokens that a slot has seen, and how often, as if it had sampled the drafts as well."""
        drafted, counts = np.unique(drafts, return_counts=True)
        columns = self._column_of[slot, drafted] - 1
        is_new = columns < 0
        output_counts = output_counts.copy()
        output_counts[columns[~is_new]] += counts[~is_new]
        new_counts = counts[is_new].astype(np.float32)
        return np.concatenate((token_ids, drafted[is_new])), np.concatenate((output_counts, new_counts))
