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

import numpy as np
import numpy.typing as npt

from quire_engine.messages import SchedulerOutput
from quire_engine.worker.batch.input_batch import InputBatch

__all__ = ["SampledRows", "StepInputs"]

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
class StepInputs:
    """S requests, T tokens."""

    request_ids: list[str]
    slots: Int64Array
    """[S]"""
    num_scheduled: Int64Array
    """[S], scheduled tokens of each request."""
    query_start_loc: Int64Array
    """[S + 1], cumulative number of scheduled tokens."""
    seq_lens: Int64Array
    """[S], context and scheduled tokens together."""
    token_ids: Int64Array
    """[T]"""
    token_slots: Int64Array
    """[T], the slot of each token's request."""
    positions: Int64Array
    """[T]"""
    slot_mappings: list[Int64Array]
    """[T] of each group of layers, cache slot for each token's key and value."""
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
    def of(cls, batch: InputBatch, scheduler_output: SchedulerOutput, block_size: int) -> "StepInputs":
        """Lay out a step, without a Python loop over its tokens.

        Args:
            batch: with the step's changes already applied.
            scheduler_output: the step.
            block_size: tokens per KV block.
        """
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.draft_token_ids
        if len(scheduled) == 1:
            return cls._of_one(batch, *next(iter(scheduled.items())), drafts, block_size)
        request_ids = list(scheduled)
        slots = np.fromiter((batch.slots[request_id] for request_id in scheduled), dtype=np.int64)
        num_scheduled = np.fromiter(scheduled.values(), dtype=np.int64)
        num_computed, num_tokens = batch.num_computed_tokens[slots], batch.num_tokens[slots]
        query_start_loc = np.zeros(len(slots) + 1, dtype=np.int64)
        num_scheduled.cumsum(out=query_start_loc[1:])
        if query_start_loc[-1] == len(slots):
            token_slots, positions = slots, num_computed
        else:
            places = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], num_scheduled)
            token_slots, positions = np.repeat(slots, num_scheduled), np.repeat(num_computed, num_scheduled) + places
        seq_lens = num_computed + num_scheduled
        block_indices, places_in_block = positions // block_size, positions % block_size
        is_on_device = positions >= batch.num_known_tokens[token_slots]
        if drafts:
            is_on_device &= positions < batch.num_tokens[token_slots]
        num_beyond = seq_lens - num_tokens
        if batch.pools:
            num_beyond[np.isin(slots, list(batch.pools))] = -1  # they are not sampled
        return cls(
            request_ids=request_ids,
            slots=slots,
            num_scheduled=num_scheduled,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            token_ids=batch.token_ids[token_slots, positions],
            token_slots=token_slots,
            positions=positions,
            slot_mappings=[
                table[token_slots, block_indices] * block_size + places_in_block for table in batch.block_tables
            ],
            is_on_device=is_on_device,
            sampled=_sampled_rows(request_ids, slots, query_start_loc, num_beyond, drafts),
            embedded=_embedded(batch, slots, num_computed, query_start_loc) if batch.prompt_parts else None,
        )

    @classmethod
    def _of_one(
        cls, batch: InputBatch, request_id: str, number: int, drafts: Mapping[str, Sequence[int]], block_size: int
    ) -> "StepInputs":
        """The same of a step with a single request: a small model's steps are hardly longer than what `of` takes."""
        slot = batch.slots[request_id]
        start, num_tokens = int(batch.num_computed_tokens[slot]), int(batch.num_tokens[slot])
        end = start + number
        positions, slots = np.arange(start, end), np.full(number, slot)
        block_indices, places_in_block = np.divmod(positions, block_size)
        is_on_device = positions >= batch.num_known_tokens[slot]
        if drafts:
            is_on_device &= positions < num_tokens
        num_rows = 0 if slot in batch.pools else min(max(end - num_tokens + 1, 0), number if drafts else 1)
        offsets = np.arange(num_rows)
        query_start_loc = np.array([0, number])
        return cls(
            request_ids=[request_id],
            slots=slots[:1],
            num_scheduled=np.array([number]),
            query_start_loc=query_start_loc,
            seq_lens=np.array([end]),
            token_ids=batch.token_ids[slot, start:end].copy(),
            token_slots=slots,
            positions=positions,
            slot_mappings=[table[slot, block_indices] * block_size + places_in_block for table in batch.block_tables],
            is_on_device=is_on_device,
            sampled=SampledRows(
                request_ids=[request_id] if num_rows else [],
                token_rows=offsets + (number - num_rows),
                slots=slots[:num_rows],
                offsets=offsets,
                drafts=drafts,
            ),
            embedded=_embedded(batch, slots[:1], positions[:1], query_start_loc) if batch.prompt_parts else None,
        )


def _embedded(
    batch: InputBatch, slots: Int64Array, num_computed: Int64Array, query_start_loc: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.float32]] | None:
    """The rows of prompt parts in a step; see `StepInputs`.

    Args:
        batch: some of its requests have parts.
        slots: [S]
        num_computed: [S], the first position that the step computes of each.
        query_start_loc: [S + 1]
    """
    rows, hidden = [], []
    firsts = zip(slots.tolist(), num_computed.tolist(), query_start_loc.tolist(), np.diff(query_start_loc).tolist(),
                 strict=False)  # fmt: skip
    for slot, start, row, number in firsts:
        parts, end = batch.prompt_parts.get(slot), start + number
        if parts is None or start >= parts[-1].end:
            continue
        for part in parts:
            first, last = max(part.start, start), min(part.end, end)
            if first < last:
                rows.append(np.arange(first, last) + (row - start))
                tensor = np.frombuffer(part.tensor, dtype=np.float32).reshape(part.length, -1)
                hidden.append(tensor[first - part.start : last - part.start])
    return (np.concatenate(rows), np.concatenate(hidden)) if rows else None


def _sampled_rows(
    request_ids: list[str],
    slots: Int64Array,
    query_start_loc: Int64Array,
    num_beyond: Int64Array,
    drafts: Mapping[str, Sequence[int]],
) -> SampledRows:
    """The rows of the requests that have all of their tokens computed after this step.

    Args:
        request_ids: S.
        slots: [S]
        query_start_loc: [S + 1]
        num_beyond: [S], computed tokens after this step minus the request's tokens: the number of drafts, or less than
            0 if a part of the prompt is left.
        drafts: by request.
    """
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
