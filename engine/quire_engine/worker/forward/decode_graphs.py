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

Rows of padding are requests of one token; their keys and values go to a scratch block, and their token goes to a
scratch slot. The graphs share their memory, as no two of them run at the same time.
"""

import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import sample
from quire_kernels.attention_plan import GpuAttentionPlan
from tqdm import tqdm

from quire_engine.device.transfer import upload
from quire_engine.messages import SchedulerOutput
from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches, RecordableLM
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions, with_contexts
from quire_engine.worker.forward.graph_capture import Capture, Function, coarse_to_fine

__all__ = ["DecodeGraphs"]

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]
SLOT_MAPPING = "slot_mapping"
INTEGERS = ("token_ids", "from_device", "slots", "positions", SLOT_MAPPING, "seq_lens", "top_k", "seeds")
FLOATS = ("temperature", "top_p", "min_p")
COLUMN_STEP = 16
"""Columns begin at multiples of 128 bytes."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """The two graphs of one size."""

    forward: Function
    sample: Function | None


class DeviceBlockTable:
    """A copy of the batch's block tables on the device, by slot. A step uploads only new entries.

    Args:
        batch: with the tables.
        device: where to copy them.
        group: of layers, whose tables these are.
    """

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
        kv_caches: see its `forward`; the last block is the scratch block.
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
        num_groups = len(batch.block_tables)
        self._slot_mappings = SLOT_MAPPING, *(f"{SLOT_MAPPING} of group {group}" for group in range(1, num_groups))
        """Names of their columns, by group."""
        self._integers = *INTEGERS, *self._slot_mappings[1:]
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
        """Log which sizes had no room, and what that means for their steps."""
        effects = []
        if any(size < self.max_size for size in left_out):
            effects.append("smaller steps compute more rows of padding")
        if left_out[-1] > self.max_size:
            effects.append(f"steps of more than {self.max_size} rows are computed without, which takes longer")
        logger.warning(
            "cuda_graph_memory_bytes=%d has no room for the CUDA graphs of %s rows: %s",
            budget_bytes, ", ".join(map(str, left_out)), "; ".join(effects),
        )  # fmt: skip

    def _is_true_of_all_ranks(self, is_true_here: bool) -> bool:
        group = self._model.parallel.tensor_group
        if group is None:
            return is_true_here
        return not group.all_reduce(self._last_token_ids.new_tensor([not is_true_here])).item()

    def _allocate(self, max_size: int) -> None:
        """Allocate what the graphs read and write, for the largest size; the others use a part of it."""
        key_cache = self._kv_caches[0][0]
        device, dtype = key_cache.device, self._model.dtype
        num_blocks, _, self._block_size, _ = key_cache.shape
        self._scratch_slot = (num_blocks - 1) * self._block_size
        stride = _round_up(max_size, COLUMN_STEP)
        self._inputs = torch.zeros((len(self._integers) + len(FLOATS)) * stride, dtype=torch.int64, device=device)
        groups = range(len(self._slot_mappings))
        self._block_tables = [DeviceBlockTable(self._batch, device, group) for group in groups]
        self._hidden = torch.zeros(max_size, self._model.hidden_size, dtype=dtype, device=device)
        self._sampled = torch.zeros(max_size, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(max_size + 1, device=device)
        longest = (torch.arange(max_size + 1), torch.full((max_size,), self._max_model_len))
        plans = plan_attentions(
            key_caches_by_kind(self._model.attention_specs, self._kv_caches), self._block_tables[0].by_slot, *longest
        )
        self._plans: dict[AttentionSpec, GpuAttentionPlan] = {}
        for spec, plan in plans.items():
            assert isinstance(plan, GpuAttentionPlan), "only kernels in the Triton language find theirs on the device"
            self._plans[spec] = plan

    def _capture_one(self, size: int) -> _Graph:
        column = self._columns(size)
        plans = {
            spec: replace(plan, partials=plan.partials[:size], partial_lse=plan.partial_lse[:size])
            for spec, plan in self._plans.items()
        }

        def forward() -> None:
            slots = column["slots"]
            contexts = [
                ForwardContext(
                    positions=column["positions"],
                    slot_mapping=column[name],
                    block_table=table.by_slot[slots],
                    query_start_loc=self._query_start_loc[: size + 1],
                    seq_lens=column["seq_lens"],
                    plans=plans,
                )
                for name, table in zip(self._slot_mappings, self._block_tables, strict=True)
            ]
            context = with_contexts(contexts, self._group_ids)
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

        nothing = StepInputs.of(self._batch, SchedulerOutput({}), self._block_size)
        (padding,) = upload(self._inputs.device, self._lay_out(nothing, size))
        self._inputs[: len(padding)].copy_(padding)
        return _Graph(self._capture(forward), self._capture(sample_tokens) if self.samples else None)

    def _columns(self, size: int) -> dict[str, torch.Tensor]:
        """The views from which the graphs of a size read each column."""
        stride = _round_up(size, COLUMN_STEP)
        names = (*self._integers, *FLOATS)
        columns = {name: self._inputs[i * stride : i * stride + size] for i, name in enumerate(names)}
        for i, name in enumerate(FLOATS, len(self._integers)):
            columns[name] = self._inputs[i * stride : (i + 1) * stride].view(torch.float32)[:size]
        return columns

    def _lay_out(self, inputs: StepInputs, size: int) -> Int64Array:
        """The columns on the host, including padding."""
        batch, slots, n, stride = self._batch, inputs.token_slots, len(inputs.token_ids), _round_up(size, COLUMN_STEP)
        columns = np.zeros((len(self._integers) + len(FLOATS), stride), dtype=np.int64)
        integers = dict(zip(self._integers, columns, strict=False))
        integers["token_ids"][:n] = inputs.token_ids
        integers["from_device"][:n] = inputs.is_on_device
        integers["slots"][:n], integers["slots"][n:] = slots, batch.max_num_seqs
        integers["positions"][:n] = inputs.positions
        for name, slot_mapping in zip(self._slot_mappings, inputs.slot_mappings, strict=True):
            integers[name][:n], integers[name][n:] = slot_mapping, self._scratch_slot
        integers["seq_lens"][:n], integers["seq_lens"][n:] = inputs.positions + 1, 1
        integers["top_k"][:n], integers["top_k"][n:] = batch.top_k[slots], 1
        integers["seeds"][:n] = batch.seed[slots].view(np.int64)
        for name, column in zip(FLOATS, columns[len(self._integers) :].view(np.float32), strict=True):
            column[:n] = getattr(batch, name)[slots]
        return columns.reshape(-1)

    def takes(self, inputs: StepInputs) -> bool:
        """Whether the step samples after each of its tokens, embeds all of them, and there is a graph of as many
        rows."""
        return inputs.samples_every_token and len(inputs.token_ids) <= self.max_size and inputs.embedded is None

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """[T, E]; see `Forward`."""
        num_rows = len(inputs.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        words = self._lay_out(inputs, size)
        (uploaded,) = upload(self._inputs.device, words)
        self._inputs[: len(words)].copy_(uploaded)
        for table in self._block_tables:
            table.update(inputs.slots)
        self._graphs[size].forward()
        return self._hidden[:num_rows]

    def sample(self, inputs: StepInputs) -> torch.Tensor:
        """Sample for the step that was computed last, which samples after each of its tokens. Its requests have no
        parameters but those of `quire_kernels.sample`.

        Args:
            inputs: that step.

        Returns:
            [T] int64, a token for each row.
        """
        num_rows = len(inputs.token_ids)
        replay = self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]].sample
        assert replay is not None
        replay()
        return self._sampled[:num_rows].clone()


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
