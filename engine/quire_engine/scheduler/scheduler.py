"""Scheduler: which tokens of which requests are computed in the next step.

There is no prefill and no decode here. Each request has `num_tokens` tokens of which `num_computed_tokens` are in the
KV cache, and a step moves the second number towards the first, under one token budget:

1. Running requests, oldest first. When the blocks run out, the youngest running request is preempted: its blocks are
   freed and it waits at the front of the queue, to be computed again. The oldest is never preempted, so there is always
   progress (a request that alone could not fit was refused before it came here).
2. Waiting requests, while budget, blocks and `max_num_seqs` allow. A prefix found in the cache counts as computed.

A long prompt that exceeds the budget simply gets what is left of it: chunked prefill.
"""

import time

import msgspec

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire_engine.request import FinishReason, Request, RequestStatus
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request_queue import FCFSRequestQueue
from quire_engine.stats import SchedulerStats

__all__ = ["Scheduler"]


def _without_grammar(params: SamplingParams) -> SamplingParams:
    """What a worker needs: it gets bitmasks, and has no use for a schema that may be long."""
    return params if params.structured_outputs is None else msgspec.structs.replace(params, structured_outputs=None)


class Scheduler:
    """Owns the requests from admission to their end."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.requests: dict[str, Request] = {}
        self.waiting = FCFSRequestQueue()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_failed_steps = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.waiting_for_fsm: set[Request] = set()
        """Requests whose grammar is still being compiled. Their place in the queue dates from when it is ready."""
        self._structured: dict[str, Request] = {}
        """Live requests with a grammar."""
        self._dropped_request_ids: list[str] = []
        """Finished or preempted since the last step; the worker still has to hear of them."""
        self._suspects = FCFSRequestQueue()
        """Requests of a failed step, which wait to be tried one at a time."""
        self._trial: Request | None = None
        """The suspect that runs alone until it has survived one token."""
        self._acquitted = FCFSRequestQueue()
        """Suspects that have; they wait for the trials of the others."""

    # -- requests come and go ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Let a validated request wait for its turn."""
        self.requests[request.request_id] = request
        if request.needs_grammar:
            request.status = RequestStatus.WAITING_FOR_FSM
            self.waiting_for_fsm.add(request)
            return
        if request.grammar is not None:
            self._structured[request.request_id] = request
        self.waiting.add(request)

    def grammar_is_ready(self, request: Request) -> None:
        """Let a request wait for its turn now that it has its grammar, unless it was aborted before."""
        if request in self.waiting_for_fsm:
            self.waiting_for_fsm.remove(request)
            request.status = RequestStatus.WAITING
            self._structured[request.request_id] = request
            self.waiting.add(request)

    def has_requests(self) -> bool:
        """Whether there is anything to schedule."""
        return len(self.requests) > len(self.waiting_for_fsm)

    def finish_request(self, request_id: str) -> Request | None:
        """End a request wherever it is and free its blocks at once; None when it is not (any more) known."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._dropped_request_ids.append(request_id)
        elif request.status is RequestStatus.WAITING_FOR_FSM:
            self.waiting_for_fsm.remove(request)
        else:
            next(queue for queue in self._queues if request in queue).remove(request)
        if request is self._trial:
            self._trial = None
        request.status = RequestStatus.FINISHED
        self._structured.pop(request_id, None)
        self.kv_cache.free(request)
        return request

    @property
    def _queues(self) -> tuple[FCFSRequestQueue, ...]:
        """Everywhere that a request can wait."""
        return self.waiting, self._suspects, self._acquitted

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and reserve its blocks.

        `num_computed_tokens` is advanced here, not when the result comes: the next step could be planned already.
        """
        output = SchedulerOutput(num_scheduled_tokens={})
        budget = self.config.max_num_batched_tokens
        if self._acquitted and not self._suspects and self._trial is None:
            self._end_trials()
        budget, preempted = self._schedule_running(output, budget)
        if self._suspects and self._trial is None:
            self._admit(self._suspects, output, budget, max_running=1)
            self._trial = self.running[0]
        elif self._trial is None and not preempted:
            self._admit(self.waiting, output, budget, self.config.max_num_seqs)
        output.dropped_request_ids, self._dropped_request_ids = self._dropped_request_ids, []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        return output

    def structured_requests_to_sample(self, output: SchedulerOutput) -> list[Request]:
        """The requests with a grammar that this step computes the last token of."""
        return [
            request
            for request_id, request in self._structured.items()
            if request_id in output.num_scheduled_tokens and request.num_computed_tokens == request.num_tokens
        ]

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> tuple[int, bool]:
        """Part 1; returns the budget that is left, and whether anyone was preempted."""
        preempted = False
        cached = CachedRequestData(request_ids=[], new_block_ids=[], num_computed_tokens=[])
        output.cached_requests = cached
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new_tokens = self._chunk(request.num_tokens - request.num_computed_tokens, budget)
            block_ids = self.kv_cache.allocate_slots(request, num_new_tokens)
            while block_ids is None:
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
                block_ids = self.kv_cache.allocate_slots(request, num_new_tokens)
            if block_ids is None:
                break
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            cached.request_ids.append(request.request_id)
            cached.new_block_ids.append(block_ids)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            budget -= num_new_tokens
            index += 1
        return budget, preempted

    def _admit(self, queue: FCFSRequestQueue, output: SchedulerOutput, budget: int, max_running: int) -> None:
        """Part 2: let waiting requests run, in order; the first that does not fit holds back those behind it."""
        while queue and budget > 0 and len(self.running) < max_running:
            request = queue.peek()
            computed_blocks = self.kv_cache.get_computed_blocks(request)
            num_hit_tokens = len(computed_blocks) * self.kv_cache.block_size
            num_new_tokens = self._chunk(request.num_tokens - num_hit_tokens, budget)
            if self.kv_cache.allocate_slots(request, num_new_tokens, computed_blocks) is None:
                break
            queue.pop()
            if request.scheduled_at is None:
                request.scheduled_at = time.monotonic()
                request.num_cached_tokens = num_hit_tokens
                if self.kv_cache.enable_prefix_caching and not request.skip_reading_prefix_cache:
                    self.prefix_cache_queries += request.num_tokens
                self.prefix_cache_hits += num_hit_tokens
            request.num_computed_tokens = num_hit_tokens
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            output.new_requests.append(self._introduce(request))
            budget -= num_new_tokens

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """How many of a request's uncomputed tokens go into this step."""
        threshold = self.config.long_prefill_token_threshold
        return min(num_tokens, budget, threshold) if threshold else min(num_tokens, budget)

    def _preempt(self, request: Request) -> None:
        """Let a request that leaves `running` wait before all others, for lack of blocks."""
        self._release(request)
        self.waiting.prepend(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        """Take everything back from a request that leaves `running`; the caller lets it wait somewhere.

        What it computed is computed again later, as far as the prefix cache does not still hold it.
        """
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._dropped_request_ids.append(request.request_id)

    def _introduce(self, request: Request) -> NewRequestData:
        return NewRequestData(
            request_id=request.request_id,
            token_ids=request.all_token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=_without_grammar(request.sampling_params),
            stop_token_ids=sorted(request.ending_token_ids),
            block_ids=self.kv_cache.get_block_ids(request.request_id),
            num_computed_tokens=request.num_computed_tokens,
        )

    # -- what came of it --------------------------------------------------------------------------------------------

    def update_from_output(self, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append the sampled tokens, end what is complete, and tell what is new.

        A request that was aborted while the step ran is no longer known, and is passed over.
        """
        outputs = []
        for request_id, chunk in runner_output.prompt_logprobs.items():
            if request_id in self.requests:
                self.requests[request_id].add_prompt_logprobs(chunk)
        for request_id, new_token_ids in runner_output.sampled_token_ids.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            output = EngineCoreOutput(request_id, num_preemptions=request.num_preemptions)
            if request.num_output_tokens == 0 and request.scheduled_at is not None:
                output.queue_seconds = request.scheduled_at - request.queued_at
                output.num_cached_tokens = request.num_cached_tokens
                output.prompt_logprobs = request.take_prompt_logprobs()
            stopped: tuple[FinishReason, int | None] | None = None
            for token_id in new_token_ids:
                if request.grammar is not None and not request.grammar.accept_tokens([token_id]):
                    stopped = FinishReason.ERROR, None
                    output.error = (
                        "structured_outputs: no token that the grammar allows is left by the other parameters"
                    )
                    output.error_parameter = "structured_outputs"
                    break
                request.all_token_ids.append(token_id)
                output.new_token_ids.append(token_id)
                stopped = request.check_stop()
                if stopped:
                    break
            output.logprobs = runner_output.logprobs.get(request_id)
            if stopped:
                output.finish_reason, output.stop_reason = stopped
                self.finish_request(request_id)
            outputs.append(output)
        if self._trial is not None and self._trial.request_id in runner_output.sampled_token_ids:
            self.running.remove(self._trial)
            self._release(self._trial)
            self._acquitted.add(self._trial)
            self._trial = None
        return outputs

    def recover_from_failed_step(self, scheduler_output: SchedulerOutput, error: str) -> list[EngineCoreOutput]:
        """Undo a step that raised, and find out whose fault it was.

        1. A request that failed alone is the culprit and ends with `error`.
        2. Of several, each is a suspect: they are computed again one at a time, ahead of everybody else, until each
           has survived one token. The culprit comes to fail alone, and the others just go on.
        3. The blocks of the step may hold anything, so no cached prefix is trusted any more.
        """
        scheduled = list(scheduler_output.num_scheduled_tokens)
        outputs = []
        if len(scheduled) == 1:
            culprit = self.finish_request(scheduled[0])
            if culprit is not None:  # it may have been aborted while the step ran
                outputs.append(EngineCoreOutput(scheduled[0], finish_reason=FinishReason.ERROR, error=error))
        self.num_failed_steps += 1
        suspects, self.running, self._trial = self.running, [], None
        for request in reversed(suspects):
            self._release(request)
            self._suspects.prepend(request)
        self.kv_cache.reset_prefix_cache()
        return outputs

    def _end_trials(self) -> None:
        """Let the acquitted go on, in their old order and before all who wait."""
        for request in reversed(list(self._acquitted)):
            self._acquitted.remove(request)
            self.waiting.prepend(request)

    def make_stats(self) -> SchedulerStats:
        """The numbers of this moment."""
        pool = self.kv_cache.block_pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=sum(len(queue) for queue in self._queues) + len(self.waiting_for_fsm),
            num_blocks_used=self.kv_cache.num_blocks - pool.num_free_blocks,
            num_blocks_cached=pool.num_cached_free_blocks,
            num_blocks_free=pool.num_free_blocks - pool.num_cached_free_blocks,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            num_failed_steps=self.num_failed_steps,
            num_waiting_for_fsm=len(self.waiting_for_fsm),
        )

    def check_integrity(self) -> None:
        """Check the blocks, and that every request is in exactly one place.

        Raises:
            AssertionError: a request or a block was lost or shared wrongly.
        """
        self.kv_cache.check_integrity()
        places = [
            *self.running, *(request for queue in self._queues for request in queue), *self.waiting_for_fsm,
        ]  # fmt: skip
        assert len(places) == len(self.requests), "a request is in no queue, or in two"
        assert {id(request) for request in places} == {id(request) for request in self.requests.values()}
