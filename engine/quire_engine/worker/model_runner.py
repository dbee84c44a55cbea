"""ModelRunner: turns one SchedulerOutput into tensors, runs the model, samples."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import sum_rows

from quire_engine.device.transfer import CPU, upload
from quire_engine.distributed import ParallelState
from quire_engine.messages import CachedRequestData, GrammarBitmask, PromptLogprobs, SchedulerOutput
from quire_engine.models.base import CausalLM
from quire_engine.models.decoder import Decoder
from quire_engine.models.step_context import KVCaches
from quire_engine.sampling import Sampler, SamplerOutput
from quire_engine.sampling.logprobs import compute_prompt_logprobs
from quire_engine.tasks.pooler import MeanPool, Pooler
from quire_engine.worker.batch.input_batch import NO_LOGPROBS, InputBatch
from quire_engine.worker.batch.sampling_inputs import sampling_metadata
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.drafting.drafting import Drafting
from quire_engine.worker.forward.decode_graphs import DecodeGraphs
from quire_engine.worker.forward.eager import EagerForward, Forward
from quire_engine.worker.forward.recorded import RecordedForward
from quire_engine.worker.submitted_step import PendingTokens, SubmittedStep

Int64Array = npt.NDArray[np.int64]
NO_HEAD = Pooler()


class ModelRunner:
    """Owns the persistent batch and the KV cache tensors of one rank.

    All ranks keep the same batch. Only the output rank samples. The other ranks receive the tokens with a later step.
    If steps are submitted ahead they receive them at once, as the next step needs them as input; except for requests
    with drafts, whose next step is scheduled only after this one's result.

    Args:
        model: this rank's part, on its device.
        batch: an empty one.
        parallel: the rank.
        device: where the model is.
        runs_ahead: whether a step may be submitted before the result of the step whose tokens it goes on after.
        drafting: what drafts after steps, on the rank that samples.
        pooler: makes results of hidden states, on that rank.
    """

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        parallel: ParallelState = ParallelState(),
        device: torch.device = CPU,
        runs_ahead: bool = False,
        drafting: Drafting | None = None,
        pooler: Pooler = NO_HEAD,
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.batch = batch
        self.device = device
        self.sampler = Sampler()
        self.pooler = pooler
        self.drafting = drafting
        self.last_token_ids = torch.zeros(batch.max_num_seqs + 1, dtype=torch.int64, device=device)
        """By slot, the token that was sampled last; the extra last entry is written but never read."""
        self._runs_ahead = runs_ahead
        self.use_caches([])

    def use_caches(
        self, kv_caches: KVCaches, group_ids: Sequence[int] = (), graphs: DecodeGraphs | None = None
    ) -> None:
        """Use these caches from now on, and drop what refers to earlier caches or weights.

        Args:
            kv_caches: per layer of this rank's stage; none: no step follows.
            group_ids: by layer of the stage, its group (`kv_cache/groups.py`); not needed if there is only one.
            graphs: of decode steps on these caches.
        """
        self.kv_caches, self.group_ids, self.graphs = kv_caches, group_ids, graphs
        self._eager: EagerForward | None = None
        self._recorded: RecordedForward | None = None

    @property
    def recorded_bytes(self) -> int:
        """Memory that the recording of small steps takes."""
        return 0 if self._recorded is None else self._recorded.num_bytes

    @torch.inference_mode()
    def submit(self, scheduler_output: SchedulerOutput) -> SubmittedStep:
        """Begin one step. On a GPU this returns while the GPU still computes:

        1. Apply what changed to the batch: remove, add, extend.
        2. Flatten the scheduled tokens of all requests into one batch.
        3. Run the model over it, with the first `Forward` that takes such a step.
        4. Keep the requested log-probabilities of the prompt tokens that were computed.
        5. Pool the hidden states of the requests that return these instead of tokens.
        6. Sample for the requests whose last token was computed, and count one token more for each without drafts.

        On the rank that samples, requested drafts are made when the result is fetched, which has the tokens that
        they follow.

        A stage before the last ends with 3. On the last stage all ranks compute logits, and one returns a result.
        """
        with self.batch.lock:
            self._update_batch(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                return SubmittedStep()
            inputs = StepInputs.of(self.batch, scheduler_output)
            forwards = self._forwards()
            with self._own_tables(inputs.token_slots) as has_tables:
                # A graph embeds its tokens with the model's table.
                forward = next(one for one in forwards if one.takes(inputs) and not (has_tables and one is self.graphs))
                hidden_TE = forward(inputs)
            if hidden_TE is None:
                return SubmittedStep()
            are_pooled = len(self.batch.pools) == len(self.batch.slots)
            prompt_logprobs = {} if are_pooled else self._prompt_logprobs(inputs, hidden_TE)
            pooled = self._pool(inputs, hidden_TE) if self.batch.pools else {}
            step = SubmittedStep()
            if inputs.sampled.request_ids:
                if not inputs.samples_every_token:
                    hidden_TE = hidden_TE[upload(self.device, inputs.sampled.token_rows)[0]]
                step = self._sample(
                    inputs, hidden_TE, scheduler_output.grammar_bitmask, None if has_tables else forward
                )
                if self.drafting is not None and scheduler_output.num_drafts_wanted:
                    step.draft = self.drafting.after(scheduler_output, inputs.sampled, hidden_TE)
            step.prompt_logprobs, step.pooled = prompt_logprobs, pooled
            return step

    def _forwards(self) -> list[Forward]:
        """The ways of computing a step, the fastest first."""
        if self._eager is None:
            last_token_ids = self.last_token_ids if self._runs_ahead else None
            self._eager = EagerForward(self.model, self.kv_caches, self.batch, last_token_ids, self.group_ids)
            recordable = self.model.recordable
            is_alone = self.parallel.world_size == 1 and self.parallel.expert_group is None
            if recordable is not None and self.device.type == "cpu" and is_alone:
                self._recorded = RecordedForward(recordable, self.kv_caches, self.batch, last_token_ids, self.group_ids)
        return [one for one in (self.graphs, self._recorded, self._eager) if one is not None]

    def _sample(
        self, inputs: StepInputs, hidden_RE: torch.Tensor, bitmask: GrammarBitmask | None, forward: Forward | None
    ) -> SubmittedStep:
        """Sample the rows whose hidden states are given, with the `forward` that computed them if there is one and it
        can, and let the batch count the tokens."""
        batch, sampled, output, is_stored = self.batch, inputs.sampled, None, False
        verified = None if self.drafting is None else self.drafting.to_verify(sampled)
        own = forward if isinstance(forward, (DecodeGraphs, RecordedForward)) and forward.samples else None
        if (
            own is not None and inputs.samples_every_token and bitmask is None and verified is None
            and batch.are_plain(sampled.slots)
        ):  # fmt: skip
            output, is_stored = SamplerOutput(own.sample(inputs)), own is self.graphs
        else:
            logits_RV = self._logits(hidden_RE, sampled.slots)
            if logits_RV is not None:
                metadata = sampling_metadata(batch, sampled, bitmask, self.device, verified)
                output = self.sampler(logits_RV, metadata)
        if self._runs_ahead and not is_stored:
            self._store_last_token_ids(sampled.slots, output)
        if output is None and not self._runs_ahead:
            return SubmittedStep()  # the tokens come with the request's next step
        pending = None if output is None else PendingTokens(batch, sampled, output)
        batch.expect_tokens(sampled.slots_without_drafts)
        return SubmittedStep(pending)

    def _logits(self, hidden_RE: torch.Tensor, slots_R: Int64Array) -> torch.Tensor | None:
        with self._own_tables(slots_R):
            return self.model.compute_logits(hidden_RE)

    def _logits_of_one(self, slot: int, hidden_RE: torch.Tensor) -> torch.Tensor | None:
        """Logits of one request's rows."""
        return self._logits(hidden_RE, np.full(len(hidden_RE), slot))

    @contextlib.contextmanager
    def _own_tables(self, slots_R: Int64Array) -> Iterator[bool]:
        """Inside the block, rows of requests in these slots have the embeddings and the logits of their adapters' own
        tables. Yields whether any of them has such an adapter."""
        step = self.model.step_adapters if isinstance(self.model, Decoder) else None
        if step is None or not step.with_tables:
            yield False
            return
        adapters_R = self.batch.adapter_slots[slots_R]
        found = {slot: np.flatnonzero(adapters_R == slot) for slot in sorted(step.with_tables)}
        step.rows_with_tables = {slot: upload(self.device, rows)[0] for slot, rows in found.items() if len(rows)}
        try:
            yield bool(step.rows_with_tables)
        finally:
            step.rows_with_tables = {}

    def _store_last_token_ids(self, slots: Int64Array, output: SamplerOutput | None) -> None:
        """Store the tokens for the next step, on all ranks: the others contribute zeros to the sum."""
        (slots_R,) = upload(self.device, slots)
        token_ids_R = torch.zeros_like(slots_R) if output is None else output.token_ids_S
        group = self.parallel.tensor_group
        if group is not None:
            token_ids_R = group.all_reduce(token_ids_R.clone())
        # For a slot with drafts this may store any of its tokens: the next step gets them from the host.
        self.last_token_ids[slots_R] = token_ids_R

    def _prompt_logprobs(self, inputs: StepInputs, hidden_TE: torch.Tensor) -> dict[str, PromptLogprobs]:
        """Score the prompt tokens after those computed in this step, for the requests that return this."""
        batch, result = self.batch, {}
        for i in np.flatnonzero(batch.num_prompt_logprobs[inputs.slots] != NO_LOGPROBS).tolist():
            slot, row, number = inputs.slots[i], inputs.query_start_loc[i], inputs.num_scheduled[i]
            start = int(inputs.positions[row]) + 1
            end = min(start + int(number), int(batch.num_prompt_tokens[slot]))
            if start < end:
                scores = compute_prompt_logprobs(
                    partial(self._logits_of_one, slot),
                    hidden_TE[row : row + end - start],
                    upload(self.device, batch.token_ids[slot, start:end])[0],
                    start,
                    int(batch.num_prompt_logprobs[slot]),
                    batch.vocab_size,
                )
                if scores is not None:
                    result[inputs.request_ids[i]] = scores
        return result

    def _pool(self, inputs: StepInputs, hidden_TE: torch.Tensor) -> dict[str, torch.Tensor]:
        """Hand hidden states to the pools of requests that have one; returns the results of complete prompts."""
        results: dict[str, torch.Tensor] = {}
        if not self.parallel.is_output_rank:
            return results
        starts, ends = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        sums_SE: torch.Tensor | None = None
        for i, slot in enumerate(inputs.slots.tolist()):
            pool = self.batch.pools.get(slot)
            if pool is not None:
                first, last = starts[i], starts[i + 1]
                if isinstance(pool, MeanPool):
                    if sums_SE is None:
                        sums_SE = sum_rows(hidden_TE, torch.from_numpy(inputs.query_start_loc))
                    pool.add_sum(sums_SE[i], last - first)
                else:
                    pool.add(hidden_TE[first:last], inputs.token_ids[first:last], ends[i] - (last - first))
                if ends[i] == self.batch.num_prompt_tokens[slot]:
                    results[inputs.request_ids[i]] = self.pooler.finish(pool)
        return results

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.dropped_request_ids:
            if self.drafting is not None:
                self.drafting.forget(request_id)
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
        if self.drafting is not None:
            self.drafting.update_blocks(scheduler_output)
        for request_id, token_ids in scheduler_output.draft_token_ids.items():
            self.batch.place_drafts(request_id, token_ids)

    def _append_new_tokens(self, cached: CachedRequestData) -> None:
        slots = np.fromiter((self.batch.slots[request_id] for request_id in cached.request_ids), dtype=np.int64)
        self.batch.settle_lists(slots, self.batch.num_known_tokens[slots], cached.new_token_ids)
