"""OutputProcessor: EngineCoreOutputs → text, RequestOutputs and statistics. Runs in the caller's process."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from quire_engine.errors import RequestError, is_failure
from quire_engine.frontend.logprobs import LogprobsProcessor
from quire_engine.frontend.request_state import ParentRequest, RequestState
from quire_engine.frontend.tokenizer import AnyTokenizer, TokenDecoder
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, ErrorCode, FinishReason
from quire_engine.outputs import CompletionOutput, OnOutput, RequestOutput
from quire_engine.slo import SLOVerdict, judge
from quire_engine.stats import AbortedBy, FinishedRequestStats, IterationStats, LiveRequestStats
from quire_engine.timeline import PhaseChange, Timeline, note_changes

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Keeps the state of every live request of one frontend."""

    def __init__(self, tokenizer: "AnyTokenizer") -> None:
        self._tokenizer = tokenizer
        self._decoder = TokenDecoder(tokenizer)
        self._states: dict[str, RequestState] = {}
        self._parents: dict[str, ParentRequest] = {}
        self._logprobs = LogprobsProcessor(tokenizer)
        self._num_running = 0
        """Requests that ran in the engine core's latest step."""

    @property
    def request_ids(self) -> list[str]:
        """The live requests."""
        return list(self._states)

    def add_request(self, request: EngineCoreRequest, on_output: OnOutput) -> list[EngineCoreRequest]:
        """Expect output for a request; each delta goes to `on_output`, the last one with `finished`.

        Returns:
            The requests for the engine core: the request itself, or one for each of its sequences.

        Raises:
            RequestError: another live request has the same id.
        """
        if request.request_id in self._states or request.request_id in self._parents:
            raise RequestError.of("request_id", f"{request.request_id!r} is that of a live request")
        num_running = min(self._num_running, len(self._states))
        num_waiting = len(self._states) - num_running
        if request.sampling_params.n == 1:
            states = [RequestState(request, self._decoder, on_output)]
        else:
            parent = ParentRequest(request)
            states = [
                RequestState(child, self._decoder, on_output, parent, index)
                for index, child in enumerate(parent.children)
            ]
            self._parents[request.request_id] = parent
        for state in states:
            self._states[state.request.request_id] = state
            state.stats.num_running_before, state.stats.num_waiting_before = num_running, num_waiting
        return [state.request for state in states]

    def note_replay(self, request_ids: Iterable[str]) -> None:
        """Count a replay of these requests of the engine core; those that have ended are ignored."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                state.stats.num_replays += 1

    def note_changes(self, changes: Iterable[PhaseChange]) -> None:
        """Write the engine core's changes into timelines, if no journal does; before the outputs of the message."""
        if changes:
            note_changes(changes, self.timeline_of, time.monotonic())

    def timeline_of(self, request_id: str) -> Timeline | None:
        """The timeline of a live request of the engine core."""
        state = self._states.get(request_id)
        return None if state is None else state.timeline

    def look(
        self, max_model_len: int, engine_indices: Iterable[int], engine_index: Callable[[str], int]
    ) -> Collection[IterationStats]:
        """Compare the live requests with their targets, whether or not their engines work.

        Args:
            max_model_len: of the model.
            engine_indices: of all engines.
            engine_index: which of them a request belongs to.

        Returns:
            For each engine the phases that have ended, certain misses, and overdue requests.
        """
        now = time.monotonic()
        found = {index: IterationStats(engine_index=index, live=LiveRequestStats()) for index in engine_indices}
        for request_id, state in self._states.items():
            stats = found.get(engine_index(request_id))
            if stats is None or stats.live is None:
                continue
            if state.parent is None and state.timeline.ended:
                stats.phases += state.timeline.ended
                state.timeline.ended = []
            if state.look(now, max_model_len, stats.live):
                verdict = (state.parent or state).verdict
                assert verdict is not None
                slo_class = state.request.options.slo.slo_class
                stats.misses.append((slo_class, verdict.cause, state.request.request_id))
        return found.values()

    @property
    def live(self) -> Mapping[str, RequestState]:
        """The live requests by their id in the engine core, in order of arrival."""
        return self._states

    def caller_request_id(self, request_id: str) -> str | None:
        """The caller's request that a live one of the engine core belongs to; None for an unknown id."""
        state = self._states.get(request_id)
        if state is None:
            return request_id if request_id in self._parents else None
        return state.caller_request_id

    def core_request_ids(self, request_id: str) -> list[str]:
        """The live requests of the engine core that belong to a caller's request."""
        parent = self._parents.get(request_id)
        return sorted(parent.live) if parent is not None else [request_id]

    def discard(self, request_id: str) -> None:
        """Forget a request that its caller has left."""
        state = self._states.pop(request_id, None)
        if state is not None and state.parent is not None:
            self._parents.pop(state.parent.request_id, None)

    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self._states)

    def process(self, outputs: EngineCoreOutputs) -> tuple[IterationStats, list[str]]:
        """Process one message.

        Returns:
            Statistics, and the ids of requests that ended here (by a stop string) and must be aborted in the core.
        """
        now = time.monotonic()
        stats = IterationStats()
        to_abort = []
        if outputs.scheduler_stats is not None:
            self._num_running = outputs.scheduler_stats.num_running
        for output in outputs.outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue  # it ended here while the step ran
            finished = self._process_or_fail(state, output, now, stats)
            if finished and output.finish_reason is None:
                to_abort.append(output.request_id)
            if state.parent is not None and state.parent.request_id not in self._parents:
                to_abort += state.parent.live  # a failed sequence ends its request
        return stats, to_abort

    def finish(
        self, request_id: str, reason: FinishReason, error: str | None = None, aborted_by: AbortedBy | None = None
    ) -> IterationStats:
        """End a request that was aborted or lost its engine. Unknown ids are ignored."""
        stats = IterationStats()
        for core_request_id in self.core_request_ids(request_id):
            state = self._states.get(core_request_id)
            if state is not None:
                state.stats.aborted_by = aborted_by
                output = EngineCoreOutput(core_request_id, finish_reason=reason, error=error)
                self._process_or_fail(state, output, time.monotonic(), stats)
        return stats

    def _process_or_fail(
        self, state: RequestState, output: EngineCoreOutput, now: float, stats: IterationStats
    ) -> bool:
        try:
            return self._process_one(state, output, now, stats)
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.exception("request %s: its output could not be processed", output.request_id)
            self._fail(state, now, stats)
            return True

    def _fail(self, state: RequestState, now: float, stats: IterationStats) -> None:
        """End a request whose output raises in this process; no other request is affected."""
        request, parent = state.request, state.parent
        is_live = request.request_id in self._states if parent is None else parent.request_id in self._parents
        self._states.pop(request.request_id, None)
        if state.parent is not None:
            state.parent.live.discard(request.request_id)
            self._parents.pop(state.parent.request_id, None)
            for child_id in state.parent.live:
                self._states.pop(child_id, None)
        metrics = state.finish_stats(str(FinishReason.ERROR), None, now)
        error = "its output could not be processed"
        if is_live:  # else its end is recorded, and only its delivery failed
            _count_end(state, metrics, error, stats)
        output = RequestOutput(
            request_id=state.caller_request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[CompletionOutput(finish_reason=str(FinishReason.ERROR))],
            finished=True,
            metrics=metrics,
            error=error,
        )
        try:
            state.on_output(output)
        except BaseException as failure:
            if not is_failure(failure):
                raise
            logger.exception("request %s: its end could not be delivered", request.request_id)

    def _process_one(self, state: RequestState, output: EngineCoreOutput, now: float, stats: IterationStats) -> bool:
        """Deliver the delta of one request. Returns whether that is finished."""
        completion = CompletionOutput(
            finish_reason=None if output.finish_reason is None else str(output.finish_reason),
            stop_reason=output.stop_reason,
        )
        new_token_ids = output.new_token_ids
        are_plain = len(new_token_ids) > 1 and output.logprobs is None and output.finish_reason is None
        if are_plain and state.detokenizer.extend(new_token_ids):
            completion.token_ids, new_token_ids = list(new_token_ids), []
        for i, token_id in enumerate(new_token_ids):
            text_offset = 0 if output.logprobs is None else self._logprobs.text_offset(state, token_id)
            is_last = i == len(new_token_ids) - 1
            stop = state.detokenizer.append(
                token_id, is_stop_token=is_last and output.finish_reason is FinishReason.STOP
            )
            completion.token_ids.append(token_id)
            if output.logprobs is not None:
                self._logprobs.add(state, completion, output.logprobs[i], text_offset)
            if stop is not None:
                completion.finish_reason, completion.stop_reason = str(FinishReason.STOP), stop
                break
        finished = completion.finish_reason is not None
        if output.finish_reason is FinishReason.STOP and completion.stop_reason is None and output.pooled is None:
            completion.stop_reason = self._secondary_eos(output.new_token_ids[-1])
        if finished and not isinstance(completion.stop_reason, str):
            state.detokenizer.finish()
        completion.text = state.detokenizer.next_delta(finished=finished)
        completion.cumulative_logprob = state.cumulative_logprob
        is_first = state.first_token_time is None and state.index == 0
        state.take_times(output, len(completion.token_ids), now, stats)
        request = state.request
        result = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            num_cached_tokens=state.stats.num_cached_tokens,
            is_first=is_first,
            error=output.error,
            error_parameter=output.error_parameter,
            error_code=output.error_code,
            retry_after_seconds=output.retry_after_seconds,
            pooled=output.pooled,
        )
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = self._logprobs.of_prompt(state, output.prompt_logprobs)
        if finished:
            del self._states[request.request_id]
            assert completion.finish_reason is not None
            result.metrics = state.finish_stats(completion.finish_reason, output.error_code, now)
            if state.parent is None:
                is_callers_fault = output.error_parameter is not None
                _count_end(state, result.metrics, output.error, stats, is_callers_fault=is_callers_fault)
        if state.parent is None:
            state.on_output(result)
        else:
            self._give_to_parent(state, state.parent, result, stats)
        return finished

    def _give_to_parent(
        self, state: RequestState, parent: ParentRequest, result: RequestOutput, stats: IterationStats
    ) -> None:
        """Deliver a child's delta as its parent's."""
        child_id, own = state.request.request_id, result.metrics
        total = None if own is None else parent.take_end(child_id, own, result.error is not None)
        result.request_id, result.outputs[0].index = parent.request_id, state.index
        result.num_cached_tokens = parent.take_cached_tokens(result.num_cached_tokens)
        result.finished, result.metrics = total is not None, total
        if total is not None:
            _count_end(state, total, result.error, stats, is_callers_fault=result.error_parameter is not None)
            total.request_id = parent.request_id
            del self._parents[parent.request_id]
            for live_id in parent.live:  # after an error
                self._states.pop(live_id, None)
        state.on_output(result)

    def _secondary_eos(self, token_id: int) -> int | None:
        """The stop reason of an end-of-sequence token: None for the tokenizer's own, else its id, as in vLLM."""
        primary = self._tokenizer.eos_token_id
        return None if primary is None or token_id == primary else token_id


