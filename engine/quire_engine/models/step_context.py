"""StepContext: what the layers of a model know about a step besides hidden states, and the one place that builds it.

::

    InputBatch ─► StepRows ─┬─► ContextBuilder.upload ─► StepContext      eager, drafting, transformers' models
      (host)      (host)    ├─► tensors that do not move ─► build         recorded
                            └─► one array, one copy      ─► build         CUDA graphs

Some models need more of each row than its token and position: an adapter's number, positions of several dimensions.
They declare a `RowColumn` for it, which every forward then computes, uploads, pads and hands to the layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import AttentionPlan, StateRows, plan_attention
from quire_kernels.kv_cache import is_tiled

from quire_engine.device.transfer import upload
from quire_engine.kv_cache import AttentionSpec, StateSpec

Int64Array = npt.NDArray[np.int64]
KVCaches = list[tuple[torch.Tensor, ...]]
"""By layer of a stage, the tensors of its `StateSpec`, [N, …] each."""

TABLE_STEP = 16
"""A block table's width is a multiple of this on a GPU: kernels would be recompiled for rows with another alignment."""


class StateArrays(NamedTuple):
    """Which states the sequences of a step begin with, and where those after it are stored, on the host; the fields of
    `quire_kernels.StateRows`."""

    sources: Int64Array
    num_replayed: Int64Array
    targets: Int64Array
    store_start_loc: Int64Array
    store_lens: Int64Array
    store_blocks: Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class BidirectionalArrays:
    """P rows of a step in S' parts of prompts that are bidirectional, on the host; of each part, the last ones."""

    rows: Int64Array
    """[P], indices into the step's rows."""
    slots: Int64Array
    """[S'], of the parts' requests."""
    query_start_loc: Int64Array
    """[S' + 1], cumulative number of rows."""
    seq_lens: Int64Array
    """[S'], the position after each part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """T consecutive positions of S requests, at least one of each, on the host."""

    slots: Int64Array
    """[S], the requests' slots in the batch."""
    query_start_loc: Int64Array
    """[S + 1], cumulative number of rows."""
    seq_lens: Int64Array
    """[S], the position after the last row of each request."""
    token_ids: Int64Array
    """[T], the input of each row."""
    token_slots: Int64Array
    """[T], the slot of each row's request."""
    positions: Int64Array
    """[T]"""
    slot_mappings: list[Int64Array]
    """[T] of each group of layers, the cache slot of each row."""
    states: StateArrays | None = None
    """States of layers that keep them; None: no layer does."""
    bidirectional: BidirectionalArrays | None = None
    """Rows that see others after them; None: there are none."""

    def split(self, most: int) -> Iterator[tuple[slice, "StepRows"]]:
        """Divide rows without states among steps of at most `most` rows, with all rows of a request in one of them; no
        request has more. Yields which rows each step has, and the step."""
        starts, first = self.query_start_loc, 0
        while first < len(self.slots):
            end = int(np.searchsorted(starts, starts[first] + most, side="right")) - 1
            rows = slice(int(starts[first]), int(starts[end]))
            step = StepRows(
                slots=self.slots[first:end],
                query_start_loc=starts[first : end + 1] - starts[first],
                seq_lens=self.seq_lens[first:end],
                token_ids=self.token_ids[rows],
                token_slots=self.token_slots[rows],
                positions=self.positions[rows],
                slot_mappings=[own[rows] for own in self.slot_mappings],
            )
            yield rows, step
            first = end


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A value, or several, that the layers need of each row of a step.

    Attributes:
        name: in `StepContext.columns`.
        values: `StepRows` → [T] or, with several values per row, [width, T]. It is called once in each forward and
            must depend on a row's request and position alone. That of a column that a model declares also takes the
            `InputBatch` of the rows, as `batch`.
        dtype: int64 or float32.
        width: how many values each row has.
        fill: what rows of padding have.
        is_optional: a step has no such column if all its rows would have `fill`. (A recorded step always has it.)
    """

    name: str
    values: Callable[..., npt.NDArray[Any]]
    dtype: type[np.int64] | type[np.float32] = np.int64
    width: int = 1
    fill: int = 0
    is_optional: bool = False

    def is_needed(self, values: npt.NDArray[Any]) -> bool:
        """Whether a step with these values has the column."""
        return not self.is_optional or bool((values != self.fill).any())


def _adapter_slots(rows: StepRows, batch: Any) -> Int64Array:
    slots: Int64Array = batch.adapter_slots[rows.token_slots]
    return slots


ADAPTER = RowColumn("adapter", _adapter_slots, fill=-1, is_optional=True)
"""[T], the slot of each row's LoRA adapter in the layers' tables; -1: none."""


@dataclass(frozen=True, slots=True)
class BidirectionalRows:
    """Rows whose attention is computed again, as that of sequences of their own in which each row sees all; int64."""

    rows: torch.Tensor
    """[P], indices into the step's rows."""
    block_table: torch.Tensor
    """[S', M]"""
    query_start_loc: torch.Tensor
    """[S' + 1]"""
    seq_lens: torch.Tensor
    """[S']"""
    plans: Mapping[AttentionSpec, AttentionPlan]
    """As those of `StepContext`."""


