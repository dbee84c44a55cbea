"""Drafter: adds draft tokens to a step that is otherwise complete, as many as pay off.

For each step:

1. Each request's last proposal is compared with the tokens that came (`draft_record`), and it gets a new one. With it
   come chances; what the request's and everybody's drafts have been worth so far corrects them. That takes time, too: a
   request of which little comes is asked less often.
2. All drafts of all requests are put in the order of the chance that they are accepted: the product of their own chance
   and those of the drafts before them.
3. So many of them are computed that tokens per second are highest, by what steps of each size have taken so far
   (`step_costs`). This is the rule of Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
   Using Goodput" (https://arxiv.org/abs/2406.14066), with measured times in place of a model of the machine.

So a single stream gets long drafts, as its steps only wait for memory, and a full batch hardly any.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.scheduler.draft_record import DraftRecord
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal, Proposer
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.step_costs import StepCosts
from quire_engine.stats import DraftStats

__all__ = ["Drafter", "cut_drafts"]

logger = logging.getLogger(__name__)

_LEAST_GAIN = 1.02
"""In tokens per second, by which drafts have to promise more than none: both are estimates."""
_HIGHEST_CHANCE = 0.98
_REFRESH_STEPS = 16, 256
"""After so many steps with drafts one goes without, to know how long that takes: after the first number where drafts
gain little, and after the second where they more than double the tokens per second."""
_WORTH_WEIGHT = 0.02
"""Of the last time that a request was asked, in what asking is worth to all."""
_LEAST_REST = 16
"""Steps for which a request may be passed over; in larger batches as many as there are requests, so that hardly more
than one is asked in vain in each step."""
_NET_SHARE = 0.5
"""Of the time that an accepted draft saves; about as much goes to computing it, and those that are rejected."""
_RECORD_KEPT = 0.998
"""Of the record of all requests, at each proposal."""


@dataclass(slots=True)
class _Candidate:
    """What a request could have drafted in this step."""

    index: int
    """Of the request in the step's columns."""
    request: Request
    token_ids: list[int]
    """Within the vocabulary, and within what the request may still have."""
    chances: list[float]
    """For each, that it and those before it are accepted."""


