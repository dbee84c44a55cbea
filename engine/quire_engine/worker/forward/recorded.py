"""RecordedForward: computes small steps from a recording, so that no Python runs between two kernels."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import NotRecordableError, Recording, StandingPlan, record, sample, standing_plan
from quire_kernels.kv_cache import is_tiled

from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches, RecordableLM, replace_rows
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.sampling_inputs import SamplingArrays, sampling_arrays
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.base import key_caches_by_group, with_contexts

__all__ = ["RECORDED_TOKENS", "RecordedColumns", "RecordedContext", "RecordedForward", "RecordedLayers"]

RECORDED_TOKENS = 64
"""Steps of more tokens are computed op by op: they take so long that Python's overhead does not matter."""

Layers: TypeAlias = Callable[[Sequence[torch.Tensor], ForwardContext], torch.Tensor]
"""(inputs, each [T, its width], context) → [T, E]; uses only ops of `quire_kernels`, and may overwrite the inputs."""

Int64Array = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


class RecordedContext:
    """A context whose tensors do not move, for recorded ops to read from.

    Args:
        specs: of the layers' attention.
        kv_caches: by layer; their tensors must not move. The C++ kernels use them.
        max_blocks: of a request.
        group_ids: by layer, its group; not needed if there is only one.
        num_groups: of the whole model.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv_caches: KVCaches,
        max_blocks: int,
        group_ids: Sequence[int] = (),
        num_groups: int = 1,
    ) -> None:
        rows = RECORDED_TOKENS
        positions, seq_lens = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
        starts = torch.arange(rows + 1)  # as many sequences as tokens, while it is recorded
        contexts = []
        self._plans: list[StandingPlan] = []
        for key_caches in key_caches_by_group(specs, kv_caches, group_ids, num_groups):
            table = torch.zeros(rows, max_blocks, dtype=torch.int64)
            standing = {
                spec: standing_plan(table, starts, seq_lens, spec.num_heads, key_cache, spec.window)
                for spec, key_cache in key_caches.items()
            }
            self._plans += standing.values()
            contexts.append(
                ForwardContext(
                    positions=positions,
                    slot_mapping=torch.zeros(rows, dtype=torch.int64),
                    block_table=table,
                    query_start_loc=starts,
                    seq_lens=seq_lens,
                    plans={spec: own.plan for spec, own in standing.items()},
                )
            )
        self.context = with_contexts(contexts, group_ids)
        self.positions: Int64Array = positions.numpy()
        """Views of the context's tensors, like the next four."""
        self.seq_lens: Int64Array = seq_lens.numpy()
        self.query_start_loc: Int64Array = starts.numpy()
        self.slot_mappings: list[Int64Array] = [own.slot_mapping.numpy() for own in contexts]
        """By group."""
        self.block_tables: list[Int64Array] = [own.block_table.numpy() for own in contexts]
        """By group."""

    def set(
        self,
        positions: Int64Array,
        slot_mappings: Sequence[Int64Array],
        block_tables: Sequence[Int64Array],
        query_start_loc: Int64Array,
        seq_lens: Int64Array,
    ) -> None:
        """Write a step's context to the tensors, and plan its attention.

        Args:
            positions: [T]
            slot_mappings: [T] of each group.
            block_tables: [S, M] of each group; as many blocks as the longest sequence has are enough.
            query_start_loc: [S + 1]
            seq_lens: [S]
        """
        num_tokens, num_sequences = len(positions), len(seq_lens)
        self.positions[:num_tokens] = positions
        self.seq_lens[:num_sequences] = seq_lens
        self.query_start_loc[: num_sequences + 1] = query_start_loc
        for own, given in zip(self.slot_mappings, slot_mappings, strict=True):
            own[:num_tokens] = given
        for own, given in zip(self.block_tables, block_tables, strict=True):
            own[:num_sequences, : given.shape[1]] = given
        self.plan_for(num_sequences)

    def plan_for(self, num_sequences: int) -> None:
        """Plan the attention of the first so many sequences, as the tensors have them now."""
        for plan in self._plans:
            plan.plan_for(num_sequences)

    @property
    def has_shared_sequences(self) -> bool:
        """See `StandingPlan`."""
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
    """Layers, recorded over at most `RECORDED_TOKENS` tokens.

    Args:
        layers: to be recorded.
        widths: of their inputs.
        dtype: of their inputs.
        context: which they read from.

    Raises:
        NotRecordableError: they use other ops than those of `quire_kernels`.
    """

    def __init__(self, layers: Layers, widths: Sequence[int], dtype: torch.dtype, context: RecordedContext) -> None:
        self.context = context
        self._inputs = [torch.empty(RECORDED_TOKENS, width, dtype=dtype) for width in widths]
        with record(RECORDED_TOKENS) as self._recording:
            self.out = layers(self._inputs, context.context)
            """[RECORDED_TOKENS, E], written by each call."""

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
    """A `Forward` that takes small steps, if the model's ops can be recorded with these caches; and can sample them.

    Args:
        model: of a single rank: communication cannot be recorded.
        kv_caches: see its `forward`.
        batch: the steps' slots refer to it.
        last_token_ids: see `EagerForward`.
        group_ids: by layer, its group; not needed if there is only one.
    """

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

        def layers(inputs: Sequence[torch.Tensor], context: ForwardContext) -> torch.Tensor:
            return model.final_norm(*model.run_layers(inputs[0], None, context, kv_caches))

        self._layers: RecordedLayers | None = None
        self._head: Recording | None = None
        if not is_tiled(kv_caches[0][0]):  # only attention in C++ can be recorded
            return
        tables = batch.block_tables
        context = RecordedContext(model.attention_specs, kv_caches, tables[0].shape[1], group_ids, len(tables))
        try:
            self._layers = RecordedLayers(layers, [model.hidden_size], model.dtype, context)
        except NotRecordableError as error:  # not logged itself: it refers to the caches
            logger.warning("steps are computed op by op, which takes longer where they are small: %s", str(error))
            return
        self._columns = RecordedColumns()
        try:
            with record(RECORDED_TOKENS) as head:
                logits = model.compute_logits(self._layers.out)
                assert logits is not None, "of several ranks"
                self._sampled = sample(logits, *self._columns.tensors)
            self._head = head
        except NotRecordableError as error:
            logger.info("tokens are sampled op by op: %s", str(error))

    def takes(self, inputs: StepInputs) -> bool:
        """Whether there is a recording, and the step is small enough for it."""
        return self._layers is not None and len(inputs.token_ids) <= RECORDED_TOKENS

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """[T, E]; see `Forward`."""
        assert self._layers is not None
        token_ids = inputs.token_ids
        if self._last_token_ids is not None:
            token_ids = np.where(inputs.is_on_device, self._last_token_ids[inputs.token_slots], token_ids)
        width = -(-int(inputs.seq_lens.max()) // self._batch.block_size)
        self._layers.context.set(
            inputs.positions, inputs.slot_mappings, [table[inputs.slots, :width] for table in self._batch.block_tables],
            inputs.query_start_loc, inputs.seq_lens,
        )  # fmt: skip
        hidden = self._model.embed(torch.from_numpy(token_ids))
        if inputs.embedded is not None:
            rows, hidden_rows = map(torch.from_numpy, inputs.embedded)
            replace_rows(hidden, (rows, hidden_rows))
        return self._layers([hidden])

    @property
    def samples(self) -> bool:
        """Whether `sample` can be called."""
        return self._head is not None

    def sample(self, inputs: StepInputs) -> torch.Tensor:
        """See `DecodeGraphs.sample`."""
        assert self._head is not None
        num_rows = len(inputs.token_ids)
        self._columns.set(sampling_arrays(self._batch, inputs.token_slots, inputs.positions + 1))
        self._head.run(num_rows)
        return self._sampled[:num_rows].clone()

    def num_bytes(self, num_times: int = 1) -> int:
        """Memory of the results that the recorded ops write, if there were all layers so many times."""
        layer_bytes = 0 if self._layers is None else self._layers.num_bytes
        return num_times * layer_bytes + (0 if self._head is None else self._head.num_bytes)
