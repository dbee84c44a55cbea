"""SLOPolicy: schedules for objectives, so that as many requests as possible meet theirs.

1. Order: the waiting request with the least slack comes next, by the latest moment at which it can begin and still have
   its first token in time. One that cannot make it any more gives way to the others (under overload, least slack alone
   makes all requests late). A request without objectives can wait for `PATIENCE_SECONDS`.
2. Admission: a request that will not have its first token in time because of those before it is rejected at once, or
   joins the late ones, as its class says. No request is rejected before the cost model has learned enough, nor one that
   would be late with the engine to itself: a retry would not help it.
3. Chunks: prompts have as many tokens of a step as the rows' time per token allows. A prompt that takes several steps
   pauses while others have less slack.
4. Share: one of `LATE_EVERY` steps computes the prompts of late requests first, in order of arrival. In the others late
   requests have what is left. A running request is preempted for lack of blocks alone.

::

    on time  │ by the latest moment at which they can begin     ──┐
             ▼ that moment has passed                             ├─► next: on time, or late when it is their turn
    late     │ by arrival                                       ──┘

Sources: SLOs-Serve (arXiv 2504.08784: admission by planned token budgets), Sarathi-Serve (2403.02310: chunks as large
as the time between tokens allows), QLM (2407.00047: waiting times from the work in the queue), Mooncake (2407.00079:
early rejection, by prediction).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import EngineCoreOutput, SchedulerOutput
from quire_engine.scheduler.forecast import Forecast, Upcoming
from quire_engine.scheduler.limits import SHORTEST_RETRY_SECONDS, unavailable
from quire_engine.scheduler.policy import SchedulingPolicy, StepPlan
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import SortedRequestQueue
from quire_engine.scheduler.step_time import StepLoad, StepTime

PATIENCE_SECONDS = 10.0
LATE_EVERY = 10
LEAST_CHUNK = 16
"""Prompt tokens of a step in any case, however little time its rows have."""
CAUTION = 0.95
"""Share of the time per token that plans may use."""
MAX_FORECAST = 512
"""Most waiting requests that are forecast one by one."""
USUAL_OUTPUT_TOKENS = 128.0
"""Output tokens at most of a class without ended requests."""


@dataclass(slots=True)
class Standing:
    """A request's objectives as times on the scheduler's clock, and the predictions for it."""

    latest_start: float
    """The latest time at which it can begin and have its first token in time."""
    first_token_by: float
    arrived_at: float
    num_left: int
    """Tokens to compute at its arrival."""
    is_late: bool = False
    """Whether it cannot meet an objective any more, or runs with the tokens that others leave."""
    predicted_first_token: float | None = None
    """As first forecast."""
    predicted_start: float | None = None
    first_token_at: float | None = None


class SLORequestQueue:
    """The waiting requests.

    Args:
        standing_of: returns a request's standing.
    """

    def __init__(self, standing_of: Callable[[Request], Standing]) -> None:
        self._standing_of = standing_of
        self.on_time = SortedRequestQueue(lambda request: standing_of(request).latest_start)
        self.late = SortedRequestQueue(lambda request: request.arrival)
        self.late_is_due = False
        """Whether late requests come before others now."""
        self.has_new = False
        """Whether requests arrived since the policy last looked."""

    def add(self, request: Request) -> None:
        self.prepend(request)
        self.has_new = True

    def prepend(self, request: Request) -> None:
        (self.late if self._standing_of(request).is_late else self.on_time).add(request)

    def peek(self) -> Request:
        return self._next.peek()

    def pop(self) -> Request:
        return self._next.pop()

    def remove(self, request: Request) -> None:
        (self.late if request in self.late else self.on_time).remove(request)

    def demote(self, now: float) -> None:
        """Requests that cannot have their first tokens in time any more give way to the others."""
        while self.on_time:
            standing = self._standing_of(request := self.on_time.peek())
            if standing.latest_start >= now or standing.first_token_at is not None:  # preempted: it comes first
                return
            self.make_late(request)

    def make_late(self, request: Request) -> None:
        """Make a waiting request late."""
        self.on_time.remove(request)
        self._standing_of(request).is_late = True
        self.late.add(request)

    @property
    def _next(self) -> SortedRequestQueue:
        return self.late if self.late and (not self.on_time or self.late_is_due) else self.on_time

    def __contains__(self, request: object) -> bool:
        return request in self.on_time or request in self.late

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.on_time, self.late)


class SLOPolicy(SchedulingPolicy):
    """Keeps a standing for each request, and learns the cost of steps and the length of outputs.

    Args:
        config: budgets and limits.
        kv_cache: the scheduler's; only read.
        clock: seconds, monotonic.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, clock: Callable[[], float]) -> None:
        self.costs = StepTime()
        self._config, self._kv_cache, self._clock = config, kv_cache, clock
        self._standings: dict[str, Standing] = {}
        self.queue: SLORequestQueue = SLORequestQueue(self._standing_of)
        self._num_plans = 0
        self._output_tokens: dict[str, float] = {}
        """By class, the mean number of output tokens of requests that have ended."""
        self._load = StepLoad()

    # -- requests come and go ---------------------------------------------------------------------------------------

    def _standing(self, request: Request) -> Standing:
        return self._standings[request.request_id]

    def _standing_of(self, request: Request) -> Standing:
        """The standing of a request that begins to wait."""
        standing = self._standings.get(request.request_id)
        if standing is None:
            standing = self._standings[request.request_id] = self._new_standing(request)
        elif standing.first_token_at is not None:
            standing.latest_start = -math.inf  # it was preempted: its client waits for the next token
        return standing

    def _new_standing(self, request: Request) -> Standing:
        computed = self._kv_cache.num_computed_tokens(self._kv_cache.get_computed_blocks(request))
        num_left = request.num_tokens - computed
        targets = request.slo_targets
        arrived_at = request.queued_at - request.age_seconds
        limits = []
        if targets.ttft_ms is not None:
            limits.append(targets.ttft_ms / 1000)
        if targets.e2e_ms is not None:
            rows = self.costs.seconds(StepLoad(0, 1, request.num_tokens))
            limits.append(targets.e2e_ms / 1000 - rows * self._output_left(request))
        first_token_by = latest_start = arrived_at + min(limits, default=PATIENCE_SECONDS)
        if limits:  # else they come in the order in which they arrived
            latest_start -= self._seconds_alone(num_left, computed)
        standing = Standing(latest_start, first_token_by, arrived_at, num_left)
        if request.num_output_tokens:
            standing.first_token_at, standing.latest_start = request.queued_at, -math.inf
        return standing

    def _seconds_alone(self, num_left: int, computed: int) -> float:
        """Time that a prompt takes with the engine to itself."""
        num_steps = -(-num_left // self._config.max_num_batched_tokens)
        load = StepLoad(num_left, 0, 0.0, num_left * (computed + num_left / 2))
        return self.costs.seconds(load) + (num_steps - 1) * self.costs.seconds(StepLoad())

    def _output_left(self, request: Request) -> float:
        """Output tokens that are likely to follow."""
        usual = self._output_tokens.get(request.options.slo.slo_class, USUAL_OUTPUT_TOKENS)
        done = request.num_output_tokens
        return min(max(usual - done, usual / 4), request.max_tokens - done)

    def forget(self, request: Request) -> None:
        """A request has ended: learn from the number of its tokens."""
        self._standings.pop(request.request_id, None)
        if number := request.num_output_tokens:
            usual = self._output_tokens.get(request.options.slo.slo_class, float(number))
            self._output_tokens[request.options.slo.slo_class] = usual + 0.1 * (number - usual)

    # -- admission --------------------------------------------------------------------------------------------------

    def rejections(self, running: Sequence[Request], num_queued: int) -> list[tuple[Request, EngineCoreOutput]]:
        """Predict the first tokens of new requests, and decide which to reject and which are late."""
        queue, now = self.queue, self._clock()
        if not self.costs.is_confident:
            return []
        queue.demote(now)
        if not queue.has_new:
            return []
        queue.has_new = False
        rejected = []
        for request, one in self._forecast(running, queue.on_time.first(MAX_FORECAST), now):
            standing, targets = self._standing(request), request.slo_targets
            standing.predicted_start = now + one.begins
            if standing.predicted_first_token is not None:
                continue
            standing.predicted_first_token = now + one.first_token
            if standing.predicted_first_token <= standing.first_token_by:
                continue
            is_our_fault = self._seconds_alone(standing.num_left, 0) <= (targets.ttft_ms or math.inf) / 1000
            may_be_rejected = request.scheduled_at is None and not request.is_replay and targets.ttft_ms is not None
            if may_be_rejected and is_our_fault and targets.on_overload == "refuse":
                rejected.append((request, _rejection(request, standing, standing.predicted_first_token, num_queued)))
            elif standing.first_token_at is None:
                queue.make_late(request)
        return rejected

    def _forecast(
        self, running: Sequence[Request], waiting: Sequence[Request], now: float
    ) -> list[tuple[Request, Upcoming]]:
        """When the waiting requests begin and have their first tokens, if no other arrives."""

        def upcoming(request: Request, num_left: int, is_running: bool) -> Upcoming:
            held = self._kv_cache.num_blocks_of(request.request_id)
            needed = max(-(-request.num_tokens // self._kv_cache.block_size) - held, 0)
            return Upcoming(
                num_left, request.num_tokens - num_left, self._output_left(request), needed, held, is_running,
                self._standing(request).first_token_by - now,
            )  # fmt: skip

        rows: list[Upcoming] = []
        to_come = [(request, upcoming(request, self._standing(request).num_left, False)) for request in waiting]
        prompts = list(to_come)
        for request in running:
            num_left = _num_left(request)
            if num_left <= 1:
                rows.append(upcoming(request, num_left, True))
            elif not self._standing(request).is_late:
                prompts.append((request, upcoming(request, num_left, True)))
        prompts.sort(key=lambda pair: (self._standing(pair[0]).latest_start, not pair[1].is_running))
        simulation = Forecast(
            self.costs, self._config.max_num_batched_tokens, self._max_running(running),
            self._kv_cache.block_pool.num_free_blocks, self._step_seconds(running), LEAST_CHUNK,
        )  # fmt: skip
        simulation.run(rows, [one for _, one in prompts])
        return to_come

    # -- steps ------------------------------------------------------------------------------------------------------

    def plan(self, running: Sequence[Request]) -> StepPlan | None:
        """Divide a step among prompts, the one with the least slack first."""
        if not self.costs.is_confident:
            return None
        self._num_plans += 1
        self.queue.late_is_due = self._num_plans % LATE_EVERY == 0
        rows, prompts, allowed = self._look_at(running, self._clock())
        room = self._config.max_num_batched_tokens - rows.num_rows
        if allowed < math.inf:
            computed = prompts[0].num_computed_tokens if prompts else 0
            within = self.costs.prompt_tokens_within(allowed, rows, computed)  # infinite: they cost nothing
            room = int(min(room, max(within, LEAST_CHUNK)))
        plan = StepPlan(max_running=self._max_running(running))
        turns = [(request, request.num_tokens - request.num_computed_tokens, True) for request in prompts]
        startable = self._startable(plan.max_running - len(running))
        turns += [(request, self._standing(request).num_left, False) for request in startable]
        turns.sort(key=lambda turn: self._turn(turn[0]))
        for request, num_left, is_running in turns:
            number = min(num_left, room)
            room -= number
            if is_running:
                plan.shares[request.request_id] = number
            else:
                plan.num_new_tokens += number
        plan.num_new_tokens += room
        return plan

    def _turn(self, request: Request) -> tuple[int, float]:
        """Sort key of prompts."""
        standing = self._standing(request)
        if standing.is_late:
            return 0 if self.queue.late_is_due else 2, request.arrival
        return 1, standing.latest_start

    def _startable(self, most: int) -> list[Request]:
        """The next waiting requests, at most so many, that there are blocks for."""
        free, startable = self._kv_cache.block_pool.num_free_blocks, []
        late = self.queue.late.first(min(most, 1)) if self.queue.late_is_due else []
        for request in [*late, *self.queue.on_time.first(most)]:
            free -= -(-request.num_tokens // self._kv_cache.block_size)
            if free < 0:
                break
            startable.append(request)
        return startable

    def _look_at(self, running: Sequence[Request], now: float) -> tuple[StepLoad, list[Request], float]:
        """The load of the rows, the running prompts, and the seconds that the rows' time per token leaves for a step.

        A row's next token is due when it would bring the mean over the target. A step may take half of the time that
        the row is ahead of that.
        """
        num_rows, context, allowed = 0, 0, math.inf
        prompts: list[Request] = []
        due: list[tuple[Request, Standing, float, float]] = []
        for request in running:
            if _num_left(request) > 1:
                prompts.append(request)
                continue
            num_rows += 1
            context += request.num_computed_tokens
            standing, tpot = self._standing(request), _tpot(request)
            if tpot < math.inf and standing.first_token_at is not None and not standing.is_late:
                slack = standing.first_token_at + max(request.num_output_tokens, 1) * tpot - now
                due.append((request, standing, tpot, slack))
        rows = StepLoad(0, num_rows, float(context))
        own = self.costs.seconds(rows)
        for request, standing, tpot, slack in due:
            if slack < own and slack + self._output_left(request) * (tpot - own) < 0:
                standing.is_late = True  # it cannot make up for it
            else:
                allowed = min(allowed, tpot + (slack - tpot) / 2)
        return rows, prompts, allowed * CAUTION

    def _step_seconds(self, running: Sequence[Request]) -> float:
        """How long steps may take: the shortest achievable time per token that a running request or the next to run has
        as its target."""
        requests = [request for request in running if not self._standing(request).is_late]
        if self.queue.on_time:
            requests.append(self.queue.on_time.peek())
        least = self.costs.seconds(StepLoad(0, 1, 0.0))
        return min((seconds for request in requests if (seconds := _tpot(request) * CAUTION) > least), default=math.inf)

    def _max_running(self, running: Sequence[Request]) -> int:
        """As many rows as the shortest time per token allows."""
        most, allowed, seconds = self._config.max_num_seqs, self._step_seconds(running), self.costs.seconds
        context = sum(request.num_computed_tokens for request in running) / max(len(running), 1)
        return max(
            bisect_left(range(1, most + 1), True, key=lambda n: seconds(StepLoad(0, n, n * context)) > allowed), 1
        )

    def take_result(self, step: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note first tokens, and what the step computed."""
        self._load = StepLoad.of(step)
        for output in outputs:
            standing = self._standings.get(output.request_id)
            if standing is not None and output.new_token_ids and standing.first_token_at is None:
                standing.first_token_at = self._clock()
                if standing.predicted_first_token is not None and not standing.is_late:
                    output.predicted_ttft_seconds = standing.predicted_first_token - standing.arrived_at
                standing.is_late |= standing.first_token_at > standing.first_token_by

    def note_step_seconds(self, seconds: float) -> None:
        """Learn from the step of the last `take_result`."""
        if self._load != StepLoad():
            self.costs.record(self._load, seconds)
            self._load = StepLoad()

    def outlook(self, request: Request, now: float) -> tuple[float | None, float | None]:
        """Slack and predicted start of a request that has yet to begin, in seconds from now."""
        standing = self._standings.get(request.request_id)
        if standing is None or request.scheduled_at is not None:
            return None, None
        start = standing.predicted_start
        return standing.latest_start - now, None if start is None or standing.is_late else max(start - now, 0.0)


def _num_left(request: Request) -> int:
    """Tokens to compute until the request's next one is sampled."""
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens


def _rejection(request: Request, standing: Standing, first_token: float, num_queued: int) -> EngineCoreOutput:
    predicted, target = first_token - standing.arrived_at, standing.first_token_by - standing.arrived_at
    retry = max(math.ceil((predicted - target) * 10) / 10, SHORTEST_RETRY_SECONDS)
    why = (
        f"the first token would come after about {1000 * predicted:.0f} ms, and ttft_ms of class "
        f"{request.options.slo.slo_class!r} is {1000 * target:.0f}"
    )
    output = unavailable(request, why, num_queued, retry, "ttft")
    output.predicted_ttft_seconds = predicted
    return output


def _tpot(request: Request) -> float:
    """A request's target for the time per token, in seconds."""
    targets = request.slo_targets
    return math.inf if targets.tpot_ms is None else targets.tpot_ms / 1000
