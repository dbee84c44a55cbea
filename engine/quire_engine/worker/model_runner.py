"""ModelRunner: turns one SchedulerOutput into tensors, runs the model, samples."""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import plan_attention

from quire_engine.distributed import ParallelState
from quire_engine.messages import CachedRequestData, GrammarBitmask, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from quire_engine.models.layers import AttentionMetadata
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.sampling import Sampler, SamplingMetadata
from quire_engine.sampling.prompt_logprobs import compute_prompt_logprobs
from quire_engine.worker.input_batch import NO_LOGPROBS, InputBatch
from quire_engine.worker.recorded_forward import RecordedForward

__all__ = ["ModelRunner"]

Int64Array = npt.NDArray[np.int64]
GrammarRows = tuple[list[int], npt.NDArray[np.int32]]


class ModelRunner:
    """Owns the persistent batch and the KV cache tensors of one rank.

    All ranks keep the same batch. Only the output rank samples; the others hear of the tokens in a later step.
    """

    def __init__(
        self, model: LlamaForCausalLM, batch: InputBatch, block_size: int, parallel: ParallelState = ParallelState()
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.batch = batch
        self.block_size = block_size
        self.sampler = Sampler()
        self._kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._recorded: RecordedForward | None = None

    @property
    def kv_caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer of this rank's stage, keys and values."""
        return self._kv_caches

    @kv_caches.setter
    def kv_caches(self, kv_caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._kv_caches = kv_caches
        self._recorded = None  # it points to the caches and the weights that were there before

    @property
    def recorded_bytes(self) -> int:
        """What the recording of small steps takes, once they use all of it."""
        return 0 if self._recorded is None else self._recorded.num_bytes

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step:

        1. Apply what changed: forget, add, extend.
        2. Flatten the scheduled tokens of all requests into one batch.
        3. Run the model over it.
        4. Where asked for, keep the log-probabilities of the prompt tokens that were computed.
        5. Sample for the requests whose last token was computed, and append the result to their tokens.

        A stage before the last ends with 3. Of the last one all ranks compute logits, and one has something to return.
        """
        self._update_batch(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return ModelRunnerOutput({})
        slots = np.fromiter((self.batch.slots[request_id] for request_id in scheduled), dtype=np.int64)
        num_scheduled = np.fromiter(scheduled.values(), dtype=np.int64)
        token_ids, metadata = self._prepare_inputs(slots, num_scheduled)
        hidden_TE = self._forward(token_ids, metadata)
        if hidden_TE is None:
            return ModelRunnerOutput({})

        prompt_logprobs = self._prompt_logprobs(list(scheduled), slots, num_scheduled, hidden_TE)
        ends = self.batch.num_computed_tokens[slots] + num_scheduled
        sampled_rows = np.flatnonzero(ends == self.batch.num_tokens[slots])
        if not len(sampled_rows):
            return ModelRunnerOutput({}, prompt_logprobs=prompt_logprobs)
        last_token_rows = torch.from_numpy(np.cumsum(num_scheduled)[sampled_rows] - 1)
        logits_SV = self.model.compute_logits(hidden_TE[last_token_rows])
        if logits_SV is None:
            return ModelRunnerOutput({})
        sampled_slots = slots[sampled_rows]
        grammar = self._grammar_rows(scheduler_output.grammar_bitmask, sampled_slots)
        output = self.sampler(logits_SV, self._sampling_metadata(sampled_slots, grammar))
        self.batch.append_tokens(sampled_slots, np.array(output.token_ids, dtype=np.int64))

        request_ids = list(scheduled)
        sampled_ids = [request_ids[row] for row in sampled_rows.tolist()]
        return ModelRunnerOutput(
            {request_id: [token_id] for request_id, token_id in zip(sampled_ids, output.token_ids, strict=True)},
            {
                request_id: [logprobs]
                for request_id, logprobs in zip(sampled_ids, output.logprobs, strict=True)
                if logprobs is not None
            },
            prompt_logprobs,
        )

    def _forward(self, token_ids_T: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor | None:
        if self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size > 1:
            return self.model.forward(token_ids_T, self.kv_caches, metadata)
        if self._recorded is None:
            self._recorded = RecordedForward(self.model, self.kv_caches)
        return self._recorded(token_ids_T, metadata)

    def _prompt_logprobs(
        self, request_ids: list[str], slots: Int64Array, num_scheduled: Int64Array, hidden_TE: torch.Tensor
    ) -> dict[str, PromptLogprobs]:
        """Score the prompt tokens that follow the ones computed in this step, for the requests that want it."""
        batch = self.batch
        wanted = np.flatnonzero(batch.num_prompt_logprobs[slots] != NO_LOGPROBS)
        first_rows = np.cumsum(num_scheduled) - num_scheduled
        result = {}
        for i in wanted.tolist():
            slot, start = slots[i], int(batch.num_computed_tokens[slots[i]]) + 1
            end = min(start + int(num_scheduled[i]), int(batch.num_prompt_tokens[slot]))
            if start < end:
                scores = compute_prompt_logprobs(
                    self.model.compute_logits,
                    hidden_TE[first_rows[i] : first_rows[i] + end - start],
                    torch.from_numpy(batch.token_ids[slot, start:end]),
                    start,
                    int(batch.num_prompt_logprobs[slot]),
                    batch.vocab_size,
                )
                if scores is not None:
                    result[request_ids[i]] = scores
        return result

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.dropped_request_ids:
            self.batch.remove(request_id)
        for request in scheduler_output.new_requests:
            self.batch.add(request)
        cached = scheduler_output.cached_requests
        for request_id, block_ids, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            slot = self.batch.slots[request_id]
            self.batch.num_computed_tokens[slot] = num_computed
            if block_ids:
                self.batch.append_blocks(slot, block_ids)
        if cached.new_token_ids and not self.parallel.is_output_rank:
            self._append_new_tokens(cached)

    def _append_new_tokens(self, cached: CachedRequestData) -> None:
        """Take over what the output rank has sampled: one token at most for each request."""
        columns = zip(cached.request_ids, cached.new_token_ids, strict=True)
        new = [(self.batch.slots[request_id], token_ids[0]) for request_id, token_ids in columns if token_ids]
        if new:
            slots, token_ids = np.array(new, dtype=np.int64).T
            self.batch.append_tokens(slots, token_ids)

    def _prepare_inputs(self, slots: Int64Array, num_scheduled: Int64Array) -> tuple[torch.Tensor, AttentionMetadata]:
        """Flatten, without a Python loop over requests or tokens.

        ::

            num_scheduled      2      3            1
            query_start_loc  0      2            5      6
            slot_of_token    a a    b b b        c
            positions        7 8    0 1 2        40        num_computed + 0, 1, …
        """
        batch, block_size = self.batch, self.block_size
        num_computed = batch.num_computed_tokens[slots]
        query_start_loc = np.concatenate(([0], np.cumsum(num_scheduled)))
        slot_of_token = np.repeat(slots, num_scheduled)
        offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], num_scheduled)
        positions = np.repeat(num_computed, num_scheduled) + offsets
        block_ids = batch.block_table[slot_of_token, positions // block_size]
        seq_lens = num_computed + num_scheduled
        num_blocks = -(-int(seq_lens.max()) // block_size)
        block_table = torch.from_numpy(batch.block_table[slots, :num_blocks])
        starts, lens = torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens)
        metadata = AttentionMetadata(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size),
            block_table=block_table,
            query_start_loc=starts,
            seq_lens=lens,
            # All layers have as many heads, so one plan of the attention does for all of them.
            plan=plan_attention(block_table, starts, lens, self.model.num_heads, self.kv_caches[0][0]),
        )
        return torch.from_numpy(batch.token_ids[slot_of_token, positions]), metadata

    def _grammar_rows(self, bitmask: GrammarBitmask | None, slots: Int64Array) -> GrammarRows | None:
        """The rows of logits that a grammar constrains, and how."""
        if bitmask is None:
            return None
        row_of_slot = {slot: row for row, slot in enumerate(slots.tolist())}
        rows = [row_of_slot[self.batch.slots[request_id]] for request_id in bitmask.request_ids]
        return rows, np.frombuffer(bytearray(bitmask.bitmask), dtype=np.int32).reshape(len(rows), -1)

    def _sampling_metadata(self, slots: Int64Array, grammar: GrammarRows | None) -> SamplingMetadata:
        """The columns of the rows that are sampled."""
        batch = self.batch
        num_output_tokens = batch.num_tokens[slots] - batch.num_prompt_tokens[slots]
        early_rows = np.flatnonzero(num_output_tokens < batch.min_tokens[slots]).tolist()
        constrained = set(grammar[0]) if grammar is not None else ()  # there the bitmask has it
        num_logprobs = batch.num_logprobs[slots]
        rows_with_logprobs = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        return SamplingMetadata(
            temperature=torch.from_numpy(batch.temperature[slots]),
            top_p=torch.from_numpy(batch.top_p[slots]),
            top_k=torch.from_numpy(batch.top_k[slots]),
            min_p=torch.from_numpy(batch.min_p[slots]),
            seeds=torch.from_numpy(batch.seed[slots].view(np.int64)),
            positions=torch.from_numpy(batch.num_tokens[slots]),
            num_logprobs=dict(zip(rows_with_logprobs.tolist(), num_logprobs[rows_with_logprobs].tolist(), strict=True)),
            forbidden=[(row, batch.stop_token_ids[slots[row]]) for row in early_rows if row not in constrained],
            all_greedy=not batch.temperature[slots].any(),
            penalties=batch.penalties.gather(slots),
            token_constraints=batch.token_constraints.gather(slots, batch.output_tail),
            grammar_bitmask=grammar,
        )
