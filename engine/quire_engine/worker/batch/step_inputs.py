"""StepInputs: one step, flattened, on the host. Every `Forward` begins with these arrays.

::

    requests           a     b          c              S = 3
    num_scheduled      2     3          1
    query_start_loc  0     2          5   6
    token_slots        a a   b  b  b    c              T = 6
    positions          7 8   0  1  2    40             num_computed + 0, 1, …

Rows are the positions that are sampled: the last token of each request that the step completes, and the drafts after
it, if it has any. Here, `b` has a prompt of one token and two drafts::

    sampled            a     b          c              R = 5
    token_rows           1   2  3  4    5
    offsets              0   0  1  2    0              how many drafts come before the token that is sampled
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.messages import SchedulerOutput
from quire_engine.models.step_context import BidirectionalArrays, StepRows
from quire_engine.worker.batch.input_batch import InputBatch

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """R rows of N requests; each request's rows are consecutive."""

    request_ids: list[str]
    """N."""
    token_rows: Int64Array
    """[R], indices into the step's tokens."""
    slots: Int64Array
    """[R]"""
    offsets: Int64Array
    """[R], how many drafts are between the last known token and the one that is sampled."""
    drafts: Mapping[str, Sequence[int]]
    """By request; requests without drafts are left out."""

    @property
    def starts(self) -> Int64Array:
        """[N], the first row of each request."""
        return np.flatnonzero(self.offsets == 0) if self.drafts else np.arange(len(self.slots))

    @property
    def slots_without_drafts(self) -> Int64Array:
        """The slots of the requests that get exactly one token."""
        if not self.drafts:
            return self.slots
        is_drafted = np.fromiter((request_id in self.drafts for request_id in self.request_ids), dtype=np.bool_)
        return self.slots[self.starts][~is_drafted]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs(StepRows):
    """S requests, T tokens."""

    request_ids: list[str]
    num_scheduled: Int64Array
    """[S], scheduled tokens of each request."""
    is_on_device: npt.NDArray[np.bool_]
    """[T], whether the token has been sampled, but is not on the host yet."""
    sampled: SampledRows
    embedded: tuple[Int64Array, npt.NDArray[np.float32]] | None = None
    """[P] and [P, E]: rows of the step that are not embedded from their tokens, and their hidden states. None: there
    are none."""

    @property
    def samples_every_token(self) -> bool:
        """Whether the step samples after each of its tokens: it computes the last one of each request, and drafts."""
        return len(self.sampled.token_rows) == len(self.token_ids)

    @classmethod
    def of(cls, batch: InputBatch, scheduler_output: SchedulerOutput) -> "StepInputs":
        """Lay out a step, without a Python loop over its tokens. The step's changes are already applied to the
        batch."""
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.draft_token_ids
        request_ids = list(scheduled)
        owners: int | Int64Array
        if len(request_ids) == 1:
            owners, number = batch.slots[request_ids[0]], scheduled[request_ids[0]]
            end = int(batch.num_computed_tokens[owners]) + number
            rows, num_scheduled = batch.lay_out_one(owners, end - number, end), np.array([number])
            num_beyond_one = -1 if owners in batch.pools else end - int(batch.num_tokens[owners])
            sampled = _sampled_rows_of_one(request_ids, rows, num_beyond_one, drafts)
        else:
            slots = np.array([batch.slots[request_id] for request_id in request_ids], dtype=np.int64)
            num_scheduled = np.fromiter(scheduled.values(), dtype=np.int64)
            num_computed = batch.num_computed_tokens[slots]
            ends = num_computed + num_scheduled
            rows = batch.lay_out(slots, num_computed, ends)
            owners = rows["token_slots"]
            num_beyond = ends - batch.num_tokens[slots]
            if batch.pools:
                num_beyond[np.isin(slots, list(batch.pools))] = -1  # they are not sampled
            sampled = _sampled_rows(request_ids, slots, rows["query_start_loc"], num_beyond, drafts)
        if batch.has_states:
            numbers = [len(drafts.get(request_id, ())) for request_id in request_ids]
            rows["states"] = batch.state_rows(
                rows["slots"], rows["seq_lens"] - num_scheduled, rows["seq_lens"], np.array(numbers, dtype=np.int64)
            )
        is_on_device = rows["positions"] >= batch.num_known_tokens[owners]
        if drafts:
            is_on_device &= rows["positions"] < batch.num_tokens[owners]
        return cls(
            request_ids=request_ids,
            num_scheduled=num_scheduled,
            is_on_device=is_on_device,
            sampled=sampled,
            **_parts(batch, rows) if batch.prompt_parts else {},
            **rows,
        )


