"""EngineCore: the inner loop. One step is schedule, execute, update.

If the executor takes several batches at once, a step schedules and submits until it is full, and then collects the
oldest result. Results come in the order of submission. With async scheduling there are two::

    engine core   schedule 1, 2 ──► update 1 ──► schedule 3 ──► update 2 ──► schedule 4 ──► …
    worker          compute 1 │ compute 2              │ compute 3             │ compute 4
"""

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from quire_engine.core.experts import ExpertBalancer, ExpertLoadReport
from quire_engine.errors import (
    AbortedError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    UnknownAdapterError,
    one_line,
)
from quire_engine.executor import Executor
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    LoadWeights,
    PinAdapter,
    ReportPrefixCache,
    ResetPrefixCache,
    SchedulerOutput,
    Sleep,
    TakeSnapshot,
    UseWeights,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.scheduler.grammar import GrammarError
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.scheduler.validation import validate_request
from quire_engine.snapshot import MAX_WAITING_REQUESTS, EngineCoreSnapshot, RankSnapshot, StepComposition, StepSeconds
from quire_engine.stats import SchedulerStats, StepStats
from quire_engine.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

NUM_STEPS = 128
"""Steps that the medians are taken over."""


class EngineCore:
    """Runs the scheduler and the executor. Knows token ids, never text. `build_engine` makes one.

    Args:
        executor: with a model loaded, and a KV cache of the scheduler's size.
        scheduler: without requests.
        structured_output: compiles the grammars of requests.
        ready: what the frontend needs to validate requests.
        world_size: ranks of the executor.
        balancer: moves the model's experts between steps.
        expert_load: makes statistics of the tokens that each expert was sent.
        on_begin: called before anything is computed for a request, with the number of its message.
        on_failed_step: called when a step has failed that several engines compute together.
        connect_again: opens the store of KV blocks for the weights of another folder.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        structured_output: StructuredOutputManager,
        ready: EngineCoreReady,
        world_size: int,
        balancer: ExpertBalancer | None,
        expert_load: ExpertLoadReport | None,
        on_begin: Callable[[int], None],
        on_failed_step: Callable[[], None],
        connect_again: Callable[[str], None],
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.structured_output = structured_output
        self.ready = ready
        self._resolve_pooling = lru_cache(maxsize=16)(ready.pooling.resolve)
        self._world_size = world_size
        self._balancer = balancer
        self._expert_load = expert_load
        self._on_begin = on_begin
        self._on_failed_step = on_failed_step
        self._connect_again = connect_again
        self._in_flight: deque[SchedulerOutput] = deque()
        """Steps that were submitted and not yet collected, oldest first."""
        self._history = StepHistory()
        self._step_stats = StepStats()
        self._generation: int | None = None
        self.sleep_level = 0
        """0 while it is awake."""
        self._loaded_folder: str | None = None
        """The folder of weights that the ranks have loaded, or could not load, and that are not used yet."""

    def add_request(self, message: EngineCoreRequest, message_number: int = 0) -> None:
        """Validate once more, and queue the request.

        Args:
            message: to be validated.
            message_number: for `on_begin`.

        Raises:
            RequestError: it could never be served.
            EngineSleepingError: `sleep` was called, and `wake_up` was not.
            EngineUnavailableError: too many grammars are being compiled.
        """
        if message.options.pooling_params is not None:
            self._resolve_pooling(message.options.pooling_params)
        validate_request(message, self.ready)
        if message.options.adapter is not None and self.scheduler.adapters is None:
            raise UnknownAdapterError("lora_name", "this engine serves no LoRA adapters; enable_lora is false")
        if self.sleep_level:
            raise EngineSleepingError("the engine sleeps; wake it up first")
        request = Request(message, self.ready.eos_token_ids, self.ready.max_model_len, message_number)
        if request.needs_grammar:
            self.structured_output.init_grammar(request)
        self.scheduler.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """End a request, running or waiting. Its blocks are free when this returns. Unknown ids are ignored."""
        self.scheduler.finish_request(request_id)
        self.structured_output.drop_abandoned()

    def has_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_requests() or bool(self._in_flight) or self.structured_output.has_finished()

    @property
    def oldest_request_time(self) -> float | None:
        """When the oldest live request came, on `time.monotonic`."""
        oldest = next(iter(self.scheduler.requests.values()), None)
        return None if oldest is None else oldest.queued_at

    def wait_for_grammar(self) -> None:
        """If all requests wait for their grammars, block until one is compiled or a request is overdue."""
        if not self.has_requests() and self.scheduler.requests:
            self.structured_output.wait(self.scheduler.seconds_until_overdue())

    def step(self, generation: int | None = None) -> EngineCoreOutputs:
        """Schedule and submit as many steps as may be in flight, and update from the oldest.

        If a step raises, only the request that caused it ends.

        Args:
            generation: of a step that other engines compute, too; it needs no requests here.

        Raises:
            EngineDeadError: a worker is gone, and this engine core cannot be used any more.
        """
        self._generation = generation
        began_at, work_began_at = time.perf_counter(), self.executor.clock()
        times = self._step_stats = StepStats()
        rejected = self._take_grammars()
        outputs = self._submit_steps()
        if generation is not None and not self._in_flight:
            self._serve_others(generation)
        if outputs is None:
            outputs = self._collect_step()
        result = EngineCoreOutputs(
            rejected + outputs, self.make_stats(), phase_changes=self.scheduler.take_phase_changes()
        )
        if times.num_requests:
            seconds = time.perf_counter() - began_at
            times.update_seconds = max(seconds - times.schedule_seconds - times.execute_seconds, 0.0)
            result.step_stats = times
            self.scheduler.note_step_seconds(times, seconds, self.executor.clock() - work_began_at)
            self._history.record(times)
            if self._balancer is not None:
                self._balancer.after_step()
        return result

    def take_cache_events(self) -> bytes:
        """The changes of the prefix cache since this was last called; nothing unless requests are routed by it."""
        return self.scheduler.kv_cache.block_pool.take_events()

    def make_stats(self) -> SchedulerStats:
        """The present numbers."""
        stats = self.scheduler.make_stats()
        stats.sleep_level = self.sleep_level
        stats.rank_busy_seconds = self.executor.busy_seconds()
        if self._expert_load is not None:
            stats.expert_load = self._expert_load.make(self.executor.expert_tokens, not self.has_requests())
        return stats

    def _submit_steps(self) -> list[EngineCoreOutput] | None:
        """Submit steps until the executor is full, or nothing is left to compute. Returns the outputs of the recovery
        if a step failed, else None."""
        while len(self._in_flight) < self.executor.max_concurrent_batches and self.scheduler.has_requests():
            began_at = time.perf_counter()
            scheduler_output = self.scheduler.schedule(self._generation)
            scheduled_at = time.perf_counter()
            self._step_stats.schedule_seconds += scheduled_at - began_at
            self.structured_output.drop_abandoned()  # of requests that are overdue
            if self._in_flight and not (
                scheduler_output.num_scheduled_tokens
                or scheduler_output.dropped_request_ids
                or scheduler_output.kv_connector_metadata is not None
                or scheduler_output.adapter_orders is not None
            ):
                break
            try:
                self.executor.submit(scheduler_output)
                self._step_stats.execute_seconds += time.perf_counter() - scheduled_at
            except EngineDeadError:
                raise
            except Exception as error:
                return self._recover(scheduler_output, error, was_submitted=False)
            self._in_flight.append(scheduler_output)
        return None

    def _collect_step(self) -> list[EngineCoreOutput]:
        """Wait for the oldest result, and update from it."""
        if not self._in_flight:
            return []
        scheduler_output = self._in_flight.popleft()
        began_at = time.perf_counter()
        try:
            runner_output = self.executor.collect()
            self._step_stats.execute_seconds += time.perf_counter() - began_at
            _count_tokens(scheduler_output, self._step_stats)
        except EngineDeadError:
            raise
        except Exception as error:
            return self._recover(scheduler_output, error)
        return self.scheduler.update_from_output(scheduler_output, runner_output)

    def _serve_others(self, generation: int) -> None:
        """Take part in a step of other engines."""
        try:
            self.executor.submit(SchedulerOutput({}, generation=generation))
            self.executor.collect()
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, AbortedError):
                logger.exception("a step of other engines failed here")
            self._on_failed_step()

    def _recover(
        self, scheduler_output: SchedulerOutput, error: Exception, was_submitted: bool = True
    ) -> list[EngineCoreOutput]:
        """Find the request that made a step fail. All other steps in flight are dropped, too."""
        if scheduler_output.generation is not None and was_submitted:
            self._on_failed_step()
            if isinstance(error, AbortedError):
                logger.warning(
                    "a step of %d requests is computed again: %s", len(scheduler_output.num_scheduled_tokens), error
                )
                return self.scheduler.take_back_step()
        logger.error("a step of %d requests failed", len(scheduler_output.num_scheduled_tokens), exc_info=error)
        self._drop_in_flight()
        reason = "the engine failed at this request; its log has the cause"
        return self.scheduler.recover_from_failed_step(
            scheduler_output, reason, was_submitted=was_submitted, was_aborted=isinstance(error, AbortedError)
        )

    def _drop_in_flight(self) -> None:
        """Wait for all steps in flight, and discard their results."""
        while self._in_flight:
            self._in_flight.popleft()
            try:
                self.executor.collect()
            except EngineDeadError:
                raise
            except Exception as error:
                logger.warning("a step that is not needed any more failed as well: %r", error)

    # -- utilities -----------------------------------------------------------------------------------------------------

    def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Make one of the calls below.

        Raises:
            EngineDeadError: a worker is gone, and this engine core cannot be used any more.
            EngineError: it could not be done.
        """
        try:
            match call:
                case ReportPrefixCache():
                    self.scheduler.kv_cache.block_pool.report_events()
                    return True
                case ResetPrefixCache():
                    return self.reset_prefix_cache()
                case Sleep(level=level):
                    return self.sleep(level)
                case WakeUp():
                    return self.wake_up()
                case LoadWeights(folder=folder):
                    return self.load_weights(folder)
                case UseWeights(is_accepted=is_accepted):
                    return self.use_weights(is_accepted)
                case TakeSnapshot():
                    return self.snapshot()
                case PinAdapter(adapter=adapter, is_pinned=is_pinned):
                    if self.scheduler.adapters is not None and not (is_pinned and self.sleep_level):
                        self.scheduler.adapters.pin(adapter, is_pinned)
                    return True
        except EngineError:
            raise
        except Exception as error:
            logger.exception("%s failed", call)
            raise EngineError(f"{type(call).__name__}: {error!r}") from error

    def snapshot(self) -> EngineCoreSnapshot:
        """The present state, for operators. Changes nothing."""
        step_seconds = self._history.step_seconds()
        requests = self.scheduler.request_snapshots(MAX_WAITING_REQUESTS)
        return EngineCoreSnapshot(
            step=self.scheduler.num_steps,
            batches_in_flight=len(self._in_flight),
            step_seconds=step_seconds,
            last_step=self._history.composition(),
            ranks=self._ranks(step_seconds.execute),
            requests=requests,
            blocks=self.scheduler.kv_cache.snapshot(request.id for request in requests),
        )

    def _ranks(self, execute_seconds: float) -> list[RankSnapshot]:
        if self._world_size == 1 and not self.executor.worker_pids:
            return [RankSnapshot(0, os.getpid(), step_seconds_p50=execute_seconds or None)]
        pids = self.executor.worker_pids or [0] * self._world_size
        seconds = self.executor.rank_step_seconds() or [None] * len(pids)
        return [
            RankSnapshot(rank, pid, step_seconds_p50=own)
            for rank, (pid, own) in enumerate(zip(pids, seconds, strict=True))
        ]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Running requests keep their blocks and go on."""
        self.scheduler.kv_cache.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> bool:
        """Free memory: as in `Sleep`. Cached prefixes are lost, but for those that a KV connector keeps.

        Raises:
            EngineError: requests are live, there is no such level, or a rank cannot sleep. Then all are as before.
            EngineDeadError: that failed, too. Some ranks may have no KV cache, so this engine ends.
        """
        if level not in (1, 2):
            raise EngineError(f"sleep: level is {level}; it must be 1 (free the KV cache) or 2 (the weights as well)")
        if level > self.sleep_level:
            self._clear("sleep")
            try:
                self.executor.collective_rpc(Sleep(level))
            except EngineDeadError:
                raise
            except Exception as error:
                reason = f"sleep: {one_line(error) or type(error).__name__}"
                try:
                    self.executor.collective_rpc(Sleep(self.sleep_level) if self.sleep_level else WakeUp())
                except Exception as another:
                    raise EngineDeadError(f"{reason}, and it cannot be undone: {another}") from another
                raise EngineError(reason) from error
            self.sleep_level = level
        return True

    def wake_up(self) -> bool:
        """Undo `sleep`: allocate the KV cache again, and have the weights where they were.

        Raises:
            EngineError: there is no memory for it, or the checkpoint cannot be read. The engine still sleeps.
        """
        if self.sleep_level:
            try:
                self.executor.collective_rpc(WakeUp())
            except EngineDeadError:
                raise
            except Exception as error:
                logger.exception("the engine cannot be woken up")
                self.executor.collective_rpc(Sleep(self.sleep_level))
                reason = one_line(error) or type(error).__name__
                raise EngineError(f"wake_up: {reason}; the engine still sleeps") from error
            if self.sleep_level == 2 and self._balancer is not None:
                self._balancer.reset()
            self.sleep_level = 0
        return True

    def load_weights(self, folder: str) -> bool:
        """Load the weights of another folder. `use_weights` has to follow, also after an error.

        Raises:
            EngineError: requests are live, the engine sleeps, or the weights cannot be loaded.
        """
        if self.sleep_level:
            raise EngineError("load_weights: the engine sleeps; wake it up first")
        self._clear("load_weights")
        self._loaded_folder = folder
        self.executor.collective_rpc(LoadWeights(folder))
        return True

    def use_weights(self, is_accepted: bool) -> bool:
        """Compute with the loaded weights from now on, or drop them.

        Raises:
            EngineDeadError: it failed. Some ranks may have other weights than others, so this engine ends.
        """
        folder, self._loaded_folder = self._loaded_folder, None
        if folder is None and not is_accepted:
            return True
        try:
            if folder is None:
                raise ValueError("no weights were loaded")
            self.executor.collective_rpc(UseWeights(is_accepted))
            if is_accepted:
                self._connect_again(folder)
                if self._balancer is not None:
                    self._balancer.reset()
        except Exception as error:
            raise EngineDeadError(f"the weights of the engine cannot be changed: {error}") from error
        return True

    def _clear(self, what: str) -> None:
        """Drop steps in flight, cached prefixes and adapters. Raises EngineError if requests are live."""
        if self.scheduler.requests:
            raise EngineError(f"{what}: {len(self.scheduler.requests)} requests are live; let them end or abort them")
        self._drop_in_flight()  # of requests that were aborted
        self.reset_prefix_cache()
        if self.scheduler.adapters is not None:
            self.scheduler.adapters.forget_all()

    def shutdown(self) -> None:
        """End the workers, even if steps are in flight."""
        self.executor.shutdown()
        self._in_flight.clear()
        self.scheduler.close()
        self.structured_output.shutdown()

    def _take_grammars(self) -> list[EngineCoreOutput]:
        """Queue the requests whose grammar is ready; end those whose grammar failed."""
        if not self.structured_output.has_finished():
            return []
        outputs = []
        for request, error in self.structured_output.take_finished(self._on_begin):
            if error is None:
                try:
                    self.scheduler.grammar_is_ready(request)
                except Exception:
                    logger.exception("a grammar cannot be given to request %s", request.request_id)
                    error = GrammarError("the grammar failed; the server's log says why", None)
            if error is not None:
                outputs += self.scheduler.reject(request, error)
        return outputs


class StepHistory:
    """Keeps the last steps; medians are computed on demand."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=NUM_STEPS)

    def record(self, step: StepStats) -> None:
        """Add a step that has ended."""
        self._steps.append(step)

    def step_seconds(self) -> StepSeconds:
        """Medians; 0 before the first step."""
        if not self._steps:
            return StepSeconds()
        return StepSeconds(
            statistics.median(step.schedule_seconds for step in self._steps),
            statistics.median(step.execute_seconds for step in self._steps),
            statistics.median(step.update_seconds for step in self._steps),
        )

    def composition(self) -> StepComposition:
        """The last step in numbers."""
        if not self._steps:
            return StepComposition()
        last = self._steps[-1]
        return StepComposition(last.num_requests, last.num_tokens, last.num_prefill_tokens, last.num_decode_tokens)


def _count_tokens(scheduler_output: SchedulerOutput, stats: StepStats) -> None:
    """Count a step's requests and tokens. One token of a request that ran before counts as a decode, as do drafts."""
    scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.draft_token_ids
    stats.num_requests, stats.num_tokens = len(scheduled), sum(scheduled.values())
    stats.num_draft_tokens = sum(map(len, drafts.values()))
    if scheduler_output.new_requests or stats.num_tokens > stats.num_requests:
        new = {request.request_id for request in scheduler_output.new_requests}
        stats.num_prefill_tokens = sum(
            n for request_id, n in scheduled.items() if (n > 1 and request_id not in drafts) or request_id in new
        )
