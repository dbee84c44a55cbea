"""DecodeGraphs: steps that only decode, captured once for some numbers of rows and then replayed.

A CUDA graph (https://developer.nvidia.com/blog/cuda-graphs/) is a list of kernels with their arguments, launched all at
once. It reads its inputs from the addresses that they had when it was captured, so a step is:

::

    1. round up the number of rows to a captured size: 5 ─► 8
    2. lay the inputs out on the host     │ token_ids │ from_device │ slots │ positions │ … │   one array, one copy
       and the batch's new blocks, for the block table that is kept on the device, by slot
    3. copy, replay the forward graph     token = from_device ? last_token_ids[slot] : token_ids  ─► hidden
    4. replay the sampling graph          hidden ─► logits ─► token ids ─► last_token_ids[slot]
       or, for rows with penalties, a grammar and the like, compute logits and sample op by op

A row is the last token of a request, or a draft after it. To the attention each is a sequence of its own, with the
request's blocks, that ends there: keys and values of all rows are stored before any of them is read. So rows with
drafts need no other kernel than rows without, and have the same bits. ::

    request a, 40 tokens and two drafts     rows  39  40  41     of lengths  40  41  42
    request b, 7 tokens                            6                          7

Rows of padding are requests of one token; their keys, values and states go to scratch blocks, and their token goes to a
scratch slot. The graphs share their memory, as no two of them run at the same time.

Where the model has optional columns, which are the adapters of rows, there are two forward graphs of each size: a step
that has none of them pays nothing for those that have.

A layer that keeps a state computes the rows of a request one after the other. So where there is one, each row is
another request, without drafts, and stores one state. A request whose accepted drafts fill a block stores two, and its
step is computed without a graph.
"""

import functools
import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import sample
from quire_kernels.attention_plan import GpuAttentionPlan
from tqdm import tqdm

from quire_engine.device.transfer import upload
from quire_engine.kv_cache import STATE, AttentionSpec
from quire_engine.messages import SchedulerOutput
from quire_engine.models.base import RecordableLM
from quire_engine.models.step_context import ContextBuilder, KVCaches, RowColumn
from quire_engine.worker.batch.input_batch import NO_STATE, InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]
GRAPH_MEMORY_BYTES = 1 << 30
"""Memory of all graphs, a part of `gpu_memory_utilization`. Batch sizes whose graph does not fit are left out."""
COLUMN_STEP = 16
"""Columns begin at multiples of 128 bytes."""
Function: TypeAlias = Callable[[], None]
Capture: TypeAlias = Callable[[Function], Function]
"""Takes a function that launches kernels, and returns one that launches the same kernels on the same memory again."""


@dataclass(frozen=True, slots=True)
class _Graph:
    forward: Function
    sample: Function | None
    without_optional: Function | None = None
    """The forward without the optional columns; None: there are none."""


class DeviceBlockTable:
    """A copy of the batch's block tables of a group of layers on the device, by slot. A step uploads only new
    entries."""

    def __init__(self, batch: InputBatch, device: torch.device, group: int = 0) -> None:
        self._batch, self._table = batch, batch.block_tables[group]
        self.by_slot = torch.zeros(batch.max_num_seqs + 1, self._table.shape[1], dtype=torch.int64, device=device)
        """[max_num_seqs + 1, M]; the last row is for rows of padding."""
        self._num_uploaded = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._generation = np.full(batch.max_num_seqs, -1, dtype=np.int64)

    def update(self, slots: Int64Array) -> None:
        """Upload the blocks that these slots' requests got since their last update."""
        batch = self._batch
        is_new = self._generation[slots] != batch.generation[slots]
        self._num_uploaded[slots[is_new]] = 0
        self._generation[slots] = batch.generation[slots]
        num_uploaded, num_blocks = self._num_uploaded[slots], batch.num_blocks[slots]
        num_new = num_blocks - num_uploaded
        if not num_new.any():
            return
        self._num_uploaded[slots] = num_blocks
        rows = np.repeat(slots, num_new)
        columns = np.arange(len(rows)) + np.repeat(num_uploaded - (np.cumsum(num_new) - num_new), num_new)
        flat = self.by_slot.view(-1)
        places, block_ids = upload(flat.device, rows * self.by_slot.shape[1] + columns, self._table[rows, columns])
        flat.index_copy_(0, places, block_ids)


