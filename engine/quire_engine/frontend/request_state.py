"""RequestState: the frontend's state of a live request: its text, its times, and the receiver of its output."""

import math

from quire_engine.frontend.detokenizer import IncrementalDetokenizer
from quire_engine.frontend.parallel_sampling import ParentRequest
from quire_engine.frontend.tokenizer import TokenDecoder
from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode
from quire_engine.outputs import OnOutput
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.slo import SLOVerdict, judge
from quire_engine.stats import FinishedRequestStats, IterationStats, LiveRequestStats
from quire_engine.timeline import Timeline


class RequestState:
    """One live request, which may be one of the sequences of its parent."""

    def __init__(
        self,
        request: EngineCoreRequest,
        decoder: TokenDecoder,
        on_output: OnOutput,
        parent: ParentRequest | None = None,
        index: int = 0,
    ) -> None:
        self.request = request
        self.on_output = on_output
        self.parent = parent
        self.index = index
        """The number of this sequence among the parent's."""
        skip = request.sampling_params.skip_special_tokens
        self.detokenizer = IncrementalDetokenizer(
            (lambda token_ids: decoder.decode(token_ids, skip)) if request.sampling_params.detokenize else None,
            request.sampling_params,
            request.prompt_token_ids,
            byte_ids=decoder.byte_ids,
            skipped_ids=decoder.special_ids if skip else frozenset(),
        )
        self.cumulative_logprob: float | None = None if request.sampling_params.logprobs is None else 0.0
        self.timeline = Timeline(request.arrived_at)
        self.first_token_time: float | None = None
        self.last_token_time = request.arrived_at
        self.stats = FinishedRequestStats(finish_reason="", num_prompt_tokens=len(request.prompt_token_ids))
        self.verdict: SLOVerdict | None = None
        """A miss that is certain before the end; the parent has that of several sequences."""
        targets = request.slo_targets
        self._ttft_until = math.inf if targets.ttft_ms is None else request.arrived_at + targets.ttft_ms / 1000
        self._e2e_until = math.inf if targets.e2e_ms is None else request.arrived_at + targets.e2e_ms / 1000
        self._tpot = math.inf if targets.tpot_ms is None else targets.tpot_ms / 1000

    @property
    def caller_request_id(self) -> str:
        """The caller's request that it belongs to."""
        return self.request.request_id if self.parent is None else self.parent.request_id

    def slack_seconds(self, num_output_tokens: int, now: float) -> float | None:
        """Time until the first target is missed, below 0 once one is; None without targets.

        The target for the mean time per token is missed when the next token comes later than that: for n tokens so far,
        n times the target after the first.
        """
        first = self.first_token_time
        to_first = self._ttft_until - (now if first is None else first)
        slack = min(self._e2e_until - now, to_first if first is None or to_first < 0 else math.inf)
        if first is not None:
            slack = min(slack, first + max(num_output_tokens, 1) * self._tpot - now)
        return slack if slack < math.inf else None

    def take_times(self, output: EngineCoreOutput, num_new_tokens: int, now: float, stats: IterationStats) -> None:
        """Record when tokens came, in the request's statistics and in those of their message."""
        own = self.stats
        if output.num_preemptions > own.num_preemptions:
            own.num_preemptions = output.num_preemptions
        if output.num_draft_tokens:
            own.num_drafts += 1
            own.num_draft_tokens += output.num_draft_tokens
            own.num_accepted_tokens += max(len(output.new_token_ids) - 1, 0)  # a grammar may reject the first one
        if not num_new_tokens:
            if self.first_token_time is None:
                own.refusal = output.refusal
                own.predicted_ttft_seconds = output.predicted_ttft_seconds
                own.num_cached_tokens = output.num_cached_tokens
            return
        if self.first_token_time is None:
            self.first_token_time = now
            if self.timeline.first_token_at is None:  # there is no journal
                self.timeline.token(now)
            own.time_to_first_token_seconds = now - self.request.arrived_at
            own.num_cached_tokens = output.num_cached_tokens
            own.predicted_ttft_seconds = output.predicted_ttft_seconds
            own.grammar_seconds, own.prefill_chunks = output.grammar_seconds, output.prefill_chunks
            if self.parent is None or self.parent.take_first_token(now):
                stats.time_to_first_token_seconds.append(own.time_to_first_token_seconds)
                stats.first_token_slo_classes.append(self.request.options.slo.slo_class)
                stats.num_prompt_tokens += own.num_prompt_tokens
                stats.num_cached_tokens += own.num_cached_tokens
        else:
            # Tokens that arrive together count as if they had come at equal intervals since the last one.
            stats.inter_token_seconds += [(now - self.last_token_time) / num_new_tokens] * num_new_tokens
        self.last_token_time = now
        own.num_output_tokens += num_new_tokens
        own.num_longest_output_tokens = own.num_output_tokens
        stats.num_generation_tokens += num_new_tokens

    def finish_stats(self, finish_reason: str, error_code: ErrorCode | None, now: float) -> FinishedRequestStats:
        """The request's statistics, now that it has ended."""
        own = self.stats
        own.finish_reason = finish_reason
        own.error_code = None if error_code is None else error_code.value
        own.e2e_seconds = now - self.request.arrived_at
        own.phases = self.timeline.end(now)
        if self.first_token_time is not None:
            own.generation_seconds = self.last_token_time - self.first_token_time
        return own

    def look(self, now: float, max_model_len: int, live: LiveRequestStats) -> bool:
        """Count it among the live requests, and compare it with its targets.

        Returns:
            Whether it has just become a certain miss. Later tokens may still make up for a late one in the mean of all.
        """
        if self.timeline.phase == "held":
            live.num_held += 1
        owner, num_tokens = self.parent or self, max(self.stats.num_output_tokens, 1)
        first = owner.first_token_time
        has_missed = self._e2e_until < now or self._ttft_until < (now if first is None else first)
        late = ["e2e"] if self._e2e_until < now else []
        if first is None and self._ttft_until < now:
            late.append("ttft")
        elif first is not None and first + self._tpot * num_tokens < now:
            late.append("tpot")
            longest = max_output_tokens(self.stats.num_prompt_tokens, self.request.sampling_params, max_model_len)
            has_missed = has_missed or (longest > 1 and first + self._tpot * (longest - 1) < now)
        for target in late:
            key = self.request.options.slo.slo_class, target
            live.overdue[key] = live.overdue.get(key, 0) + 1
        if owner.verdict is not None or not has_missed:
            return False
        verdict = judge(
            self.request.slo_targets,
            e2e_seconds=now - self.request.arrived_at,
            time_to_first_token_seconds=None if first is None else first - self.request.arrived_at,
            time_per_output_token_seconds=None if first is None else (now - first) / num_tokens,
            decode_seconds=0.0 if first is None else now - first,
        )
        owner.verdict = None if verdict.good else verdict  # up to rounding
        return not verdict.good
