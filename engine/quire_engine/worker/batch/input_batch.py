"""InputBatch: a worker's state of each request, in arrays with one slot per request.

A request keeps its slot for as long as the worker knows it; a step gathers the slots it needs. So nothing ever moves
between slots, and `add` sets every field of the slot, so that nothing of its last request is left.

::

    slot │ token_ids (prompt, then output)        │ num_tokens │ block_table        │ temperature …
    ─────┼────────────────────────────────────────┼────────────┼────────────────────┼──────────────
      0  │ 17 4 901 33 · · · · · · · · · · · · · ·│     4      │ 12 · · · · · · · · │ 0.0
      1  │ (free)                                 │            │                    │
      2  │ 5 5 8 812 77 301 4 4 4 19 ? · · · · · ·│    11      │ 3 40 7 · · · · · · │ 0.8
      3  │ 66 2 9 9 31 (31 4) · · · · · · · · · · ·│     5      │ 1 · · · · · · · ·  │ 0.0

The last token of a request may be sampled but still be on the device (`?`): it counts in `num_tokens`, but not in
`num_known_tokens`. Drafts are stored after the other tokens for one step, and do not count.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.messages import NewRequestData, PromptPart
from quire_engine.models.step_context import TABLE_STEP, RowColumn, StateArrays
from quire_engine.sampling.penalties import PenaltyState
from quire_engine.sampling.token_constraints import TokenConstraintState
from quire_engine.tasks.pooler import Pool, make_pool

Int64Array = npt.NDArray[np.int64]

NO_LOGPROBS = -1
NO_SEGMENT = 2**31
NO_STATE = -1
"""In a block table of states: none is kept after that block; and for a request: it begins with none."""


class InputBatch:
    """The persistent batch. All arrays are indexed by slot first."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        columns: Sequence[RowColumn] = (),
        has_states: bool = False,
    ) -> None:
        max_blocks = -(-max_model_len // (block_size * TABLE_STEP)) * TABLE_STEP
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.lock = threading.Lock()
        """Another thread may wait for a step's result and write it to the batch."""
        self.columns = [replace(column, values=partial(column.values, batch=self)) for column in columns]
        """What the model needs of each row besides."""
        self.slots: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_known_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.generation = np.zeros(max_num_seqs, dtype=np.int64)
        """How many requests the slot has had: a late result may belong to an earlier one."""
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = [np.zeros((max_num_seqs, max_blocks), dtype=np.int64) for _ in range(num_groups)]
        """One for each group of layers (`kv_cache/groups.py`)."""
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        """The same in each group."""
        self.has_states = has_states
        """Whether the last group of layers keeps states."""
        self.num_state_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """After how many tokens the state is that the next step goes on from."""
        self.state_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        """The block that it is in, or `NO_STATE`."""
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.stop_token_ids: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)
        self.penalties = PenaltyState(max_num_seqs, vocab_size, max_model_len + 1)
        self.token_constraints = TokenConstraintState(max_num_seqs, vocab_size)
        self.adapter_slots = np.full(max_num_seqs, -1, dtype=np.int64)
        """Slots of LoRA adapters in the layers' tables; -1: none."""
        self.prompt_parts: dict[int, list[PromptPart]] = {}
        """By slot, of the requests that have any."""
        self.position_shifts = np.zeros(max_num_seqs, dtype=np.int64)
        """What is added to the rotary positions of rows after all parts, where these have three dimensions."""
        self.pools: dict[int, Pool] = {}
        """By slot, of the requests that are pooled."""
        self.segment_starts = np.zeros(max_num_seqs, dtype=np.int64)
        """By slot, the position of the second text of a pair; 2^31 without a pair. Only of requests that are pooled."""

    def add(self, request: NewRequestData) -> None:
        """Take a free slot and set every field of it; those of sampling unless the request is pooled."""
        slot = self._free_slots.pop()
        self.slots[request.request_id] = slot
        num_tokens = len(request.token_ids)
        self.token_ids[slot, :num_tokens] = request.token_ids
        self.num_tokens[slot] = self.num_known_tokens[slot] = num_tokens
        self.generation[slot] += 1
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        for table in self.block_tables:
            table[slot] = 0  # entries past the request's blocks are read, but not used: they must be valid ids
        self.num_blocks[slot] = 0
        self.append_blocks(slot, request.block_ids)
        self.num_state_tokens[slot] = num_computed = request.num_computed_tokens
        last = max(num_computed - 1, 0) // self.block_size
        self.state_blocks[slot] = self.block_tables[-1][slot, last] if num_computed else NO_STATE
        self.adapter_slots[slot] = request.adapter_slot
        self.position_shifts[slot] = sum(part.position_shift for part in request.prompt_parts)
        if request.prompt_parts:
            self.prompt_parts[slot] = request.prompt_parts
        self.num_prompt_logprobs[slot] = NO_LOGPROBS
        if request.pooling_params is None:
            self._set_sampling(slot, request)
            return
        self.pools[slot] = make_pool(request.pooling_params)
        start = request.pooling_params.segment_start
        self.segment_starts[slot] = NO_SEGMENT if start is None else start

    def _set_sampling(self, slot: int, request: NewRequestData) -> None:
        params, num_tokens = request.sampling_params, len(request.token_ids)
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed or 0
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.stop_token_ids[slot] = request.stop_token_ids
        # A request that is added again with output has already returned the log-probabilities of its prompt.
        if params.prompt_logprobs is not None and num_tokens == request.num_prompt_tokens:
            self.num_prompt_logprobs[slot] = params.prompt_logprobs
        token_ids, num_prompt_tokens = request.token_ids, request.num_prompt_tokens
        if request.prompt_parts:
            token_ids = token_ids.copy()
            for part in reversed(request.prompt_parts):
                del token_ids[part.start : part.end]  # placeholders count for no penalty
            num_prompt_tokens -= num_tokens - len(token_ids)
        self.penalties.add(slot, params, token_ids, num_prompt_tokens)
        self.token_constraints.add(slot, params)

    def remove(self, request_id: str) -> None:
        """Free a request's slot, if it has one: a step may have failed before it added the request."""
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            self.prompt_parts.pop(slot, None)
            self.pools.pop(slot, None)

    def lay_out(self, slots: Int64Array, starts: Int64Array, ends: Int64Array, token_offset: int = 0) -> dict[str, Any]:
        """The fields of `StepRows` for positions from `starts`, [S], up to `ends`, [S], of slots, [S], without a Python
        loop over the rows. The input at position p is token p + `token_offset`."""
        if len(slots) == 1:
            return self.lay_out_one(int(slots[0]), int(starts[0]), int(ends[0]), token_offset)
        query_start_loc = np.zeros(len(slots) + 1, dtype=np.int64)
        lens = ends - starts
        lens.cumsum(out=query_start_loc[1:])
        if query_start_loc[-1] == len(slots):
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, lens)
            positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], lens)
        blocks, places = np.divmod(positions, self.block_size)
        return {
            "slots": slots,
            "query_start_loc": query_start_loc,
            "seq_lens": ends,
            "token_ids": self.token_ids[token_slots, positions + token_offset if token_offset else positions],
            "token_slots": token_slots,
            "positions": positions,
            "slot_mappings": [table[token_slots, blocks] * self.block_size + places for table in self.block_tables],
        }

    def lay_out_one(self, slot: int, start: int, end: int, token_offset: int = 0) -> dict[str, Any]:
        """The same for one request, in less time: a small model's step takes hardly longer than `lay_out`."""
        positions, token_slots = np.arange(start, end), np.full(end - start, slot)
        blocks, places = np.divmod(positions, self.block_size)
        return {
            "slots": token_slots[:1],
            "query_start_loc": np.array([0, end - start]),
            "seq_lens": np.array([end]),
            "token_ids": self.token_ids[slot, start + token_offset : end + token_offset].copy(),
            "token_slots": token_slots,
            "positions": positions,
            "slot_mappings": [table[slot, blocks] * self.block_size + places for table in self.block_tables],
        }

    def state_rows(
        self, slots: Int64Array, starts: Int64Array, ends: Int64Array, num_drafts: Int64Array
    ) -> StateArrays:
        """Lay out the states of a step, and count on them from the next one on. All arrays are [S].

        Of each request a state is stored after its last token that is no draft, in the block of the step's last token;
        and after each full block that has a place for it::

            positions         │ 0  1  2  3 │ 4  5  6  7 │ 8  …        in blocks of 4; the state after 2 is in block 0
            this step                   a  │ x  x  x  d │ d           3 was a draft and is accepted; 7 and 8 are drafts
            stored                      ▲          ▲                  after 3 in block 0; after 6 in that of token 8

        Args:
            slots: of the requests.
            starts: the position of each one's first row.
            ends: the position after its last row.
            num_drafts: how many of its rows are drafts.
        """
        table, size = self.block_tables[-1], self.block_size
        bases, sources = self.num_state_tokens[slots], self.state_blocks[slots]
        knowns, targets = ends - num_drafts, table[slots, (ends - 1) // size]
        start_loc, lens, blocks = np.arange(len(slots) + 1), knowns - bases, targets
        full = np.flatnonzero(knowns // size > bases // size)
        if len(full):
            stores = [[one] for one in zip(lens.tolist(), blocks.tolist(), strict=True)]
            for i in full.tolist():
                first, end = int(bases[i]) // size, int(knowns[i]) // size
                own = enumerate(table[slots[i], first:end].tolist(), first + 1)
                kept = [(index * size - int(bases[i]), block) for index, block in own if block != NO_STATE]
                stores[i] = kept if kept and kept[-1] == stores[i][0] else [*kept, *stores[i]]
            start_loc[1:] = np.cumsum([len(own) for own in stores])
            lens, blocks = np.array(list(chain.from_iterable(stores)), dtype=np.int64).T.copy()
        self.num_state_tokens[slots], self.state_blocks[slots] = knowns, targets
        return StateArrays(
            sources=sources, num_replayed=starts - bases, targets=targets, store_start_loc=start_loc, store_lens=lens,
            store_blocks=blocks,
        )  # fmt: skip

    def place_drafts(self, request_id: str, token_ids: list[int]) -> None:
        """Store drafts after a request's tokens, for a step that computes them, too."""
        slot = self.slots[request_id]
        end = self.num_tokens[slot]
        self.token_ids[slot, end : end + len(token_ids)] = token_ids

    def expect_tokens(self, slots: Int64Array) -> None:
        """Count one more token in each slot: it is sampled, and `settle_tokens` will give its id."""
        self.num_tokens[slots] += 1

    def settle_tokens(self, slots: Int64Array, positions: Int64Array, token_ids: Int64Array) -> None:
        """Store the token that was sampled for a position of each slot; counts it, if it was not expected."""
        self.token_ids[slots, positions] = token_ids
        self._count_up_to(slots, positions + 1)
        self.penalties.append(slots, token_ids)

    def settle_lists(self, slots: Int64Array, positions: Int64Array, token_ids: Sequence[Sequence[int]]) -> None:
        """Store the tokens that were sampled for each slot, any number of them, from a position on."""
        if len(slots) == 1:
            start, count = int(positions[0]), len(token_ids[0])
            self.token_ids[slots[0], start : start + count] = token_ids[0]
            if count:
                self._count_up_to(slots, positions + count)
            if self.penalties.is_used[slots[0]]:
                for token_id in token_ids[0]:
                    self.penalties.append(slots, np.array([token_id]))
            return
        counts = np.fromiter(map(len, token_ids), dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(token_ids), dtype=np.int64)
        places = np.arange(len(flat)) - np.repeat(counts.cumsum() - counts, counts)  # within each list
        flat_slots = np.repeat(slots, counts)
        self.token_ids[flat_slots, np.repeat(positions, counts) + places] = flat
        is_new = counts > 0
        self._count_up_to(slots[is_new], (positions + counts)[is_new])
        if self.penalties.is_used[slots].any():
            for place in range(counts.max(initial=0)):
                self.penalties.append(flat_slots[places == place], flat[places == place])

    def _count_up_to(self, slots: Int64Array, ends: Int64Array) -> None:
        self.num_known_tokens[slots] = ends
        self.num_tokens[slots] = np.maximum(self.num_tokens[slots], ends)

    def num_output_tokens(self, request_id: str) -> int | None:
        """The number of known tokens sampled for a request so far; None if the request is unknown."""
        slot = self.slots.get(request_id)
        return None if slot is None else int(self.num_known_tokens[slot] - self.num_prompt_tokens[slot])

    def are_plain(self, slots: Int64Array) -> bool:
        """Whether all these use only temperature, min-p, top-k and top-p, and return no log-probabilities."""
        num_output_tokens = self.num_tokens[slots] - self.num_prompt_tokens[slots]
        special = self.penalties.is_used[slots] | self.token_constraints.is_used[slots]
        special |= (self.num_logprobs[slots] != NO_LOGPROBS) | (num_output_tokens < self.min_tokens[slots])
        return not special.any()

    def drafts(self, slots: Int64Array, offsets: Int64Array) -> dict[int, Int64Array]:
        """By row, the first `offsets[row]` drafts of its slot; rows without drafts are left out."""
        rows, ends = np.flatnonzero(offsets), self.num_tokens[slots]
        return {row: self.token_ids[slots[row], ends[row] : ends[row] + offsets[row]].copy() for row in rows.tolist()}

    def output_tail(self, slot: int, num_tokens: int, num_drafts: int = 0) -> list[int]:
        """The last `num_tokens` of the output tokens and the first drafts after them, or all if there are fewer."""
        end = self.num_tokens[slot] + num_drafts
        tail: list[int] = self.token_ids[slot, max(end - num_tokens, self.num_prompt_tokens[slot]) : end].tolist()
        return tail

    @property
    def block_table(self) -> Int64Array:
        """[slots, M], of the first group."""
        return self.block_tables[0]

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Extend the block tables; the ids are of each group in turn."""
        start, num_groups = self.num_blocks[slot], len(self.block_tables)
        end = start + len(block_ids) // num_groups
        for group, table in enumerate(self.block_tables):
            table[slot, start:end] = block_ids[group::num_groups]
        self.num_blocks[slot] = end
