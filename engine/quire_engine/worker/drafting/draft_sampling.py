"""DraftSampling: draws draft tokens from a draft model's logits, with the noise that the target will use there.

A token is the largest of logits plus noise. If draft model and target add the same noise, they agree more often than by
two independent draws: where their distributions are equal, always (Gumbel noise coupling). So a draft is accepted about
as often at any temperature as in greedy decoding.

Drafts that are to be accepted by chance are drawn with noise of their own instead, and the distribution that each was
drawn from is kept. Their chances say nothing of the token: whether a draft is computed must not depend on which token
it is (see `sampling/rejection.py`).
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from operator import neg
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import probabilities, sample, token_probabilities

from quire_engine.device.transfer import Download, upload
from quire_engine.messages import DraftTokens
from quire_engine.sampling.rejection import draft_positions
from quire_engine.worker.batch.input_batch import InputBatch

__all__ = ["DraftSampling", "SamplingColumns"]

Int64Array = npt.NDArray[np.int64]
_LEAST_CHANCE = 1e-3
"""Chances are above 0."""
_ANY_CHANCE = 0.8
"""Of every draft that is accepted by chance. The scheduler corrects it by how they fared."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The parameters that tokens are drawn with, see `quire_kernels.sample`; [S] each."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int) -> "SamplingColumns":
        """Greedy rows, to be written over."""
        floats = [torch.zeros(num_rows) for _ in range(3)]
        integers = [torch.zeros(num_rows, dtype=torch.int64) for _ in range(3)]
        return cls(floats[0], floats[1], integers[0], floats[2], integers[1], integers[2])

    @property
    def tensors(self) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
        """In the order in which `sample` takes them."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.positions

    def copy_(self, other: "SamplingColumns") -> None:
        """Write the rows of another over the first ones; both on the CPU, where numpy takes a quarter of the time."""
        for own, given in zip(self.tensors, other.tensors, strict=True):
            own.numpy()[: given.shape[0]] = given.numpy()

    def rows(self, num_rows: int) -> "SamplingColumns":
        """A view of the first rows."""
        return SamplingColumns(*(column[:num_rows] for column in self.tensors))


class DraftSampling:
    """The drafts of one step, place by place.

    Args:
        batch: with the requests' parameters.
        slots: [S]
        counts: [S], how many drafts each gets; descending.
        device: of the logits.
        by_chance: [S], whether the drafts are to be accepted by chance; None: none are.
        clock: seconds.
    """

    def __init__(
        self,
        batch: InputBatch,
        slots: Int64Array,
        counts: Int64Array,
        device: torch.device,
        by_chance: npt.NDArray[np.bool_] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._starts = batch.num_known_tokens[slots]
        self._counts: list[int] = counts.tolist()
        columns = (
            batch.temperature[slots], batch.min_p[slots], batch.top_k[slots], batch.top_p[slots],
            batch.seed[slots].view(np.int64),
        )  # fmt: skip
        self.by_chance = by_chance
        *others, positions = upload(device, *columns, self._starts)
        if by_chance is not None:
            positions = torch.where(upload(device, by_chance)[0], draft_positions(positions), positions)
        temperature, min_p, top_k, top_p, seeds = others
        self.columns = SamplingColumns(temperature, min_p, top_k, top_p, seeds, positions)
        """With the positions of the first drafts."""
        self.first_drawn_at: float | None = None
        """When the first place was drawn."""
        self._clock = clock
        self._token_ids: list[torch.Tensor] = []
        self._chances: list[torch.Tensor] = []
        self._distributions: list[torch.Tensor] = []

    @property
    def num_places(self) -> int:
        """The longest draft."""
        return self._counts[0]

    def num_rows(self, place: int) -> int:
        """How many requests have a draft at a place: the first so many."""
        return bisect_left(self._counts, -place, key=neg)

    def note_drawn(self) -> None:
        """A place was drawn."""
        if self.first_drawn_at is None:
            self.first_drawn_at = self._clock()

    def draw(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Draw the tokens of the next place.

        Args:
            logits_NV: float32, of the first N = `num_rows(place)` requests.

        Returns:
            [N] int64 on the logits' device.
        """
        temperature, min_p, top_k, top_p, seeds, starts = self.columns.rows(len(logits_NV)).tensors
        token_ids = sample(logits_NV, temperature, min_p, top_k, top_p, seeds, starts + len(self._token_ids))
        if self.by_chance is not None:
            self._distributions.append(probabilities(logits_NV, temperature, min_p, top_k, top_p))
        self.note_drawn()
        self._token_ids.append(token_ids)
        self._chances.append(token_probabilities(logits_NV, token_ids))
        return token_ids

    def drafts(self) -> list[DraftTokens]:
        """What was drawn for each request. The chances are those that the model that drafts gives, or fixed."""
        all_ids, all_chances = Download(torch.cat(self._token_ids), torch.cat(self._chances)).wait()
        shape = len(self._token_ids), len(self._counts)
        token_ids_PS, chances_PS = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        is_there = np.arange(shape[1]) < np.array([[len(token_ids)] for token_ids in self._token_ids])
        token_ids_PS[is_there], chances_PS[is_there] = all_ids.numpy(), all_chances.numpy()
        return self.drafts_of(token_ids_PS, chances_PS)

    def drafts_of(self, token_ids_PS: Int64Array, chances_PS: npt.NDArray[np.floating[Any]]) -> list[DraftTokens]:
        """The same for tokens that were drawn elsewhere with these `columns`.

        Args:
            token_ids_PS: by place.
            chances_PS: of each.
        """
        starts = self._starts.tolist()
        chances_PS = np.fmax(chances_PS, _LEAST_CHANCE).clip(max=1)  # also of a model whose logits are not finite
        if self.by_chance is not None:
            chances_PS = np.where(self.by_chance, _ANY_CHANCE, chances_PS)
        token_ids, chances = token_ids_PS.T.tolist(), chances_PS.T.tolist()
        return [
            DraftTokens(start, own_ids[:count], own_chances[:count])
            for start, count, own_ids, own_chances in zip(starts, self._counts, token_ids, chances, strict=True)
        ]

    def distributions(self, row: int) -> torch.Tensor | None:
        """[number of drafts, V] float32: what a request's drafts were drawn from, if they are accepted by chance."""
        if self.by_chance is None or not self.by_chance[row]:
            return None
        return torch.stack([place_NV[row] for place_NV in self._distributions if row < len(place_NV)])
