"""RequestState: the frontend's state of a live request: its text, its times, and the receiver of its output.
ParentRequest: the state of several sequences' one request.
"""

import math
import secrets

import msgspec

from quire_engine.frontend.detokenizer import IncrementalDetokenizer
from quire_engine.frontend.tokenizer import TokenDecoder
from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode
from quire_engine.outputs import OnOutput
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.slo import SLOVerdict, judge
from quire_engine.stats import FinishedRequestStats, IterationStats, LiveRequestStats
from quire_engine.timeline import RequestPhase, Timeline

WORST_LAST = ("stop", "length", "abort", "error")
_SUMS = ("num_output_tokens", "num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_OF_ANY = ("error_code", "refusal", "aborted_by")
"""Taken from the first sequence that has it."""


def child_seed(seed: int | None, index: int) -> int | None:
    """The seed of sequence `index`: `seed + index` modulo 2**64. So the first sequence equals that of n=1."""
    return None if seed is None else (seed + index) % 2**64


class ParentRequest:
    """One request for n sequences, as n requests of the engine core and one of the caller.

    The engine core does not know of it. The children have the same prompt: the first one computes it, and the others
    find its full blocks in the prefix cache, in the same step; only tokens after the last full block, at most
    `block_size`, are computed once per child. (Copying that block on the first write would save no memory, as each
    child writes to it in its next step; `tests/benchmarks/parallel_sampling.py` measures the time that it would save.)
    Without prefix caching each child computes the whole prompt.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        params, replace = request.sampling_params, msgspec.structs.replace
        token = secrets.token_hex(8)  # an id derived from the parent's might be another request's
        self.children = [
            replace(
                request,
                request_id=f"{index}_{token}",
                sampling_params=replace(
                    params,
                    n=1,
                    seed=child_seed(params.seed, index),
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                ),
            )
            for index in range(params.n)
        ]
        self.live = {child.request_id for child in self.children}
        """The children that have not ended."""
        self.first_token_time: float | None = None
        """The first of all children's."""
        self.verdict: SLOVerdict | None = None
        """A miss that is certain before the request has ended."""
        self._finished: list[FinishedRequestStats] = []
        self._num_cached_tokens: int | None = None

    def take_first_token(self, now: float) -> bool:
        """Whether a child's first token is the parent's first: the prompt and the time to it count once."""
        is_first = self.first_token_time is None
        if is_first:
            self.first_token_time = now
        return is_first

    def take_cached_tokens(self, num_cached_tokens: int) -> int:
        """The first child's number of cached prompt tokens: the other children also find its blocks."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_cached_tokens
        return self._num_cached_tokens

    def take_end(self, child_id: str, stats: FinishedRequestStats, failed: bool) -> FinishedRequestStats | None:
        """Note a child's end.

        Returns:
            The parent's statistics if this was its end, too: the last child's end, or any child's failure.
        """
        self.live.discard(child_id)
        self._finished.append(stats)
        return self._total() if failed or not self.live else None

    def _total(self) -> FinishedRequestStats:
        """The statistics of all children, as one request's."""
        stats = self._finished
        started = [one for one in stats if one.time_to_first_token_seconds is not None]
        first = min(started, key=lambda one: one.time_to_first_token_seconds or 0.0, default=stats[0])
        last = max(stats, key=lambda one: one.e2e_seconds)
        # From the first token of all to the last token of all.
        ends = [(one.time_to_first_token_seconds or 0.0) + one.generation_seconds for one in started]
        return msgspec.structs.replace(
            first,
            finish_reason=max((one.finish_reason for one in stats), key=WORST_LAST.index),
            num_cached_tokens=self._num_cached_tokens or 0,
            e2e_seconds=last.e2e_seconds,
            phases=_phases(first, last),
            generation_seconds=max(ends) - (first.time_to_first_token_seconds or 0.0) if ends else 0.0,
            num_sequences=len(self.children),
            num_replays=max(one.num_replays for one in stats),
            num_longest_output_tokens=max(one.num_longest_output_tokens for one in stats),
            **{name: sum(getattr(one, name) for one in stats) for name in _SUMS},
            **{name: next((value for one in stats if (value := getattr(one, name)) is not None), None)
               for name in _OF_ANY},
        )  # fmt: skip


def _phases(first: FinishedRequestStats, last: FinishedRequestStats) -> list[tuple[RequestPhase, float]]:
    """The phases of the sequence that began first until its first token, then those of the one that ended last."""
    turn = first.time_to_first_token_seconds
    if turn is None or first is last:
        return last.phases
    before = [phase for phase, begin in last.phases if begin <= turn]
    return [
        *((phase, begin) for phase, begin in first.phases if begin < turn),
        (before[-1], turn),
        *((phase, begin) for phase, begin in last.phases if begin > turn),
    ]


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
        self.timeline = Timeline(request.arrived_at, request.encode_seconds)
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
                own.num_cached_tokens = output.num_cached_tokens
                if output.pooled is None:
                    own.predicted_ttft_seconds = output.predicted_ttft_seconds
                else:
                    own.prefill_chunks = output.prefill_chunks
                    stats.num_prompt_tokens += own.num_prompt_tokens
                    stats.num_cached_tokens += own.num_cached_tokens
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