class Drafter:
    """Gives drafts the tokens and blocks that a step has left. In this step no request waits or is preempted for them.

    Args:
        proposer: drafts the tokens.
        kv_cache: to allocate blocks from.
        vocab_size: drafts are cut before the first token id outside [0, vocab_size).
        max_draft_tokens: of a request in a step.
        max_num_rows: positions that a step may sample: the number that the memory was measured with.
        costs: how long steps take.
    """

    def __init__(
        self,
        proposer: Proposer,
        kv_cache: KVCacheManager,
        vocab_size: int,
        max_draft_tokens: int,
        max_num_rows: int,
        costs: StepCosts,
    ) -> None:
        self._proposer = proposer
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._max_num_rows = max_num_rows
        self._records: dict[str, DraftRecord] = {}
        self._accepted = self._expected = 0.0
        self._worth = 1.0
        """Accepted tokens that asking a request yields, in the mean of all; at first a guess."""
        self._refresh_after = _REFRESH_STEPS[0]
        self.costs = costs
        self.stats = DraftStats()

    def take_note(self, request: Request) -> None:
        """Ask the proposer whether it drafts for a new request."""
        if request.sampling_params.num_speculative_tokens == 0:
            return
        try:
            request.is_drafted = self._proposer.drafts_for(request)
        except Exception:
            logger.exception("no tokens are drafted for request %s", request.request_id)
        request.needs_token_values |= request.is_drafted  # a draft follows the last token
        if request.is_drafted:
            self._records[request.request_id] = DraftRecord(self._worth)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._records.pop(request.request_id, None)
        try:
            self._proposer.forget(request)
        except Exception:
            logger.exception("the end of request %s", request.request_id)

    def add_drafts(self, output: SchedulerOutput, requests: Mapping[str, Request], num_tokens: int) -> None:
        """Add drafts to a step, after the last tokens of requests that ran before.

        Args:
            output: the step.
            requests: by id.
            num_tokens: how many tokens the step has room for.
        """
        num_rows = len(output.num_scheduled_tokens)
        room = min(num_tokens, self._max_num_rows - num_rows)
        due = self._due(output, requests) if room > 0 else []
        if not due:
            return
        computed = sum(output.num_scheduled_tokens.values())
        seconds = self.costs.seconds(computed, room)
        if seconds is None or (computed == num_rows and self.costs.is_unknown(computed, self._refresh_after)):
            return
        began_at = time.perf_counter()
        candidates = [self._candidate(index, request, room) for index, request in due]
        self.costs.record_asking(len(due), time.perf_counter() - began_at)
        counts = self._most_profitable(candidates, num_rows, seconds)
        least = self.costs.ask_seconds / (_NET_SHARE * seconds[0] / num_rows)
        for candidate, count in zip(candidates, counts, strict=True):
            is_added = count > 0 and self._add(output, candidate, count)
            gained = sum(candidate.chances[:count]) if is_added else 0.0
            self._worth += (gained - self._worth) * _WORTH_WEIGHT
            record = self._records[candidate.request.request_id]
            record.was_asked(gained, least, longest_rest=max(num_rows, _LEAST_REST))

    def count(self, output: SchedulerOutput, runner_output: ModelRunnerOutput) -> None:
        """Count a step's drafts, and those of them that were accepted."""
        for request_id, drafts in output.draft_token_ids.items():
            sampled = runner_output.sampled_token_ids.get(request_id)
            if sampled is not None:
                self.stats.count(len(drafts), len(sampled) - 1)

    def _due(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> list[tuple[int, Request]]:
        """The requests that are to be asked for drafts, with their indices in the step's columns. Others rest, or go on
        without their last token."""
        due = []
        for index, request_id in enumerate(output.cached_requests.request_ids):
            record = self._records.get(request_id)
            if record is None or record.is_passed_over():
                continue
            request = requests[request_id]
            if request.is_drafted and request.num_computed_tokens == request.num_tokens:
                due.append((index, request))
        return due

    def _candidate(self, index: int, request: Request, room: int) -> _Candidate:
        """What a request could have drafted.

        Args:
            index: of the request in the step's columns.
            request: its last token is known, and scheduled.
            room: drafts that the step may have.
        """
        record = self._records[request.request_id]
        accepted, expected = record.learn(request.all_token_ids)
        self._accepted = _RECORD_KEPT * self._accepted + accepted
        self._expected = _RECORD_KEPT * self._expected + expected
        most = min(room, self._max_draft_tokens, request.max_tokens - request.num_output_tokens - 1)
        own = request.sampling_params.num_speculative_tokens
        proposal = self._propose(request, most if own is None else min(most, own))
        record.note(proposal, request.num_tokens)
        factor = record.factor((self._accepted + 1.0) / (self._expected + 1.0))
        chances = [min(chance * factor, _HIGHEST_CHANCE) for chance in proposal.chances]
        return _Candidate(index, request, proposal.token_ids, list(accumulate(chances, mul)))

    def _propose(self, request: Request, max_tokens: int) -> Proposal:
        """At most `max_tokens` drafts; the step samples one more token after the last of them."""
        if max_tokens < 1:
            return NO_DRAFTS
        try:
            proposal = self._proposer.propose(request, max_tokens)
            num_tokens = min(len(proposal.token_ids), len(proposal.chances), max_tokens)
            for place, token_id in enumerate(proposal.token_ids[:num_tokens]):
                if not 0 <= token_id < self._vocab_size:
                    num_tokens = place
                    break
            return Proposal(proposal.token_ids[:num_tokens], proposal.chances[:num_tokens])
        except Exception:
            logger.exception("no more tokens are drafted for request %s", request.request_id)
            request.is_drafted = False
            return NO_DRAFTS

    def _most_profitable(
        self, candidates: list[_Candidate], num_rows: int, seconds: npt.NDArray[np.float64]
    ) -> list[int]:
        """How many drafts of each candidate make the step yield the most tokens per second.

        Args:
            candidates: with their drafts.
            num_rows: tokens that the step yields without drafts.
            seconds: what it takes with 0, 1, 2, … drafts, up to as many as it has room for.
        """
        if not any(candidate.chances for candidate in candidates):
            return [0] * len(candidates)
        ranked = sorted(
            (
                (chance, place, number)
                for number, candidate in enumerate(candidates)
                for place, chance in enumerate(candidate.chances)
            ),
            key=lambda entry: (-entry[0], entry[1]),
        )[: len(seconds) - 1]
        num_yielded = num_rows + np.cumsum([0.0, *(chance for chance, _, _ in ranked)])
        rates = num_yielded / seconds[: len(num_yielded)]
        best = int(rates.argmax())
        gain = rates[best] / rates[0]
        soon, late = _REFRESH_STEPS
        self._refresh_after = int(min(max(late * (gain - 1), soon), late))
        counts = [0] * len(candidates)
        if gain > _LEAST_GAIN:
            for _, _, number in ranked[:best]:
                counts[number] += 1
        return counts

    def _add(self, output: SchedulerOutput, candidate: _Candidate, count: int) -> bool:
        """Add a request's first `count` drafts, if there are blocks for them."""
        request, drafts = candidate.request, candidate.token_ids[:count]
        block_ids = self._kv_cache.allocate_slots(request, count)
        if block_ids is None:
            return False
        cached = output.cached_requests
        cached.new_block_ids[candidate.index] = cached.new_block_ids[candidate.index] + block_ids
        output.num_scheduled_tokens[request.request_id] += count
        output.draft_token_ids[request.request_id] = drafts
        request.num_computed_tokens += count
        return True


def cut_drafts(output: SchedulerOutput, request: Request, num_left: int) -> None:
    """Leave a request only `num_left` drafts in a step that was not submitted yet."""
    drafts = output.draft_token_ids.pop(request.request_id)
    if num_left:
        output.draft_token_ids[request.request_id] = drafts[:num_left]
    output.num_scheduled_tokens[request.request_id] -= len(drafts) - num_left
    request.num_computed_tokens -= len(drafts) - num_left