def _grid_positions(rows: StepRows, batch: Any) -> Int64Array:
    positions: Int64Array = rows.positions + batch.position_shifts[rows.token_slots]
    found = np.tile(positions, (3, 1))
    if not batch.prompt_parts:
        return found
    starts = rows.query_start_loc.tolist()
    for slot, row, end in zip(rows.slots.tolist(), starts[:-1], starts[1:], strict=True):
        parts = batch.prompt_parts.get(slot)
        if parts is None or rows.positions[row] >= parts[-1].end:
            continue
        place = np.arange(rows.positions[row], rows.positions[row] + end - row)
        own = np.tile(place, (3, 1))
        for part in parts:
            if part.grid:
                offsets = place - part.start
                is_inside = (offsets >= 0) & (offsets < part.length)
                inside = offsets[is_inside]
                frames, *others = np.unravel_index(inside, part.grid)
                own[:, is_inside] += np.stack(((frames * part.frame_interval).astype(np.int64), *others)) - inside
                own[:, offsets >= part.length] += part.position_shift
        found[:, row:end] = own
    return found


GRID_POSITIONS = RowColumn("grid_positions", _grid_positions, width=3)
"""[3, T], the frame, row and column of each row in M-RoPE (https://arxiv.org/abs/2409.12191, section 2.1). Those of
text are one number, which goes on after the largest of an image or a video."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What the layers need about a step's rows besides hidden states. int64; legend in `quire_kernels`.

    With several groups of layers (`kv_cache/groups.py`) each has a context of its own: `for_layer`.
    """

    positions: torch.Tensor
    """[T], each row's position in its sequence."""
    slot_mapping: torch.Tensor
    """[T], cache slot for its key and value."""
    block_table: torch.Tensor
    """[S, M], block ids in order."""
    query_start_loc: torch.Tensor
    """[S + 1], cumulative number of rows."""
    seq_lens: torch.Tensor
    """[S], context and scheduled tokens together."""
    block_size: int
    """Tokens per block."""
    plans: Mapping[AttentionSpec, AttentionPlan]
    """How the attention of each kind of layer is divided among threads; a layer makes its own plan if its kind is
    missing."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The model's `RowColumn`s by name, [T] or [width, T]."""
    cos_sin: torch.Tensor | None = None
    """[T, R], the angles of each row, in steps in which dimensions of a row's position differ (`GRID_POSITIONS`)."""
    states: StateRows | None = None
    """For layers that keep states."""
    bidirectional: BidirectionalRows | None = None
    """Rows that see others after them."""
    groups: Sequence["StepContext"] = ()
    """The context of each group, of which the first has the same tensors as this one; empty if this is the context of
    all layers."""
    group_ids: Sequence[int] = ()
    """By layer of the stage, its group; empty if there is one."""

    def for_layer(self, index: int) -> "StepContext":
        """The context of a layer, by its index in the stage."""
        return self.groups[self.group_ids[index]] if self.groups else self

    def with_cos_sin(self, cos_sin: torch.Tensor) -> "StepContext":
        """The same with the angles of each row."""
        groups = [replace(group, cos_sin=cos_sin) for group in self.groups]
        return replace(self, cos_sin=cos_sin, groups=groups)


