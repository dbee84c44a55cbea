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
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import mul, neg
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import probabilities, sample, token_probabilities

from quire_engine.device.transfer import Download, upload
from quire_engine.draft_chances import DraftChances
from quire_engine.messages import DraftTokens
from quire_engine.sampling.rejection import draft_positions
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.sampling_inputs import sampling_arrays

Int64Array = npt.NDArray[np.int64]
_LEAST_CHANCE = 1e-3
"""Chances are above 0."""
_ANY_CHANCE = 0.8
"""The chance of every draft that is accepted by chance. The scheduler corrects it by how many were accepted."""


class DraftSampling:
    """The drafts of one step, place by place.

    Args:
        batch: with the requests' parameters.
        slots: [S]
        counts: [S], how many drafts each gets; descending.
        device: of the logits.
        by_chance: [S], whether the drafts are to be accepted by chance; None: none are.
        clock: seconds.
        least_chance: see `goes_on`; 0: every place is drawn.
        chances: what those of sampled requests' drafts are worth, and those of greedy ones; needed to stop earlier.
    """

    def __init__(
        self,
        batch: InputBatch,
        slots: Int64Array,
        counts: Int64Array,
        device: torch.device,
        by_chance: npt.NDArray[np.bool_] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        least_chance: float = 0.0,
        chances: Sequence[DraftChances] = (),
    ) -> None:
        self.slots = slots
        self._starts = batch.num_known_tokens[slots]
        self.counts: list[int] = counts.tolist()
        """By request."""
        self.by_chance = by_chance
        self.arrays = sampling_arrays(batch, slots, self._starts)
        """What the first place is drawn with, if no draft is accepted by chance."""
        self._device = device
        self.first_drawn_at: float | None = None
        """When the first place was drawn."""
        self._clock = clock
        self._least_chance = least_chance
        is_greedy = (batch.temperature[slots] == 0).tolist() if chances else []
        self._chances_of = [chances[own] for own in is_greedy]
        """By request."""
        self.num_drawn = 0
        """Places so far."""
        self.has_stopped = False
        """Whether more places were wanted than are worth it; see `goes_on`."""
        self._reach = [1.0] * len(self.counts)
        """By request that has the place drawn last, the chance that its drafts so far are all accepted."""
        self._token_ids: list[torch.Tensor] = []
        self._chances: list[torch.Tensor] = []
        self._distributions: list[torch.Tensor] = []

    @property
    def num_places(self) -> int:
        """The longest draft."""
        return self.counts[0]

    def num_rows(self, place: int) -> int:
        """How many requests have a draft at a place: the first so many."""
        return bisect_left(self.counts, -place, key=neg)

    def goes_on(self) -> bool:
        """Whether one more place is to be drawn: some request has it, and drafts so far that are all accepted with at
        least `least_chance`. That of drafts to be accepted by chance is not looked at: it would depend on the token."""
        num_rows = self.num_rows(self.num_drawn)
        self.has_stopped = num_rows > 0 and max(self._reach[:num_rows]) < self._least_chance
        return num_rows > 0 and not self.has_stopped

    def note_drawn(self, chances: Sequence[float]) -> None:
        """A place was drawn.

        Args:
            chances: of its drafts; empty if they are not on the host, and then all places are drawn.
        """
        self.num_drawn += 1
        if self.first_drawn_at is None:
            self.first_drawn_at = self._clock()
        if not chances or not self._chances_of:
            return
        # The chance of a model whose logits are not finite may be none.
        sound = (min(max(_LEAST_CHANCE, chance), 1.0) for chance in chances)
        chances = [own.of(chance) for own, chance in zip(self._chances_of, sound, strict=False)]
        self._reach = list(map(mul, self._reach, chances))
        if self.by_chance is not None:
            self._reach = np.where(self.by_chance[: len(chances)], 1.0, self._reach).tolist()

    @cached_property
    def _columns(self) -> list[torch.Tensor]:
        """`arrays` where the logits are, with the positions of drafts that are accepted by chance."""
        *others, positions = upload(self._device, *self.arrays)
        if self.by_chance is not None:
            positions = torch.where(upload(self._device, self.by_chance)[0], draft_positions(positions), positions)
        return [*others, positions]

    def draw(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Draw the tokens of the next place.

        Args:
            logits_NV: float32, of the first N = `num_rows(place)` requests.

        Returns:
            [N] int64 on the logits' device.
        """
        temperature, min_p, top_k, top_p, seeds, starts = (column[: len(logits_NV)] for column in self._columns)
        token_ids = sample(logits_NV, temperature, min_p, top_k, top_p, seeds, starts + len(self._token_ids))
        if self.by_chance is not None:
            self._distributions.append(probabilities(logits_NV, temperature, min_p, top_k, top_p))
        chances = token_probabilities(logits_NV, token_ids)
        self._token_ids.append(token_ids)
        self._chances.append(chances)
        self.note_drawn(chances.tolist() if self._least_chance and chances.device.type == "cpu" else ())
        return token_ids

    def drafts(self) -> list[DraftTokens]:
        """What was drawn for each request. The chances are those that the model that drafts gives, or fixed."""
        all_ids, all_chances = Download(torch.cat(self._token_ids), torch.cat(self._chances)).wait()
        shape = len(self._token_ids), len(self.counts)
        token_ids_PS, chances_PS = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        is_there = np.arange(shape[1]) < np.array([[len(token_ids)] for token_ids in self._token_ids])
        token_ids_PS[is_there], chances_PS[is_there] = all_ids.numpy(), all_chances.numpy()
        return self.drafts_of(token_ids_PS, chances_PS)

    def drafts_of(self, token_ids_PS: Int64Array, chances_PS: npt.NDArray[np.floating[Any]]) -> list[DraftTokens]:
        """The same for tokens that were drawn elsewhere with these `arrays`.

        Args:
            token_ids_PS: by place.
            chances_PS: of each.
        """
        starts = self._starts.tolist()
        chances_PS = np.minimum(np.fmax(chances_PS, _LEAST_CHANCE), 1)  # also of a model whose logits are not finite
        if self.by_chance is not None:
            chances_PS = np.where(self.by_chance, _ANY_CHANCE, chances_PS)
        token_ids, chances = token_ids_PS.T.tolist(), chances_PS.T.tolist()
        return [
            DraftTokens(start, own_ids[:count], own_chances[:count])
            for start, count, own_ids, own_chances in zip(starts, self.counts, token_ids, chances, strict=True)
        ]

    def distributions(self, row: int) -> torch.Tensor | None:
        """[number of drafts, V] float32: what a request's drafts were drawn from, if they are accepted by chance."""
        if self.by_chance is None or not self.by_chance[row]:
            return None
        return torch.stack([place_NV[row] for place_NV in self._distributions if row < len(place_NV)])
