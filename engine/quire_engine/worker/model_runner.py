"""ModelRunner: turns one SchedulerOutput into tensors, runs the model, samples."""

import threading

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import plan_attention

from quire_engine.device.transfer import CPU, upload, upload_tensors
from quire_engine.distributed import ParallelState
from quire_engine.messages import CachedRequestData, GrammarBitmask, PromptLogprobs, SchedulerOutput
from quire_engine.models.base import CausalLM, KVCaches
from quire_engine.models.layers import AttentionMetadata
from quire_engine.sampling import Sampler, SamplerOutput, SamplingMetadata
from quire_engine.sampling.prompt_logprobs import compute_prompt_logprobs
from quire_engine.worker.decode_graphs import DecodeGraphs
from quire_engine.worker.input_batch import NO_LOGPROBS, TABLE_STEP, InputBatch
from quire_engine.worker.recorded_forward import RecordedForward
from quire_engine.worker.submitted_step import SampledRows, SubmittedStep

__all__ = ["ModelRunner"]

Int64Array = npt.NDArray[np.int64]
GrammarRows = tuple[list[int], npt.NDArray[np.int32]]


class ModelRunner:
    """Owns the persistent batch and the KV cache tensors of one rank.

    All ranks keep the same batch. Only the output rank samples. The others hear of the tokens in a later step, or where
    steps are submitted ahead at once, as the next step begins with them.

    Args:
        model: this rank's part, on its device.
        batch: an empty one.
        block_size: tokens per KV block.
        parallel: the rank.
        device: where the model is.
        runs_ahead: whether a step may be submitted that follows on from tokens of which no result was taken yet.
    """

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        block_size: int,
        parallel: ParallelState = ParallelState(),
        device: torch.device = CPU,
        runs_ahead: bool = False,
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.batch = batch
        self.block_size = block_size
        self.device = device
        self.sampler = Sampler()
        self.graphs: DecodeGraphs | None = None
        self.last_token_ids = torch.zeros(batch.max_num_seqs + 1, dtype=torch.int64, device=device)
        """By slot, the token that was sampled last; then one that nobody reads."""
        self._runs_ahead = runs_ahead
        self._lock = threading.Lock()
        """Held by who reads or changes the batch: a result may be waited for in another thread."""
        self._kv_caches: KVCaches = []
        self._recorded: RecordedForward | None = None

    @property
    def kv_caches(self) -> KVCaches:
        """Per layer of this rank's stage, keys and values."""
        return self._kv_caches

    @kv_caches.setter
    def kv_caches(self, kv_caches: KVCaches) -> None:
        self._kv_caches = kv_caches
        self._recorded = self.graphs = None  # they point to the caches and the weights that were there before

    @property
    def recorded_bytes(self) -> int:
        """What the recording of small steps takes, once they use all of it."""
        return 0 if self._recorded is None else self._recorded.num_bytes

    @torch.inference_mode()
    def submit(self, scheduler_output: SchedulerOutput) -> SubmittedStep:
        """Begin one step. On a GPU this returns while it computes:

        1. Apply what changed: forget, add, extend.
        2. Flatten the scheduled tokens of all requests into one batch.
        3. Run the model over it; 2 and 3 by a graph where all requests decode.
        4. Where asked for, keep the log-probabilities of the prompt tokens that were computed.
        5. Sample for the requests whose last token was computed, and count one token more for each.

        A stage before the last ends with 3. Of the last one all ranks compute logits, and one has something to return.
        """
        with self._lock:
            self._update_batch(scheduler_output)
            scheduled = scheduler_output.num_scheduled_tokens
            if not scheduled:
                return SubmittedStep()
            slots = np.fromiter((self.batch.slots[request_id] for request_id in scheduled), dtype=np.int64)
            num_scheduled = np.fromiter(scheduled.values(), dtype=np.int64)
            ends = self.batch.num_computed_tokens[slots] + num_scheduled
            rows = np.flatnonzero(ends == self.batch.num_tokens[slots])
            request_ids = list(scheduled)
            graphs, num_rows = self.graphs, len(rows)
            if graphs is not None and num_rows == num_scheduled.sum() and num_rows <= graphs.max_size:
                return self._sample(request_ids, slots, graphs.forward(slots), scheduler_output, graphs)
            token_ids, metadata = self._prepare_inputs(slots, num_scheduled)
            hidden_TE = self._forward(token_ids, metadata)
            if hidden_TE is None:
                return SubmittedStep()
            prompt_logprobs = self._prompt_logprobs(request_ids, slots, num_scheduled, hidden_TE)
            if not num_rows:
                return SubmittedStep(prompt_logprobs=prompt_logprobs)
            (last_token_rows,) = upload(self.device, np.cumsum(num_scheduled)[rows] - 1)
            sampled_ids = [request_ids[row] for row in rows.tolist()]
            step = self._sample(sampled_ids, slots[rows], hidden_TE[last_token_rows], scheduler_output)
            step.prompt_logprobs = prompt_logprobs
            return step

    def _sample(
        self,
        request_ids: list[str],
        slots: Int64Array,
        hidden_SE: torch.Tensor,
        scheduler_output: SchedulerOutput,
        graphs: DecodeGraphs | None = None,
    ) -> SubmittedStep:
        """Sample, and let the batch count the tokens.

        Args:
            request_ids: whose tokens are sampled.
            slots: theirs.
            hidden_SE: of their last tokens.
            scheduler_output: the step.
            graphs: that have computed the hidden states.
        """
        bitmask, batch = scheduler_output.grammar_bitmask, self.batch
        is_stored, output = False, None
        if graphs is not None and graphs.samples and bitmask is None and batch.are_plain(slots):
            output, is_stored = SamplerOutput(graphs.sample(len(slots))), True
        else:
            logits_SV = self.model.compute_logits(hidden_SE)
            if logits_SV is not None:
                grammar = self._grammar_rows(bitmask, slots)
                output = self.sampler(logits_SV, self._sampling_metadata(slots, grammar))
        if self._runs_ahead and not is_stored:
            self._store_last_token_ids(slots, output)
        if output is None and not self._runs_ahead:
            return SubmittedStep()  # the batch hears of the tokens in the step that follows on from them
        rows = None if output is None else SampledRows(batch, self._lock, request_ids, slots, output)
        batch.expect_tokens(slots)
        return SubmittedStep(rows)

    def _store_last_token_ids(self, slots: Int64Array, output: SamplerOutput | None) -> None:
        """Keep the tokens where the next step finds them, on all ranks: the sum of them all is the output rank's."""
        (slots_S,) = upload(self.device, slots)
        token_ids_S = torch.zeros_like(slots_S) if output is None else output.token_ids_S
        group = self.parallel.tensor_group
        if group is not None:
            token_ids_S = group.all_reduce(token_ids_S.clone())
        self.last_token_ids[slots_S] = token_ids_S

    def _forward(self, token_ids: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor | None:
        if self.device.type != "cpu" or self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size > 1:
            return self.model.forward(token_ids, self.kv_caches, metadata)
        if self._recorded is None:
            self._recorded = RecordedForward(self.model, self.kv_caches)
        return self._recorded(token_ids, metadata)

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
                    upload(self.device, batch.token_ids[slot, start:end])[0],
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
        width = -(-int(seq_lens.max()) // block_size)
        if self.device.type != "cpu":
            width = -(-width // TABLE_STEP) * TABLE_STEP
        arrays = [
            batch.token_ids[slot_of_token, positions], positions, block_ids * block_size + positions % block_size,
            batch.block_table[slots, :width], query_start_loc, seq_lens,
        ]  # fmt: skip
        if self._runs_ahead:
            arrays += slot_of_token, positions >= batch.num_known_tokens[slot_of_token]
        token_ids_T, positions_T, slot_mapping, block_table, starts, lens, *ahead = upload(self.device, *arrays)
        if ahead:
            slots_T, on_device_T = ahead
            token_ids_T = torch.where(on_device_T, self.last_token_ids[slots_T], token_ids_T)
        # All layers have as many heads, so one plan of the attention does for all of them. On a GPU it is made of what
        # the host knows: of what is there it would wait for.
        known = (torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens))
        metadata = AttentionMetadata(
            positions=positions_T,
            slot_mapping=slot_mapping,
            block_table=block_table,
            query_start_loc=starts,
            seq_lens=lens,
            plan=plan_attention(block_table, *known, self.model.num_heads, self.kv_caches[0][0]),
        )
        return token_ids_T, metadata

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
        columns = (
            batch.temperature[slots], batch.top_p[slots], batch.top_k[slots], batch.min_p[slots],
            batch.seed[slots].view(np.int64), batch.num_tokens[slots],
        )  # fmt: skip
        temperature, top_p, top_k, min_p, seeds, positions = upload(self.device, *columns)
        return SamplingMetadata(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
            num_logprobs=dict(zip(rows_with_logprobs.tolist(), num_logprobs[rows_with_logprobs].tolist(), strict=True)),
            forbidden=[(row, batch.stop_token_ids[slots[row]]) for row in early_rows if row not in constrained],
            all_greedy=not batch.temperature[slots].any(),
            penalties=upload_tensors(self.device, batch.penalties.gather(slots)),
            token_constraints=upload_tensors(self.device, batch.token_constraints.gather(slots, batch.output_tail)),
            grammar_bitmask=grammar,
        )