class DecodeGraphs:
    """A `Forward` that takes steps which sample after each of their tokens, and can sample them, too.

    Args:
        model: all of its layers; the graphs contain the communication of its ranks, too.
        kv_caches: see its `forward`; the last block of each kind is the scratch block.
        batch: the steps' slots refer to it.
        last_token_ids: [max_num_seqs + 1] int64 on the device, by slot: sampled tokens are written to it and read back.
        max_model_len: the longest possible sequence.
        new_capture: makes a `Capture`; called again after all graphs were released.
        samples: whether to capture the sampling as well; tensor parallel ranks sample op by op.
        group_ids: by layer, its group; not needed if there is only one.
    """

    def __init__(
        self,
        model: RecordableLM,
        kv_caches: KVCaches,
        batch: InputBatch,
        last_token_ids: torch.Tensor,
        max_model_len: int,
        new_capture: Callable[[], Capture],
        samples: bool = True,
        group_ids: Sequence[int] = (),
    ) -> None:
        self._model, self._kv_caches, self._batch = model, kv_caches, batch
        self._last_token_ids = last_token_ids
        self._group_ids = group_ids
        self._max_model_len = max_model_len
        self._new_capture = new_capture
        self.samples = samples
        """Whether `sample` can be called."""
        self._graphs: dict[int, _Graph] = {}
        self._sizes: list[int] = []

    @property
    def max_size(self) -> int:
        """Rows of the largest captured step; 0 if there is none."""
        return self._sizes[-1] if self._sizes else 0

    @torch.inference_mode()
    def capture(self, sizes: list[int], used_bytes: Callable[[], int], budget_bytes: int) -> None:
        """Capture steps of these sizes: the largest first, as the others can then reuse its memory, and then from
        coarse to fine, so that if the memory does not suffice for all, steps are rounded up further.

        Args:
            sizes: in ascending order.
            used_bytes: how much memory is in use now.
            budget_bytes: upper bound on the graphs' memory. A size that exceeds it on any rank is left out on all of
                them: graphs compute rows of padding, and ranks must all-reduce the same number of rows.
        """
        before = used_bytes()
        self._graphs.clear()
        waiting, left_out = sizes[::-1], []
        is_hidden = not sys.stderr.isatty()
        with tqdm(total=len(sizes), desc="Capturing CUDA graphs", unit="graph", leave=False, disable=is_hidden) as bar:
            while waiting:
                size = waiting.pop(0)
                if not self._graphs:
                    self._capture = self._new_capture()
                    self._allocate(size)
                self._graphs[size] = self._capture_one(size)
                if not self._is_true_of_all_ranks(used_bytes() - before <= budget_bytes):
                    del self._graphs[size]
                    left_out.append(size)
                elif len(self._graphs) == 1:
                    waiting.sort(key=coarse_to_fine)
                bar.update()
        self._sizes = sorted(self._graphs)
        megabytes = (used_bytes() - before) / 2**20
        logger.info("CUDA graphs: %d, of up to %d rows, %.1f MiB", len(self._sizes), self.max_size, megabytes)
        if left_out:
            self._warn_of(sorted(left_out), budget_bytes)

    def _warn_of(self, left_out: list[int], budget_bytes: int) -> None:
        effects = []
        if any(size < self.max_size for size in left_out):
            effects.append("smaller steps compute more rows of padding")
        if left_out[-1] > self.max_size:
            effects.append(f"steps of more than {self.max_size} rows are computed without, which takes longer")
        logger.warning(
            "%d bytes have no room for the CUDA graphs of %s rows: %s",
            budget_bytes, ", ".join(map(str, left_out)), "; ".join(effects),
        )  # fmt: skip

    def _is_true_of_all_ranks(self, is_true_here: bool) -> bool:
        group = self._model.parallel.tensor_group
        if group is None:
            return is_true_here
        return not group.all_reduce(self._last_token_ids.new_tensor([not is_true_here])).item()

    def _allocate(self, max_size: int) -> None:
        """Allocate what the graphs read and write, for the largest size; the others use a part of it."""
        batch = self._batch
        self._contexts = ContextBuilder(
            self._model.state_specs,
            self._kv_caches,
            batch.block_tables,
            batch.block_size,
            self._group_ids,
            batch.columns,
        )
        scratch_blocks = {False: 0, True: 0}
        for spec, caches in zip(self._model.state_specs, self._kv_caches, strict=True):
            scratch_blocks[spec.window == STATE] = len(caches[0]) - 1
        self._declare_columns(scratch_blocks[False] * batch.block_size, scratch_blocks[True])
        device, stride = self._contexts.device, _round_up(max_size, COLUMN_STEP)
        self._inputs = torch.zeros(self._num_planes * stride, dtype=torch.int64, device=device)
        self._block_tables = [DeviceBlockTable(batch, device, group) for group in range(len(batch.block_tables))]
        self._hidden = torch.zeros(max_size, self._model.hidden_size, dtype=self._model.dtype, device=device)
        self._sampled = torch.zeros(max_size, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(max_size + 1, device=device)
        longest = (torch.arange(max_size + 1), torch.full((max_size,), self._max_model_len))
        plans = self._contexts.plan([table.by_slot for table in self._block_tables], *longest)
        self._plans: dict[AttentionSpec, GpuAttentionPlan] = {}
        for spec, plan in (item for own in plans for item in own.items()):
            assert isinstance(plan, GpuAttentionPlan), "only kernels in the Triton language find theirs on the device"
            self._plans[spec] = plan

    def _declare_columns(self, scratch_slot: int, scratch_state: int = 0) -> None:
        """What the graphs read of each row; rows of padding write their keys and values to the scratch slot, and their
        states to the scratch block of states."""
        batch = self._batch
        states = (
            RowColumn("state_sources", lambda inputs: inputs.states.sources, fill=NO_STATE),
            RowColumn("num_replayed", lambda inputs: inputs.states.num_replayed),
            RowColumn("state_targets", lambda inputs: inputs.states.targets, fill=scratch_state),
        )
        self._columns = (
            RowColumn("token_ids", lambda inputs: inputs.token_ids),
            RowColumn("from_device", lambda inputs: inputs.is_on_device),
            RowColumn("slots", lambda inputs: inputs.token_slots, fill=batch.max_num_seqs),
            RowColumn("positions", lambda inputs: inputs.positions),
            RowColumn("seq_lens", lambda inputs: inputs.positions + 1, fill=1),
            RowColumn(
                "slot_mapping", lambda inputs: inputs.slot_mappings, width=len(batch.block_tables), fill=scratch_slot
            ),
            RowColumn("top_k", lambda inputs: batch.top_k[inputs.token_slots], fill=1),
            RowColumn("seeds", lambda inputs: batch.seed[inputs.token_slots].view(np.int64)),
            RowColumn("temperature", lambda inputs: batch.temperature[inputs.token_slots], np.float32),
            RowColumn("top_p", lambda inputs: batch.top_p[inputs.token_slots], np.float32),
            RowColumn("min_p", lambda inputs: batch.min_p[inputs.token_slots], np.float32),
            *(states if batch.has_states else ()),
            *batch.columns,
        )
        self._num_planes = sum(column.width for column in self._columns)

    def _capture_one(self, size: int) -> _Graph:
        column = self._views(size)
        plans = {
            spec: replace(plan, partials=plan.partials[:size], partial_lse=plan.partial_lse[:size])
            for spec, plan in self._plans.items()
        }

        def forward(has_optional: bool) -> None:
            slots = column["slots"]
            states: tuple[torch.Tensor, ...] = ()
            if self._batch.has_states:
                num_replayed, targets = column["num_replayed"], column["state_targets"]
                starts = self._query_start_loc[: size + 1]
                states = column["state_sources"], num_replayed, targets, starts, num_replayed + 1, targets
            context = self._contexts.build(
                column["slot_mapping"].reshape(-1, size).unbind(),
                [table.by_slot[slots] for table in self._block_tables], [plans] * len(self._block_tables),
                [column[own.name] if has_optional or not own.is_optional else None for own in self._batch.columns],
                positions=column["positions"],
                query_start_loc=self._query_start_loc[: size + 1], seq_lens=column["seq_lens"], states=states,
            )  # fmt: skip
            token_ids = torch.where(column["from_device"] != 0, self._last_token_ids[slots], column["token_ids"])
            hidden = self._model.forward(token_ids, context, self._kv_caches)
            assert hidden is not None, "of several stages"
            self._hidden[:size] = hidden

        def sample_tokens() -> None:
            logits = self._model.compute_logits(self._hidden[:size])
            assert logits is not None, "of several ranks"
            token_ids = sample(
                logits, column["temperature"], column["min_p"], column["top_k"], column["top_p"], column["seeds"],
                column["positions"] + 1,
            )  # fmt: skip
            self._sampled[:size] = token_ids
            self._last_token_ids[column["slots"]] = token_ids

        nothing = StepInputs.of(self._batch, SchedulerOutput({}))
        (padding,) = upload(self._inputs.device, self._lay_out(nothing, size)[0])
        self._inputs[: len(padding)].copy_(padding)
        has_optional = any(one.is_optional for one in self._batch.columns)
        return _Graph(
            self._capture(functools.partial(forward, True)),
            self._capture(sample_tokens) if self.samples else None,
            self._capture(functools.partial(forward, False)) if has_optional else None,
        )

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        """The views from which the graphs of a size read each column: [size], or [width, size]."""
        stride, views, start = _round_up(size, COLUMN_STEP), {}, 0
        for column in self._columns:
            planes = self._inputs[start * stride : (start + column.width) * stride].view(column.width, stride)
            planes = (planes if column.dtype is np.int64 else planes.view(torch.float32))[:, :size]
            views[column.name] = planes if column.width > 1 else planes[0]
            start += column.width
        return views

    def _lay_out(self, inputs: StepInputs, size: int) -> tuple[Int64Array, bool]:
        """What a graph reads, and whether an optional column is needed."""
        num_rows, start, has_optional = len(inputs.token_ids), 0, False
        words = np.zeros((self._num_planes, _round_up(size, COLUMN_STEP)), dtype=np.int64)
        for column in self._columns:
            planes: npt.NDArray[Any] = words[start : start + column.width].view(column.dtype)
            planes[:, :num_rows] = column.values(inputs)
            has_optional |= column.is_optional and column.is_needed(planes[:, :num_rows])
            if column.fill:
                planes[:, num_rows:] = column.fill
            start += column.width
        return words.reshape(-1), has_optional

    def takes(self, inputs: StepInputs) -> bool:
        """Whether the step samples after each of its tokens, embeds all of them, stores one state of each, if there are
        states, and there is a graph of as many rows."""
        num_rows = len(inputs.token_ids)
        if inputs.states is not None and not num_rows == len(inputs.slots) == len(inputs.states.store_lens):
            return False
        return inputs.samples_every_token and num_rows <= self.max_size and inputs.embedded is None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        num_rows = len(inputs.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        words, has_optional = self._lay_out(inputs, size)
        (uploaded,) = upload(self._inputs.device, words)
        self._inputs[: len(words)].copy_(uploaded)
        for table in self._block_tables:
            table.update(inputs.slots)
        graph = self._graphs[size]
        (graph.forward if has_optional or graph.without_optional is None else graph.without_optional)()
        return self._hidden[:num_rows]

    def sample(self, inputs: StepInputs) -> torch.Tensor:
        """Sample for the step that was computed last, [T] int64: it samples after each of its tokens, and its requests
        have no parameters but those of `quire_kernels.sample`."""
        num_rows = len(inputs.token_ids)
        replay = self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]].sample
        assert replay is not None
        replay()
        return self._sampled[:num_rows].clone()


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, multiples of 8 up to 256 and of 16 above it, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def coarse_to_fine(size: int) -> tuple[bool, int, int]:
    """Sort key that spreads the first few sizes over the whole range: powers of two, then the midpoints, …"""
    step = size & -size
    return step != size, -step, -size


def run_as_captured(function: Function) -> Function:
    """A `Capture` without CUDA graphs: each replay runs the function, on the same memory."""
    return function


class CudaCapture:
    """A `Capture` with CUDA graphs that share a memory pool. Once all of them are freed, no more can join the pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Function) -> Function:
        """Run the function once, which compiles kernels and initializes libraries, and then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()
            torch.cuda.synchronize()
            # Other threads, such as NCCL's watchdog, may use CUDA meanwhile; this neither captures nor forbids it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps memory for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