def _count_end(
    state: RequestState, own: FinishedRequestStats, error: str | None, stats: IterationStats,
    *, is_callers_fault: bool = False,
) -> None:  # fmt: skip
    """Count an ended request: identify it, judge it by its objectives, and add its last phases.

    A request that was aborted or invalid has a verdict only if it was a miss already.
    """
    request, owner = state.request, state.parent or state
    own.request_id, own.params, own.prompt = request.request_id, request.sampling_params, request.prompt
    own.options, own.error = request.options, error
    stats.finished_requests.append(own)
    if not own.was_rejected_at_once:
        if state.parent is None:
            stats.phases += state.timeline.ended
        else:
            stats.phases += [(phase, seconds) for phase, seconds in own.phase_seconds.items() if seconds]
    verdict = owner.verdict
    if verdict is not None:
        own.missed_live = True
    elif own.finish_reason == str(FinishReason.ABORT) or is_callers_fault:
        return
    elif own.error_code == ErrorCode.UNAVAILABLE.value:
        verdict = SLOVerdict(good=False, cause="rejected")
    elif own.finish_reason == str(FinishReason.ERROR):
        verdict = SLOVerdict(good=False, cause="error")
    else:
        verdict = judge(
            request.slo_targets,
            e2e_seconds=own.e2e_seconds,
            time_to_first_token_seconds=own.time_to_first_token_seconds,
            time_per_output_token_seconds=own.time_per_output_token_seconds,
            decode_seconds=own.generation_seconds,
        )
    own.slo_verdict, own.slo_cause = verdict.verdict, verdict.cause
