"""RecordedForward: computes small steps from a recording, so that no Python runs between two kernels."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import NotRecordableError, Recording, StandingPlan, record, sample, standing_plan

from quire_engine.models.base import RecordableLM, replace_rows
from quire_engine.models.step_context import GRID_POSITIONS, ContextBuilder, KVCaches, StepContext, StepRows
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.sampling_inputs import SamplingArrays, sampling_arrays
from quire_engine.worker.batch.step_inputs import StepInputs

RECORDED_TOKENS = 64
"""Steps of more tokens are computed op by op: they take so long that Python's overhead does not matter."""
RECORDED_PROMPT_TOKENS = 1024
"""The same of models without a head, all of whose tokens are of prompts: beside a small encoder's kernels it does.
Larger steps are computed in parts of so many tokens, whose activations stay in the cache."""

Layers: TypeAlias = Callable[[Sequence[torch.Tensor], StepContext], torch.Tensor]
"""(inputs, each [T, its width], context) → [T, E]; uses only ops of `quire_kernels`, and may overwrite the inputs."""

Int64Array = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


class RecordedContext:
    """A context of at most `max_rows` tokens whose tensors do not move, for recorded ops of the C++ kernels to read
    from. With `has_states`, some layers keep states."""

    def __init__(self, contexts: ContextBuilder, has_states: bool = False, max_rows: int | None = None) -> None:
        self.max_rows = rows = RECORDED_TOKENS if max_rows is None else max_rows
        tables = contexts.block_tables
        positions, seq_lens = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
        starts = torch.arange(rows + 1)  # as many sequences as tokens, while it is recorded
        own_tables = [torch.zeros(rows, table.shape[1], dtype=torch.int64) for table in tables]
        standing = [
            {
                spec: standing_plan(
                    table, starts, seq_lens, spec.num_heads, key_cache, spec.signed_window, spec.is_causal
                )
                for spec, key_cache in key_caches.items()
            }
            for key_caches, table in zip(contexts.key_caches, own_tables, strict=True)
        ]
        self._plans: list[StandingPlan] = [plan for own in standing for plan in own.values()]
        slot_mappings = [torch.zeros(rows, dtype=torch.int64) for _ in tables]
        arrays = [
            np.full((column.width, rows) if column.width > 1 else rows, column.fill, column.dtype)
            for column in contexts.columns
        ]
        # Of each sequence a state is stored once or twice, and after each full block of tokens.
        sizes = (rows, rows, rows, rows + 1, 4 * rows, 4 * rows) if has_states else ()
        states = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        self.context = contexts.build(
            slot_mappings, own_tables, [{spec: plan.plan for spec, plan in own.items()} for own in standing],
            [torch.from_numpy(array) for array in arrays], positions=positions, query_start_loc=starts,
            seq_lens=seq_lens, states=states,
        )  # fmt: skip
        self._states: list[Int64Array] = [own.numpy() for own in states]
        self.positions: Int64Array = positions.numpy()
        """Views of the context's tensors, like the next four."""
        self.seq_lens: Int64Array = seq_lens.numpy()
        self.query_start_loc: Int64Array = starts.numpy()
        self.slot_mappings: list[Int64Array] = [own.numpy() for own in slot_mappings]
        """By group."""
        self.block_tables: list[Int64Array] = [own.numpy() for own in own_tables]
        """By group."""
        self._tables, self._block_size = tables, contexts.block_size
        self._columns = list(zip(contexts.columns, arrays, strict=True))

    def set(self, rows: StepRows) -> None:
        """Write a step's context to the tensors, and plan its attention."""
        num_rows, num_sequences = len(rows.positions), len(rows.seq_lens)
        width = -(-int(rows.seq_lens.max()) // self._block_size)
        self.positions[:num_rows] = rows.positions
        self.seq_lens[:num_sequences] = rows.seq_lens
        self.query_start_loc[: num_sequences + 1] = rows.query_start_loc
        for own, given in zip(self.slot_mappings, rows.slot_mappings, strict=True):
            own[:num_rows] = given
        for own, table in zip(self.block_tables, self._tables, strict=True):
            own[:num_sequences, :width] = table[rows.slots, :width]
        if rows.states is not None:
            for own, given in zip(self._states, rows.states, strict=True):
                own[: len(given)] = given
        self.set_columns(rows)
        self.plan_for(num_sequences)

    def set_columns(self, rows: StepRows) -> None:
        """Write the columns that the model declares."""
        for column, own in self._columns:
            own[..., : len(rows.positions)] = column.values(rows)

    def plan_for(self, num_sequences: int) -> None:
        """Plan the attention of the first so many sequences, as the tensors have them now."""
        for plan in self._plans:
            plan.plan_for(num_sequences)

    @property
    def has_shared_sequences(self) -> bool:
        return any(plan.has_shared_sequences for plan in self._plans)


class RecordedColumns:
    """The parameters of `quire_kernels.sample` in tensors that do not move, for `RECORDED_TOKENS` rows."""

    def __init__(self) -> None:
        floats = [torch.zeros(RECORDED_TOKENS) for _ in range(3)]
        integers = [torch.zeros(RECORDED_TOKENS, dtype=torch.int64) for _ in range(3)]
        self.positions = integers[2]
        self.tensors = floats[0], floats[1], integers[0], floats[2], integers[1], self.positions
        """In the order in which `sample` takes them."""
        self._arrays = [tensor.numpy() for tensor in self.tensors]

    def set(self, arrays: SamplingArrays) -> None:
        """Write those of the first rows."""
        num_rows = len(arrays[0])
        for own, given in zip(self._arrays, arrays, strict=True):
            own[:num_rows] = given


class RecordedLayers:
    """Layers, recorded over at most the context's `max_rows` tokens, with inputs of these widths and this dtype. Raises
    NotRecordableError if they use other ops than those of `quire_kernels`."""

    def __init__(self, layers: Layers, widths: Sequence[int], dtype: torch.dtype, context: RecordedContext) -> None:
        self.context = context
        self._inputs = [torch.empty(context.max_rows, width, dtype=dtype) for width in widths]
        with record(context.max_rows) as self._recording:
            self.out = layers(self._inputs, context.context)
            """[max_rows, E], written by each call."""

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return self._recording.num_bytes

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """[T, its width] each → [T, E], overwritten by the next call. Set the context before."""
        num_tokens = len(inputs[0])
        for own, given in zip(self._inputs, inputs, strict=True):
            own[:num_tokens] = given
        self._recording.run(num_tokens)
        return self.out[:num_tokens]


class RecordedForward:
    """A `Forward` that takes small steps of a single rank, if the model's ops can be recorded with these caches, and
    can sample them: communication cannot be recorded. Of a model without a head it takes larger steps as well, if each
    request's tokens fit into a small one: it computes them one small step after the other, through all layers. For the
    arguments see `EagerForward`."""

    def __init__(
        self,
        model: RecordableLM,
        kv_caches: KVCaches,
        batch: InputBatch,
        last_token_ids: torch.Tensor | None,
        group_ids: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._batch = batch
        self._last_token_ids = None if last_token_ids is None else last_token_ids.numpy()

        def layers(inputs: Sequence[torch.Tensor], context: StepContext) -> torch.Tensor:
            return model.final_norm(*model.run_layers(inputs[0], None, context, kv_caches), context)

        # Where an image's positions have three dimensions, its rows have angles of their own.
        self._takes_parts = GRID_POSITIONS.name not in [column.name for column in batch.columns]
        self._max_tokens = RECORDED_TOKENS if model.has_head else RECORDED_PROMPT_TOKENS
        self._layers: RecordedLayers | None = None
        self._head: Recording | None = None
        contexts = ContextBuilder(
            model.state_specs, kv_caches, batch.block_tables, batch.block_size, group_ids, batch.columns
        )
        if not contexts.are_tiled:  # only attention in C++ can be recorded
            return
        try:
            recorded = RecordedContext(contexts, batch.has_states, self._max_tokens)
            self._layers = RecordedLayers(layers, [model.input_size], model.dtype, recorded)
        except NotRecordableError as error:  # not logged itself: it refers to the caches
            logger.warning("steps are computed op by op, which takes longer where they are small: %s", str(error))
            return
        self._columns = RecordedColumns()
        try:
            with record(RECORDED_TOKENS) as head:
                logits = model.compute_logits(self._layers.out)
                if logits is not None:
                    self._sampled = sample(logits, *self._columns.tensors)
            self._head = None if logits is None else head
        except NotRecordableError as error:
            logger.info("tokens are sampled op by op: %s", str(error))

    def takes(self, inputs: StepInputs) -> bool:
        """Whether there is a recording, and the step, or each request's part of it, is small enough for it."""
        if self._layers is None or inputs.bidirectional is not None:
            return False
        if inputs.embedded is not None and not self._takes_parts:
            return False
        if len(inputs.token_ids) > self._max_tokens:
            fits = int(inputs.num_scheduled.max()) <= self._max_tokens
            return not self._model.has_head and inputs.states is None and fits
        return inputs.states is None or len(inputs.states.store_lens) <= 4 * self._max_tokens

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        assert self._layers is not None
        token_ids = inputs.token_ids
        if self._last_token_ids is not None:
            token_ids = np.where(inputs.is_on_device, self._last_token_ids[inputs.token_slots], token_ids)
        hidden = self._model.embed(torch.from_numpy(token_ids))
        if inputs.embedded is not None:
            rows, hidden_rows = map(torch.from_numpy, inputs.embedded)
            replace_rows(hidden, (rows, hidden_rows))
        if len(token_ids) <= self._max_tokens:
            self._layers.context.set(inputs)
            return self._layers([hidden])
        out = torch.empty(len(token_ids), self._layers.out.shape[1], dtype=self._layers.out.dtype)
        for own, step in inputs.split(self._max_tokens):
            self._layers.context.set(step)
            out[own] = self._layers([hidden[own]])
        return out

    @property
    def samples(self) -> bool:
        """Whether `sample` can be called."""
        return self._head is not None

    def sample(self, inputs: StepInputs) -> torch.Tensor:
        assert self._head is not None
        num_rows = len(inputs.token_ids)
        self._columns.set(sampling_arrays(self._batch, inputs.token_slots, inputs.positions + 1))
        self._head.run(num_rows)
        return self._sampled[:num_rows].clone()

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write; about the same for any number of layers."""
        return sum(recorded.num_bytes for recorded in (self._layers, self._head) if recorded is not None)