class ContextBuilder:
    """Builds the contexts of a stage's layers.

    Args:
        specs: by layer.
        kv_caches: by layer; their tensors must not move.
        block_tables: [slots, M] of each group of layers, on the host. A stage may have no layer of some groups.
        block_size: tokens per block.
        group_ids: by layer, its group; not needed if there is only one.
        columns: what the model needs of each row besides.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        kv_caches: KVCaches,
        block_tables: Sequence[Int64Array],
        block_size: int,
        group_ids: Sequence[int] = (),
        columns: Sequence[RowColumn] = (),
    ) -> None:
        self.key_caches: list[dict[AttentionSpec, torch.Tensor]] = [{} for _ in block_tables]
        """By group, for each kind of attention in it, the key cache of one such layer."""
        for spec, caches, group in zip(specs, kv_caches, group_ids or [0] * len(specs), strict=True):
            if isinstance(spec, AttentionSpec):
                self.key_caches[group][spec] = caches[0]
        self.block_tables, self.block_size, self.columns = block_tables, block_size, columns
        self.device = next(cache for caches in kv_caches for cache in caches).device
        self._group_ids = group_ids

    @property
    def are_tiled(self) -> bool:
        """Whether the C++ kernels compute the attention of all layers."""
        return all(is_tiled(cache) for key_caches in self.key_caches for cache in key_caches.values())

    def build(
        self,
        slot_mappings: Sequence[torch.Tensor],
        block_tables: Sequence[torch.Tensor],
        plans: Sequence[Mapping[AttentionSpec, AttentionPlan]],
        columns: Sequence[torch.Tensor | None],
        *,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        states: Sequence[torch.Tensor] = (),
        bidirectional: Sequence[BidirectionalRows | None] = (),
    ) -> StepContext:
        """The context of all layers. Sequences are by group; columns are in the order in which the model declares
        them, None for what the step leaves out, and states in that of `StateArrays`."""
        state_rows: StateRows | None = None
        if states:
            named_states = dict(zip(StateArrays._fields, states, strict=True))
            state_rows = StateRows(positions=positions, query_start_loc=query_start_loc, **named_states)
        pairs = zip(self.columns, columns, strict=True)
        named = {column.name: tensor for column, tensor in pairs if tensor is not None}
        contexts = [
            StepContext(
                positions=positions,
                slot_mapping=slot_mapping,
                block_table=table,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_size=self.block_size,
                plans=own_plans,
                columns=named,
                states=state_rows,
                bidirectional=own_rows,
            )
            for slot_mapping, table, own_plans, own_rows in zip(
                slot_mappings, block_tables, plans, bidirectional or [None] * len(plans), strict=True
            )
        ]
        return contexts[0] if len(contexts) == 1 else replace(contexts[0], groups=contexts, group_ids=self._group_ids)

    def upload(self, rows: StepRows, *others: npt.NDArray[Any]) -> tuple[StepContext, list[torch.Tensor]]:
        """Upload what the layers need to know of a step, and plan its attention; on a GPU with one copy. `others` are
        uploaded with it.

        Returns:
            The context, and the others on the device.
        """
        values = [column.values(rows) for column in self.columns]
        has = [column.is_needed(own) for column, own in zip(self.columns, values, strict=True)]
        num_groups, num_columns = len(self.block_tables), sum(has)
        states = () if rows.states is None else rows.states
        width = -(-int(rows.seq_lens.max()) // self.block_size)
        if self.device.type != "cpu":
            width = -(-width // TABLE_STEP) * TABLE_STEP
        both = rows.bidirectional
        if both is not None:
            own = (table[both.slots, :width] for table in self.block_tables)
            others = (*others, both.rows, both.query_start_loc, both.seq_lens, *own)
        positions_T, starts, lens, *there = upload(
            self.device, rows.positions, rows.query_start_loc, rows.seq_lens, *rows.slot_mappings,
            *(table[rows.slots, :width] for table in self.block_tables),
            *compress(values, has), *states, *others,
        )  # fmt: skip
        tables, there = there[num_groups : 2 * num_groups], there[:num_groups] + there[2 * num_groups :]
        columns = iter(there[num_groups : num_groups + num_columns])
        bidirectional: list[BidirectionalRows | None] = []
        if both is not None:
            there, (rows_P, own_starts, own_lens, *own_tables) = there[: -3 - num_groups], there[-3 - num_groups :]
            own_plans = self.plan(
                own_tables, torch.from_numpy(both.query_start_loc), torch.from_numpy(both.seq_lens),
                is_bidirectional=True,
            )  # fmt: skip
            bidirectional += (
                BidirectionalRows(rows_P, table, own_starts, own_lens, plans)
                for table, plans in zip(own_tables, own_plans, strict=True)
            )
        # Plans are made from the host's copies: reading from a GPU would wait for it.
        context = self.build(
            there[:num_groups], tables,
            self.plan(tables, torch.from_numpy(rows.query_start_loc), torch.from_numpy(rows.seq_lens)),
            [next(columns) if one else None for one in has], positions=positions_T, query_start_loc=starts,
            seq_lens=lens, states=there[num_groups + num_columns : num_groups + num_columns + len(states)],
            bidirectional=bidirectional,
        )  # fmt: skip
        return context, there[num_groups + num_columns + len(states) :]

    def plan(
        self,
        block_tables: Sequence[torch.Tensor],
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        is_bidirectional: bool = False,
    ) -> list[dict[AttentionSpec, AttentionPlan]]:
        """By group, a plan for each kind of layer. Layers of one kind share a plan. Block tables, [S, M] of each group,
        are on the device; query_start_loc and seq_lens are on the host. Bidirectional: whatever the layers' kind."""
        return [
            {
                spec: plan
                for spec, key_cache in key_caches.items()
                if (
                    plan := plan_attention(
                        table,
                        query_start_loc,
                        seq_lens,
                        spec.num_heads,
                        key_cache,
                        spec.signed_window,
                        spec.is_causal and not is_bidirectional,
                    )
                )
                is not None
            }
            for key_caches, table in zip(self.key_caches, block_tables, strict=True)
        ]