def _sampled_rows_of_one(
    request_ids: list[str], rows: dict[str, Any], num_beyond: int, drafts: Mapping[str, Sequence[int]]
) -> SampledRows:
    number, slots = max(num_beyond + 1, 0), rows["token_slots"]
    offsets = np.arange(number if drafts else min(number, 1))
    return SampledRows(
        request_ids=request_ids if number else [],
        token_rows=offsets + (len(slots) - len(offsets)),
        slots=slots[: len(offsets)],
        offsets=offsets,
        drafts=drafts,
    )


def _parts(batch: InputBatch, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a step that computes parts of prompts; empty if it computes none."""
    starts, places, hidden = rows["query_start_loc"], [], []
    bidirectional: list[tuple[Int64Array, int, int]] = []
    firsts = zip(rows["slots"].tolist(), starts.tolist(), np.diff(starts).tolist(), strict=False)
    for slot, row, number in firsts:
        parts = batch.prompt_parts.get(slot)
        start = int(rows["positions"][row])
        if parts is None or start >= parts[-1].end:
            continue
        for part in parts:
            first, last = max(part.start, start), min(part.end, start + number)
            if first < last:
                places.append(np.arange(first, last) + (row - start))
                tensor = np.frombuffer(part.tensor, dtype=np.float32).reshape(part.length, -1)
                hidden.append(tensor[first - part.start : last - part.start])
                if part.is_bidirectional:
                    bidirectional.append((places[-1], slot, part.end))
    if not places:
        return {}
    width = max(own.shape[1] for own in hidden)  # those of images may have features for other layers beside them
    hidden = [np.pad(own, ((0, 0), (0, width - own.shape[1]))) if own.shape[1] < width else own for own in hidden]
    fields: dict[str, Any] = {"embedded": (np.concatenate(places), np.concatenate(hidden))}
    if bidirectional:
        own, slots, ends = zip(*bidirectional, strict=True)
        fields["bidirectional"] = BidirectionalArrays(
            rows=np.concatenate(own), slots=np.array(slots), seq_lens=np.array(ends),
            query_start_loc=np.cumsum([0, *map(len, own)]),
        )  # fmt: skip
    return fields


def _sampled_rows(
    request_ids: list[str],
    slots: Int64Array,
    query_start_loc: Int64Array,
    num_beyond: Int64Array,
    drafts: Mapping[str, Sequence[int]],
) -> SampledRows:
    """The rows of the requests that have all of their tokens computed after this step. `num_beyond`, [S], is computed
    tokens minus the request's tokens: the number of drafts, or less than 0 if a part of the prompt is left."""
    complete = np.flatnonzero(num_beyond >= 0)
    if len(complete) < len(request_ids):
        request_ids = [request_ids[i] for i in complete.tolist()]
    last_rows, slots = query_start_loc[1:][complete] - 1, slots[complete]
    if not drafts:
        return SampledRows(
            request_ids=request_ids, token_rows=last_rows, slots=slots, offsets=np.zeros_like(slots), drafts=drafts
        )
    num_rows = num_beyond[complete] + 1
    ends = num_rows.cumsum()
    offsets = np.arange(num_rows.sum()) - np.repeat(ends - num_rows, num_rows)
    return SampledRows(
        request_ids=request_ids,
        token_rows=np.repeat(last_rows - num_beyond[complete], num_rows) + offsets,
        slots=np.repeat(slots, num_rows),
        offsets=offsets,
        drafts=drafts,
    )
