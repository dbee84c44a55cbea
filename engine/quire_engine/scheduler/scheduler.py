"""Scheduler: which tokens of which requests are computed in the next step.

There is no prefill and no decode here. Each request has `num_tokens` tokens, and `num_computed_tokens` of them are in
the KV cache. A step moves the second number towards the first, under one token budget:

1. Running requests, oldest first. When the blocks run out, the youngest running request is preempted: its blocks are
   freed and it waits at the front of the queue, to be computed again. The oldest is never preempted, so there is always
   progress (a request that alone could not fit was rejected before it came here).
2. Waiting requests, while budget, blocks and `max_num_seqs` allow. A prefix found in the cache counts as computed.

The policy decides the order, and how much of a step prompts may take (`policy`): "fcfs" as above; "priority" orders
both by priority value, then by arrival; "slo" by the time that each request has left (`slo_policy`).

A prompt that exceeds the budget takes several steps (`StepBudget`), each of which leaves a token for every running
request after it; where attention is not causal, a prompt waits for a step that has room for all of it, and a part of a
prompt that is bidirectional for one that has room for the part.
`worker_knowledge` decides what to send to the workers, and `results` processes their results.

Several steps may be in flight; the chunks of a prompt follow each other at once.

- With a pipeline, a request whose next token is in flight has nothing left to compute and is passed over. A step takes
  at most its share of the decodes, so that each stage has something to compute.
- With async scheduling, such a token counts as left to compute (`num_output_placeholders`): the worker has it where the
  next step needs it. Three kinds of requests are passed over: those whose last token is in flight, those whose next
  token depends on the values of earlier ones in ways that the host has to compute (`needs_token_values`), and those
  that are to be drafted for (`waits_for_drafts`). A stop token is seen one step late; what was computed for the request
  in the meantime is dropped.

3. Tokens left in the step's budget may go to drafts (`drafter`), as far as blocks are left and grammars allow them. No
   step goes on after them until the result is known, which takes back the rejected ones::

    num_computed_tokens     7 ──── schedule: 1 and 3 drafts ────► 11 ──── update: 1 draft was right ────► 9

A step is complete when `schedule` returns it: the bitmask of its grammars is a part of it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, count, islice

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import (
    EngineCoreOutput,
    ErrorCode,
    FinishReason,
    GrammarBitmask,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire_engine.scheduler.adapters import AdapterScheduler
from quire_engine.scheduler.drafter import Drafter
from quire_engine.scheduler.fault_isolation import FaultIsolation
from quire_engine.scheduler.grammar import GrammarError
from quire_engine.scheduler.kv_connector import KVConnector
from quire_engine.scheduler.limits import RequestLimits
from quire_engine.scheduler.policy import PriorityPolicy, SchedulingPolicy, StepBudget, StepPlan
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.request_queue import FCFSRequestQueue, RequestQueue
from quire_engine.scheduler.results import take_result
from quire_engine.scheduler.slo_policy import SLOPolicy
from quire_engine.scheduler.worker_knowledge import WorkerKnowledge
from quire_engine.snapshot import RequestSnapshot
from quire_engine.stats import SchedulerStats, StepStats
from quire_engine.timeline import PhaseChange

FillBitmask = Callable[
    [Sequence[Request], Mapping[str, Sequence[int]]],
    tuple[GrammarBitmask | None, list[tuple[Request, int]], list[tuple[Request, GrammarError]]],
]
"""(sampled requests with a grammar, drafts by request) → their rows; how many drafts are left to the requests whose
grammar does not allow all of theirs; the requests that cannot go on."""

LOADING_TURN_SECONDS = 0.002
"""While all requests wait for blocks that are being loaded, time between two looks at them."""


class Scheduler:
    """Owns the requests from admission to their end.

    Args:
        config: budgets, limits and the policy.
        kv_cache: to allocate blocks from.
        clock: seconds, monotonic; measures deadlines and delays.
        drafter: gives drafts what a step has left; unset: no tokens are drafted.
        connector: keeps blocks beside the KV cache, and loads them; unset: they are nowhere else.
        adapters: decides which LoRA adapters are loaded and used; unset: no request has one.
        fill_bitmask: of requests with a grammar; unset: all tokens are allowed.
        on_begin: called before anything is computed for a request, with the number of its message.
        pipeline_parallel_size: stages of the model; each gets a step of its own.
        async_scheduling: whether a step may go on after tokens that are not known yet.
        sends_new_token_ids: whether to send sampled tokens, because there are ranks that do not sample; with async
            scheduling, only those of requests with drafts.
        computes_whole_prompts: each prompt in one step, as attention is not causal; a step has room for the longest.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        *,
        drafter: Drafter | None = None,
        connector: KVConnector | None = None,
        adapters: AdapterScheduler | None = None,
        fill_bitmask: FillBitmask | None = None,
        on_begin: Callable[[int], None] = lambda message_number: None,
        pipeline_parallel_size: int = 1,
        async_scheduling: bool = False,
        sends_new_token_ids: bool = False,
        computes_whole_prompts: bool = False,
    ) -> None:
        self.config = config
        self.async_scheduling = async_scheduling
        self._pipeline_parallel_size = pipeline_parallel_size
        self._computes_whole_prompts = computes_whole_prompts
        self._num_steps = 0
        self.kv_cache = kv_cache
        self.requests: dict[str, Request] = {}
        self.policy = _make_policy(config, kv_cache, clock)
        self.waiting = self.policy.queue
        self.running: list[Request] = []
        """In the order in which they get their tokens; the last one is preempted first."""
        self.num_preemptions = 0
        self.num_failed_steps = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.waiting_for_fsm = FCFSRequestQueue()
        """Requests that wait for their grammars. They join the waiting queue when these are ready."""
        self._structured: dict[str, Request] = {}
        """Live requests with a grammar."""
        self._worker_knowledge = WorkerKnowledge(sends_new_token_ids, ranks_tell_each_other=async_scheduling)
        self._drafter = drafter
        self._connector = connector
        self.adapters = adapters
        self._fill_bitmask = fill_bitmask
        self._on_begin = on_begin
        self._isolation = FaultIsolation()
        self._clock = clock
        self._limits = RequestLimits(config, clock)
        self._arrivals = count()
        self._ended: list[EngineCoreOutput] = []
        """Outputs of requests that ended without a step: rejected, or overdue."""
        self._phase_changes: list[PhaseChange] = []
        """Since they were last taken, with their times on the clock."""

    def close(self) -> None:
        """End what it has open; nothing follows."""
        if self._connector is not None:
            self._connector.close()

    def use_connector(self, connector: KVConnector) -> None:
        """Replace the connector after a change of weights, whose blocks have another namespace. No request is live."""
        self.close()
        self._connector = connector

    # -- requests come and go ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Let a validated request wait for its turn."""
        request.arrival = next(self._arrivals)
        request.queued_at = self._clock()
        request.last_stale_step = self._num_steps  # they may hold an earlier request with the same id
        self.requests[request.request_id] = request
        if self._drafter is not None:
            self._drafter.take_note(request)
        if request.is_replay and not request.was_prefilled:
            request.note_event("replayed", request.queued_at, request.num_output_tokens)
        self._limits.watch(request, self.requests)
        if request.needs_grammar:
            request.status = RequestStatus.WAITING_FOR_FSM
            self.waiting_for_fsm.add(request)
            return
        if request.grammar is not None:
            self._structured[request.request_id] = request
        self._let_wait(request)

    def grammar_is_ready(self, request: Request) -> None:
        """Move a request whose grammar is ready to the waiting queue, unless it was aborted before."""
        if request in self.waiting_for_fsm:
            self.waiting_for_fsm.remove(request)
            request.status = RequestStatus.WAITING
            request.grammar_seconds = self._clock() - request.queued_at
            self._structured[request.request_id] = request
            self._let_wait(request)

    def _let_wait(self, request: Request) -> None:
        """Put a new request into the waiting queue, or let it wait for its adapter first."""
        if self.adapters is None or not self.adapters.hold(request):
            self.waiting.add(request)

    def has_requests(self) -> bool:
        """Whether there is anything to schedule or to return."""
        connector, adapters = self._connector, self.adapters
        num_held = self._num_queued - len(self.waiting)
        if len(self.requests) > num_held or self._ended or (connector is not None and connector.has_work()):
            return True
        if adapters is not None and adapters.has_work():
            return True
        return num_held > 0 and self._limits.has_work(self._held_back)

    def seconds_until_overdue(self) -> float | None:
        """Time until a request that waits for its grammar, for blocks or for its adapter, may be overdue or may have
        them; None if that cannot happen."""
        is_loading = bool(self._connector is not None and self._connector.loading)
        is_loading |= self.adapters is not None and self.adapters.is_loading
        if self._num_queued == len(self.waiting) and not is_loading:
            return None
        seconds = self._limits.seconds_until_overdue()
        if is_loading and (seconds is None or seconds > LOADING_TURN_SECONDS):
            return LOADING_TURN_SECONDS
        return seconds

    def finish_request(self, request_id: str) -> Request | None:
        """End a request, running or waiting, and free its blocks at once; None if its id is unknown."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if self.adapters is not None:
            self.adapters.request_ended(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._worker_knowledge.drop(request_id)
            self._limits.request_ended()
        else:
            next(queue for queue in self._queues if request in queue).remove(request)
        self._isolation.request_ended(request)
        self.policy.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)
        request.status = RequestStatus.FINISHED
        self._structured.pop(request_id, None)
        self.kv_cache.free(request)
        if not self.requests:
            self._limits.nothing_left()
        return request

    def reject(self, request: Request, error: GrammarError) -> list[EngineCoreOutput]:
        """End a request because of its grammar, unless it has ended before; returns its output."""
        if self.requests.get(request.request_id) is not request:
            return []
        self.finish_request(request.request_id)
        return [
            EngineCoreOutput(
                request.request_id,
                finish_reason=FinishReason.ERROR,
                error=str(error),
                error_parameter=error.parameter,
                error_code=ErrorCode.UNAVAILABLE if error.is_unavailable else None,
                num_preemptions=request.num_preemptions,
            )
        ]

    @property
    def _queues(self) -> tuple[RequestQueue, ...]:
        """All queues that a request can wait in."""
        queues: tuple[RequestQueue, ...] = (
            self.waiting, self.waiting_for_fsm, self._isolation.suspects, self._isolation.cleared
        )  # fmt: skip
        if self.adapters is not None:
            queues = (*queues, self.adapters.waiting)
        return queues if self._connector is None else (*queues, self._connector.loading)

    @property
    def _held_back(self) -> Collection[Request]:
        """Requests that wait for a grammar or an adapter, and count as queued."""
        if self.adapters is None or not self.adapters.waiting:
            return self.waiting_for_fsm
        return [*self.waiting_for_fsm, *self.adapters.waiting]

    @property
    def _num_queued(self) -> int:
        """Requests that were not scheduled yet, or were preempted."""
        num_loading = len(self._connector.loading) if self._connector is not None else 0
        num_held = len(self.waiting_for_fsm) + (len(self.adapters.waiting) if self.adapters is not None else 0)
        return len(self.waiting) + num_held + num_loading

    @property
    def _runs_ahead(self) -> bool:
        """Whether a step may go on after tokens that are not known yet. In isolation each token has to be known."""
        return self.async_scheduling and not self._isolation.is_active

    # -- one step ---------------------------------------------------------------------------------------------------

    def schedule(self, generation: int | None = None) -> SchedulerOutput:
        """Choose the next step and reserve its blocks.

        `num_computed_tokens` advances here, not when the result comes, so that the next step can be planned at once.
        The step is empty if all remaining requests were overdue or rejected, or if everything that could be computed is
        in flight.

        Args:
            generation: of the step; see `SchedulerOutput`.
        """
        for request, code in self._limits.overdue(self.requests):
            if self.finish_request(request.request_id) is not None:
                self._ended.append(self._limits.overdue_output(request, code, self._num_queued))
        for request, rejection in self.policy.rejections(self.running, self._num_queued):
            self.finish_request(request.request_id)
            self._ended.append(rejection)
        self._num_steps += 1
        self.kv_cache.begin_step()
        output = SchedulerOutput(num_scheduled_tokens={}, step=self._num_steps, generation=generation)
        if self._connector is not None:
            self._connector.begin_step(output)
        if self.adapters is not None:
            for failure in self.adapters.begin_step(output, self.waiting):
                self.finish_request(failure.request_id)
                self._ended.append(failure)
        isolation = self._isolation
        for request in reversed(isolation.take_cleared()):
            self.waiting.prepend(request)
        num_preemptions = self.num_preemptions
        plan = None if isolation.is_active else self.policy.plan(self.running)
        budget = self._schedule_running(output, plan)
        if isolation.suspects and isolation.isolated is None:
            self._admit(isolation.suspects, output, budget, max_running=1)
            isolation.isolated = self.running[0]
        elif isolation.isolated is None and self.num_preemptions == num_preemptions:
            max_running = self.config.max_num_seqs if plan is None else plan.max_running
            if self._connector is None or self._connector.place_loaded(self.waiting):
                self._admit(self.waiting, output, budget, max_running, self._connector)
        if plan is not None and not output.num_scheduled_tokens:  # what was to come before others could not
            budget = self._schedule_running(output, None)
        excess = self._limits.excess(self.waiting, self._held_back)
        for request in excess:
            self.finish_request(request.request_id)
        self._ended += [self._limits.excess_output(request, self._num_queued) for request in excess]
        drafter = None if isolation.is_active else self._drafter  # a suspect must not fail because of a draft
        drafts = {} if drafter is None else self._choose_drafts(drafter, output, budget.num_tokens)
        failed = self._check_grammars(output, drafts) if self._structured else []
        for request_id, token_ids in drafts.items():
            output.num_scheduled_tokens[request_id] += len(token_ids)
            output.draft_token_ids[request_id] = token_ids
            self.requests[request_id].num_computed_tokens += len(token_ids)
        if drafter is not None:
            self._want_drafts(drafter, output, budget.num_tokens)
        if self._connector is not None:
            self._connector.end_step(output)
        self._worker_knowledge.complete(output, self.requests)
        for request, error in failed:  # they take part in this step all the same
            self._ended += self.reject(request, error)
        return output

    def structured_requests_to_sample(self, output: SchedulerOutput) -> list[Request]:
        """The requests with a grammar whose last token this step computes.

        None of their tokens are in flight, as they never have placeholders, so their grammars are up to date.
        """
        return [
            request
            for request_id, request in self._structured.items()
            if request_id in output.num_scheduled_tokens and request.num_computed_tokens >= request.num_tokens
        ]

    def _schedule_running(self, output: SchedulerOutput, plan: StepPlan | None) -> StepBudget:
        """Part 1; returns the remaining budget.

        Passes over requests that have to wait for what is in flight, and decodes that exceed this step's share.
        """
        running, num_tokens = self.running, self.config.max_num_batched_tokens
        budget = StepBudget(num_tokens, self.config.long_prefill_token_threshold)
        scheduled, cached = output.num_scheduled_tokens, output.cached_requests
        request_ids, new_block_ids, computed = cached.request_ids, cached.new_block_ids, cached.num_computed_tokens
        share = -(-len(running) // self._pipeline_parallel_size)
        runs_ahead = self._runs_ahead
        index = 0
        while index < len(running) and num_tokens > 0:
            request = running[index]
            num_computed_tokens = request.num_computed_tokens
            num_left = len(request.all_token_ids) + request.num_output_placeholders - num_computed_tokens
            num_new_tokens = num_left
            if num_left > 1:
                num_new_tokens = budget.chunk(num_left, max(num_tokens - (len(running) - index - 1), 1))
                if plan is not None:
                    num_new_tokens = min(num_new_tokens, plan.shares.get(request.request_id, 0))
                if num_new_tokens == 0:
                    index += 1
                    continue
                if request.prompt_parts:
                    num_new_tokens = request.with_whole_parts(num_computed_tokens, num_new_tokens, num_tokens)
                    if num_new_tokens == 0:
                        index += 1
                        continue
                request.note_event("prefill_chunk", self._clock(), num_new_tokens)
            elif num_left <= 0 or len(scheduled) >= share:
                index += 1
                continue
            block_ids: list[int] = []
            if num_computed_tokens + num_new_tokens > request.no_allocation_until:
                allocated = self._allocate_or_preempt(request, num_new_tokens)
                if allocated is None:
                    break
                block_ids = allocated
            if num_new_tokens < num_left:
                budget.has_partial_prefill = True
            elif runs_ahead:
                request.add_output_placeholder()
            scheduled[request.request_id] = num_new_tokens
            request_ids.append(request.request_id)
            new_block_ids.append(block_ids)
            computed.append(num_computed_tokens)
            request.num_computed_tokens = num_computed_tokens + num_new_tokens
            num_tokens -= num_new_tokens
            index += 1
        if plan is not None and not self._computes_whole_prompts:
            num_tokens = min(num_tokens, plan.num_new_tokens)
        budget.num_tokens = num_tokens
        return budget

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Allocate blocks for a running request, preempting from the end of `running` as long as they do not suffice.
        What its next token does not see any more is freed first.

        Preempted requests come after it in `running`, so this step has not scheduled any of them. Returns the new block
        ids, or None if the request itself was preempted."""
        self.kv_cache.free_behind_windows(request)
        while (block_ids := self.kv_cache.allocate_slots(request, num_new_tokens)) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _admit(
        self,
        queue: RequestQueue,
        output: SchedulerOutput,
        budget: StepBudget,
        max_running: int,
        connector: KVConnector | None = None,
    ) -> None:
        """Part 2: let waiting requests run, in order; the first that does not fit holds back those after it.

        A request whose blocks can be loaded leaves the queue instead, until they are.

        A request that would be a second partial prefill is passed over, and comes first again in the next step.
        """
        passed_over: list[Request] = []
        runs_ahead = self._runs_ahead
        while queue and budget.num_tokens > 0 and len(self.running) < max_running and len(passed_over) <= max_running:
            request = queue.peek()
            computed_blocks = self.kv_cache.get_computed_blocks(request)
            num_hit_tokens = self.kv_cache.num_computed_tokens(computed_blocks)
            if connector is not None and connector.begin_load(request, num_hit_tokens // self.kv_cache.block_size):
                queue.pop()
                continue
            num_left = request.num_tokens - num_hit_tokens
            num_new_tokens = budget.chunk(num_left, budget.num_tokens)
            if request.prompt_parts:
                room = self.config.max_num_batched_tokens - sum(output.num_scheduled_tokens.values())
                num_new_tokens = request.with_whole_parts(num_hit_tokens, num_new_tokens, room)
            if num_new_tokens == 0 or (num_new_tokens < num_left and self._computes_whole_prompts):
                break
            if num_new_tokens < num_left and budget.has_partial_prefill:
                passed_over.append(queue.pop())
                continue
            if self.kv_cache.allocate_slots(request, num_new_tokens, computed_blocks) is None:
                break
            queue.pop()
            if request.scheduled_at is None:
                request.scheduled_at = self._clock()
                self._phase_changes.append((request.request_id, "scheduled", request.scheduled_at))
                request.num_cached_tokens = num_hit_tokens
                if self.adapters is not None:
                    self.adapters.begin(request)
                if self.kv_cache.enable_prefix_caching and not request.skip_reading_prefix_cache:
                    self.prefix_cache_queries += request.num_tokens
                self.prefix_cache_hits += num_hit_tokens
            request.note_event("scheduled", self._clock(), num_new_tokens)
            request.num_computed_tokens = num_hit_tokens
            request.status = RequestStatus.RUNNING
            self.policy.place(self.running, request, num_new_tokens)
            output.num_scheduled_tokens[request.request_id] = num_new_tokens
            self._worker_knowledge.introduce(request, self.kv_cache.get_block_ids(request.request_id), output)
            self._on_begin(request.message_number)
            request.num_computed_tokens += num_new_tokens
            if num_new_tokens < num_left:
                budget.has_partial_prefill = True
            elif runs_ahead:
                request.add_output_placeholder()
            budget.num_tokens = max(budget.num_tokens - num_new_tokens, 0)
        for request in reversed(passed_over):
            queue.prepend(request)

    def _choose_drafts(self, drafter: Drafter, output: SchedulerOutput, num_tokens: int) -> dict[str, list[int]]:
        """Part 3: the drafts that the step computes if the grammars allow them, with blocks for them."""
        drafts: dict[str, list[int]] = {}
        for index, request, token_ids in drafter.choose(output, self.requests, num_tokens):
            block_ids = self.kv_cache.allocate_slots(request, len(token_ids)) if token_ids else None
            if block_ids is not None:
                output.cached_requests.new_block_ids[index] += block_ids
                drafts[request.request_id] = token_ids
            elif self._runs_ahead:  # it may back off from now on, and so does not wait
                request.add_output_placeholder()
        return drafts

    def _check_grammars(
        self, output: SchedulerOutput, drafts: dict[str, list[int]]
    ) -> list[tuple[Request, GrammarError]]:
        """Set the step's bitmask, and drop the drafts that a grammar does not allow. Returns the requests that cannot
        go on."""
        structured = self.structured_requests_to_sample(output)
        if not structured or self._fill_bitmask is None:
            return []
        output.grammar_bitmask, cut, failed = self._fill_bitmask(structured, drafts)
        for request, num_left in cut:
            token_ids = drafts.pop(request.request_id)
            if num_left:
                drafts[request.request_id] = token_ids[:num_left]
        return failed

    def _want_drafts(self, drafter: Drafter, output: SchedulerOutput, num_tokens: int) -> None:
        """Let the workers draft at the end of the step, with blocks for the keys and values of the model that does."""
        wanted = drafter.wanted(output, self.requests, num_tokens)
        if not wanted:
            return
        cached = output.cached_requests
        block_ids = dict(zip(cached.request_ids, cached.new_block_ids, strict=True))
        block_ids |= {new.request_id: new.block_ids for new in output.new_requests}
        for request_id, number in wanted.items():
            added = self.kv_cache.allocate_slots(self.requests[request_id], number)
            if added is not None:
                block_ids[request_id] += added
                output.num_drafts_wanted[request_id] = number
        output.least_draft_chance, output.draft_chances = drafter.least_chance, drafter.chances

    def _preempt(self, request: Request) -> None:
        """Put a request that leaves `running`, for lack of blocks, at the front of the waiting queue."""
        request.note_event("preempted", self._clock(), request.num_computed_tokens)
        self._release(request)
        self.waiting.prepend(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        """Reset a request that leaves `running`, and free its blocks; the caller puts it in a queue.

        Its tokens are computed again later, except for those that the prefix cache still holds.
        """
        self.kv_cache.free(request)
        self._phase_changes.append((request.request_id, "preempted", self._clock()))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.last_stale_step = self._num_steps
        self._worker_knowledge.drop(request.request_id)

    # -- the result -------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append the sampled tokens, take back rejected drafts, end complete requests, and return the new output.

        Args:
            scheduler_output: a step; they come in the order in which they were scheduled.
            runner_output: its result.
        """
        outputs, self._ended = self._ended, []
        if self._connector is not None:
            self._connector.step_succeeded(scheduler_output.step)
        if self._drafter is not None:
            self._drafter.take_result(scheduler_output, runner_output, self.requests)
        new, complete, first = take_result(self.requests, scheduler_output, runner_output)
        outputs += new
        for output in first:
            self.requests[output.request_id].note_event("first_token", self._clock(), len(output.new_token_ids))
        self.policy.take_result(scheduler_output, new)
        for request_id in complete:
            self.finish_request(request_id)
        isolated = self._isolation.isolated
        if isolated is not None and isolated.request_id in runner_output.sampled_token_ids:
            self.running.remove(isolated)
            self._release(isolated)
            self._isolation.clear()
        return outputs

    def recover_from_failed_step(
        self, scheduler_output: SchedulerOutput, error: str, *, was_submitted: bool = True, was_aborted: bool = False
    ) -> list[EngineCoreOutput]:
        """Undo a step that raised, and find the request that caused it. No other step may be in flight any more.

        1. A request that failed alone is the faulty one and ends with `error`. There is one exception: the step was
           aborted because of another step in flight, which may hold another request. An isolated request is faulty
           even then, as all steps in flight are its own.
        2. If there were several, each is a suspect: they are computed again one at a time, ahead of all others, until
           each has survived one token. The faulty one then fails alone, and the others go on.
        3. The blocks of the step may hold anything, so the prefix cache is reset.
        4. If the workers never received the step, its dropped requests are sent again with the next one.
        """
        if not was_submitted:
            self._worker_knowledge.step_was_not_sent(scheduler_output)
            if self.adapters is not None:
                self.adapters.step_was_not_sent(scheduler_output)
        scheduled = list(scheduler_output.num_scheduled_tokens)
        outputs, self._ended = self._ended, []
        if len(scheduled) == 1:
            faulty = self.requests.get(scheduled[0])  # it may have ended or been taken back while the step ran
            if faulty is not None and (
                faulty.last_stale_step < scheduler_output.step
                and (not was_aborted or faulty is self._isolation.isolated)
            ):
                self.finish_request(faulty.request_id)
                outputs.append(EngineCoreOutput(scheduled[0], finish_reason=FinishReason.ERROR, error=error))
        self.num_failed_steps += 1
        suspects, self.running = self.running, []
        for request in reversed(suspects):
            self._release(request)
        self._isolation.add_suspects(suspects)
        self.kv_cache.reset_prefix_cache()
        if self._connector is not None:
            self._connector.step_failed(self.waiting)
        return outputs

    def take_back_step(self) -> list[EngineCoreOutput]:
        """Undo a step that ended because steps of other engines failed: no request here is the cause.

        What was running is computed again, first of all; a suspect that ran alone does so again.
        """
        outputs, self._ended = self._ended, []
        running, self.running = self.running, []
        isolated = self._isolation.isolated
        for request in reversed(running):
            self._release(request)
            if request is isolated:
                self._isolation.add_suspects([request])
            else:
                self.waiting.prepend(request)
        self.kv_cache.reset_prefix_cache()
        return outputs

    def take_phase_changes(self) -> list[PhaseChange]:
        """Requests that had their first step or lost their blocks since this was last called, and how long ago."""
        if not self._phase_changes:
            return []
        now, changes, self._phase_changes = self._clock(), self._phase_changes, []
        return [(request_id, kind, now - at) for request_id, kind, at in changes]

    def note_step_seconds(self, step: StepStats, seconds: float, work_seconds: float) -> None:
        """Note how long a step took in all: it decides what can be had in time, and what drafts are worth.

        Args:
            step: what it computed.
            seconds: that passed.
            work_seconds: the same on the executor's clock.
        """
        self.policy.note_step_seconds(seconds)
        if self._drafter is not None:
            self._drafter.note_step_seconds(step, work_seconds)

    @property
    def num_steps(self) -> int:
        """Scheduled steps, including empty ones."""
        return self._num_steps

    def request_snapshots(self, max_waiting: int) -> list[RequestSnapshot]:
        """The running requests in their order, then at most `max_waiting` waiting ones in theirs."""
        now = self._clock()
        loading = () if self._connector is None else self._connector.loading
        waiting = chain(self._isolation.cleared, self._isolation.suspects, loading, self.waiting, self._held_back)
        return [
            request.snapshot(now, self.kv_cache.num_blocks_of(request.request_id), self.policy.outlook(request, now))
            for request in chain(self.running, islice(waiting, max_waiting))
        ]

    def make_stats(self) -> SchedulerStats:
        """The present numbers."""
        pool = self.kv_cache.block_pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=sum(len(queue) for queue in self._queues),
            num_blocks_used=self.kv_cache.num_blocks - pool.num_free_blocks,
            num_blocks_cached=pool.num_cached_free_blocks,
            num_blocks_free=pool.num_free_blocks - pool.num_cached_free_blocks,
            prefix_cache_queries=self.prefix_cache_queries,
            prefix_cache_hits=self.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            num_failed_steps=self.num_failed_steps,
            num_waiting_for_fsm=len(self.waiting_for_fsm),
            num_loading=0 if self._connector is None else len(self._connector.loading),
            num_block_evictions=pool.num_evictions,
            drafts=None if self._drafter is None else self._drafter.stats.copy(),
            kv_connector=None if self._connector is None else self._connector.make_stats(),
            adapters=None if self.adapters is None else self.adapters.make_stats(),
            num_states_used=pool.num_states - pool.num_free_states,
            num_states_cached=pool.free_states.num_cached,
            num_states_free=pool.num_free_states - pool.free_states.num_cached,
        )

    def check_integrity(self) -> None:
        """Check the blocks, and that every request is in exactly one place.

        Raises:
            AssertionError: a request or a block is lost, or shared by mistake.
        """
        self.kv_cache.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity()
        places = [*self.running, *(request for queue in self._queues for request in queue)]
        assert len(places) == len(self.requests), "a request is in no queue, or in two"
        assert {id(request) for request in places} == {id(request) for request in self.requests.values()}


def _make_policy(config: SchedulerConfig, kv_cache: KVCacheManager, clock: Callable[[], float]) -> SchedulingPolicy:
    match config.scheduling_policy:
        case "priority":
            return PriorityPolicy()
        case "slo":
            return SLOPolicy(config, kv_cache, clock)
    return SchedulingPolicy()
