"""ParentRequest: one request for n sequences, as n requests of the engine core and one of the caller.

The engine core does not know of it. The children have the same prompt: the first one computes it, and the others find
its full blocks in the prefix cache, in the same step; only tokens after the last full block, at most `block_size`, are
computed once per child. (Copying that block on the first write would save no memory, as each child writes to it in its
next step; `tests/benchmarks/parallel_sampling.py` measures the time that it would save.) Without prefix caching each
child computes the whole prompt.
"""

import secrets

import msgspec

from quire_engine.messages import EngineCoreRequest
from quire_engine.slo import SLOVerdict
from quire_engine.stats import FinishedRequestStats
from quire_engine.timeline import RequestPhase

WORST_LAST = ("stop", "length", "abort", "error")
_SUMS = ("num_output_tokens", "num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
_OF_ANY = ("error_code", "refusal", "aborted_by")
"""Taken from the first sequence that has it."""


def child_seed(seed: int | None, index: int) -> int | None:
    """The seed of sequence `index`: `seed + index` modulo 2**64. So the first sequence equals that of n=1."""
    return None if seed is None else (seed + index) % 2**64


class ParentRequest:
    """Creates the children, tracks their ends, and merges their statistics."""

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
