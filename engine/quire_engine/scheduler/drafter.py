"""Drafter: chooses draft tokens for a step that is otherwise complete, as many as pay off. Knows no blocks.

For each step:

1. Each request's last proposal is compared with the tokens that came (`draft_record`), and the request has a new one.
   A proposal has chances; they are corrected by how often drafts of such a chance were right, over all requests
   (`draft_chances`) and for this one. Proposing takes time, too: a request whose drafts do not pay backs off. A model
   that drafts does so one step earlier, as it runs on the workers (`WorkerDrafts`); it stops where a further draft has
   too little chance.
2. All drafts of all requests are sorted by the chance that they are accepted: the product of their own chance and those
   of the drafts before them.
3. The number of drafts is the one with the most tokens per second, by the measured times of steps of each size
   (`step_time`). This is the rule of Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
   Using Goodput" (https://arxiv.org/abs/2406.14066), with measured times in place of a model of the machine.

So a single stream has long drafts, as its steps only wait for memory, and a full batch has hardly any.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

from quire_engine.draft_chances import DraftChances
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.scheduler.draft_record import DraftRecord, ProposalBenefit
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal, Proposer, WorkerDrafts
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.step_time import StepCurve
from quire_engine.stats import DraftStats, StepStats

logger = logging.getLogger(__name__)

_LEAST_GAIN = 1.02
"""The least gain in tokens per second for which drafts are computed: it is an estimate."""
_HIGHEST_CHANCE = 0.98
_REFRESH_STEPS = 16, 256
"""After this many steps with drafts one has none, to measure it: the first number where drafts gain little, and the
second where they more than double the tokens per second."""
_WORTH_WEIGHT = 0.02
"""Weight of the last proposal in the mean worth of all requests'."""
_CATCH_UP_WEIGHT = 0.05
"""Weight of the last time that a model caught up with a request in the mean of these times."""
_LONGEST_REST = 1024
"""Most steps to back off, whatever a proposal costs, and where it fails: a measurement may be wrong, and a failure may
pass."""
_LEAST_REST = 16
"""Least upper bound on the steps to back off. In larger batches it is the number of requests, so that each step has
hardly more than one proposal without benefit."""
_MAX_WASTED_SHARE = 0.005
"""Share of the time of all steps that proposals without benefit may take."""
_ALL_WANTED_EVERY = 32
"""Once in this many times a model drafts all that is wanted, to learn whether drafting has become cheaper or its drafts
better."""
_MEASURED_EVERY = 4
"""Steps between two measurements while all requests back off: the times are needed only for the next proposal."""
_GOLDEN_RATIO = 0.618033988749895
_CURVE_STEPS = 4
"""Steps for which the times are looked up once."""
_NEXT_CHANCE = 0.7
"""About the chance of a further draft, which is known only once it is drafted."""


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
    """Gives drafts the tokens that a step has left. In this step no request waits or is preempted for them.

    Args:
        proposer: drafts the tokens.
        vocab_size: drafts are cut before the first token id outside [0, vocab_size).
        max_draft_tokens: of a request in a step.
        max_num_rows: positions that a step may sample: the number that the memory was measured with.
        costs: how long steps take; unset: that is learned.
        benefit: of proposals, in the mean of all requests; unset: a guess at first. It learns.
    """

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        max_draft_tokens: int,
        max_num_rows: int,
        costs: StepCurve | None = None,
        benefit: ProposalBenefit | None = None,
    ) -> None:
        self._proposer = proposer
        self._worker_drafts = proposer if isinstance(proposer, WorkerDrafts) else None
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._max_num_rows = max_num_rows
        self._records: dict[str, DraftRecord] = {}
        self.chances = [DraftChances(), DraftChances()]
        """Of sampled requests, and of greedy ones."""
        self._benefit = ProposalBenefit() if benefit is None else benefit
        self._catch_up = 0.0
        """Mean time in which a model caught up with requests that were new or had backed off."""
        self._num_rows = 0
        """Of the last step."""
        self._num_drafted = 0
        """Requests so far for which tokens are drafted."""
        self._refresh_after = _REFRESH_STEPS[0]
        self._num_unmeasured = 0
        """Steps since the last that was measured."""
        self._seconds_of_drafting = 0.0
        self.least_chance = 0.0
        """`least_draft_chance` of the next steps that drafts are wanted after."""
        self._least_next = 0.0
        """The same where the model may stop."""
        self._step = 0
        """Steps so far."""
        self._awake: dict[str, None] = {}
        """Requests that have proposals; in order."""
        self._resting: list[tuple[int, str]] = []
        """Heap of the others, and of some that have ended: the step from which on each has proposals again."""
        self._costs = StepCurve() if costs is None else costs
        self._curve: list[float] = []
        """See `_step_seconds`."""
        self._curve_tokens = self._curve_steps_left = 0
        self._num_wanted = 0
        """Steps that drafts were wanted after."""
        self.stats = DraftStats()

    def take_note(self, request: Request) -> None:
        """Begin to draft for a new request, if the proposer does. Drafts need the token ids of the prompt."""
        if request.sampling_params.num_speculative_tokens == 0 or request.prompt_parts or request.pooling_params:
            return
        try:
            request.is_drafted = self._proposer.drafts_for(request)
        except Exception:
            logger.exception("no tokens are drafted for request %s", request.request_id)
        if request.is_drafted:
            self._num_drafted += 1
            # Spread evenly over the longest rest, so that some have proposals soon however many requests come and go.
            of_all = self._benefit
            longest = 0 if of_all.pays() else _longest_rest(of_all.cost + self._catch_up, self._num_rows)
            first_rest = int(self._num_drafted * _GOLDEN_RATIO % 1 * longest)
            self._records[request.request_id] = DraftRecord(of_all, first_rest)
            self._back_off(request, first_rest)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._records.pop(request.request_id, None)
        self._awake.pop(request.request_id, None)
        try:
            self._proposer.forget(request)
        except Exception:
            logger.exception("the end of request %s", request.request_id)

    def choose(
        self, output: SchedulerOutput, requests: Mapping[str, Request], num_tokens: int
    ) -> list[tuple[int, Request, list[int]]]:
        """The drafts that a step should compute after the last tokens of requests that ran before.

        Args:
            output: the step, complete but for drafts.
            requests: by id.
            num_tokens: how many tokens the step has room for.

        Returns:
            For each request with a proposal its index in the step's columns and its drafts; none if they do not pay.
        """
        self._num_rows = len(output.num_scheduled_tokens)
        room = self._room(num_tokens)
        due = self._due(output, requests) if room > 0 else []
        return self._choose_of(due, output, room) if due else []

    def wanted(self, output: SchedulerOutput, requests: Mapping[str, Request], num_tokens: int) -> dict[str, int]:
        """How many tokens the workers are to draft at the end of the step of `choose`, with its drafts now, for each
        request that it samples; not for those that back off."""
        wanted: dict[str, int] = {}
        if self._worker_drafts is not None:
            for new in output.new_requests:
                if new.request_id in self._records:  # new or preempted: the model has no keys and values of it
                    self._records[new.request_id].is_behind = True
            if self._room(num_tokens) > 0 and self._awake:
                wanted = self._want_drafts(output, requests)
        self._step += 1
        while self._resting and self._resting[0][0] <= self._step:
            self._wake(heappop(self._resting)[1], requests)
        return wanted

    def _room(self, num_tokens: int) -> int:
        """Drafts that the step may have."""
        return min(num_tokens, self._max_num_rows - self._num_rows)

    def _back_off(self, request: Request, num_steps: int) -> None:
        """Back off for about `num_steps` steps. The next proposal is in one of few steps, so that requests have theirs
        together: the first brings the proposer's data into the processor's caches, which the steps fill with weights.
        While a request backs off, no step waits for its tokens.
        """
        request.waits_for_drafts = num_steps == 0
        if num_steps == 0:
            self._awake[request.request_id] = None
            return
        self._awake.pop(request.request_id, None)
        apart = 1 << num_steps.bit_length() - 1  # more than half of the rest
        step = (self._step + 1 + num_steps + apart // 2) // apart * apart
        heappush(self._resting, (step, request.request_id))

    def _wake(self, request_id: str, requests: Mapping[str, Request]) -> None:
        """End the back-off of a request, if it is still there."""
        if request_id in self._records:
            self._awake[request_id] = None
            requests[request_id].waits_for_drafts = True

    def _choose_of(
        self, due: list[tuple[int, Request]], output: SchedulerOutput, room: int
    ) -> list[tuple[int, Request, list[int]]]:
        """Propose drafts of these requests, given with their indices in the step's columns, and choose at most `room`
        of them."""
        num_rows = len(output.num_scheduled_tokens)
        computed = sum(output.num_scheduled_tokens.values())
        if computed == num_rows and self._costs.is_unknown(computed, self._refresh_after):
            return []
        if not self._costs.are_known():
            return []
        began_at = time.thread_time()
        candidates = [self._candidate(index, request, room) for index, request in due]
        num_drafts = sum(len(candidate.token_ids) for candidate in candidates)
        seconds = self._step_seconds(computed, min(room, num_drafts))
        counts, share = self._most_profitable(candidates, num_rows, seconds)
        if self._worker_drafts is None:
            self._costs.record_proposals(len(due), time.thread_time() - began_at)
        token_seconds = seconds[0] / num_rows
        least = self._costs.draft_seconds / token_seconds
        # The first draft of a step costs more than the others.
        row_seconds = (self._curve[-1] - self._curve[1]) / max(len(self._curve) - 2, 1)
        least_next = (self._costs.draft_seconds + row_seconds) / token_seconds
        self._least_next = min(least_next / _NEXT_CHANCE, _HIGHEST_CHANCE)
        chosen: list[tuple[int, Request, list[int]]] = []
        for candidate, count in zip(candidates, counts, strict=True):
            num_proposed = 1 if self._worker_drafts is None else len(candidate.token_ids)
            record = self._records.get(candidate.request.request_id)
            if num_proposed == 0 or record is None:
                continue  # its drafts came too late, which says nothing of their worth; or its proposal failed
            worth = share * sum(candidate.chances[:count])
            cost = self._costs.proposal_seconds(num_proposed) / token_seconds
            catch_up = record.take_catch_up_seconds() / token_seconds
            self._note_benefit(candidate.request, record, worth, cost, num_rows, catch_up)
            record.note_useful_drafts(sum(share * chance >= least for chance in candidate.chances) if share else 0)
            chosen.append((candidate.index, candidate.request, candidate.token_ids[:count]))
        return chosen

    def _step_seconds(self, num_tokens: int, num_drafts: int) -> list[float]:
        """How long a step takes with 0, 1, 2, … drafts. The learned times are read anew every few steps."""
        if num_tokens != self._curve_tokens or num_drafts >= len(self._curve) or self._curve_steps_left == 0:
            seconds = self._costs.seconds(num_tokens, max(num_drafts, self._max_draft_tokens))
            assert seconds is not None, "they are known"
            self._curve, self._curve_tokens, self._curve_steps_left = seconds.tolist(), num_tokens, _CURVE_STEPS
        self._curve_steps_left -= 1
        return self._curve[: num_drafts + 1]

    def _note_benefit(
        self, request: Request, record: DraftRecord, worth: float, cost: float, num_rows: int, catch_up: float
    ) -> None:
        """Note the worth and the cost of a request's proposal in a step of `num_rows` rows.

        The time in which a model caught up, `catch_up`, is spent whether another proposal follows or not. So it does
        not count in the benefit, but in how long the request backs off.
        """
        self._benefit.learn(worth, cost, _WORTH_WEIGHT)
        if catch_up:
            self._catch_up += (catch_up - self._catch_up) * _CATCH_UP_WEIGHT
        self._back_off(request, record.note_benefit(worth, cost, _longest_rest(cost + catch_up, num_rows)))

    def take_result(
        self, output: SchedulerOutput, runner_output: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Count a step's drafts, and the accepted ones; take the workers' drafts for requests that do not ignore the
        step's result."""
        for request_id, drafts in output.draft_token_ids.items():
            sampled = runner_output.sampled_token_ids.get(request_id)
            if sampled is not None:
                self.stats.count(len(drafts), len(sampled) - 1)
        if output.num_drafts_wanted and self._worker_drafts is not None:
            self._take_drafts(output, runner_output, requests, self._worker_drafts)

    def _take_drafts(
        self,
        output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        requests: Mapping[str, Request],
        worker_drafts: WorkerDrafts,
    ) -> None:
        """Take the workers' drafts after a step, and their cost."""
        seconds, drafts = runner_output.draft_seconds, runner_output.drafts
        self._seconds_of_drafting += seconds
        catching_up = [
            record
            for request_id in output.num_drafts_wanted
            if (record := self._records.get(request_id)) is not None and record.is_behind
        ]
        num_further = sum(len(own.token_ids) - 1 for own in drafts.values())
        first_seconds = runner_output.first_draft_seconds
        if drafts:
            self._costs.record_proposals(len(drafts), first_seconds, is_upper_bound=bool(catching_up))
        if num_further > 0:
            self._costs.record_drafting(num_further, seconds - first_seconds)
        for record in catching_up:
            extra_seconds = max(first_seconds - len(drafts) * self._costs.propose_seconds, 0.0)
            record.catch_up_seconds = extra_seconds / len(catching_up)
        for request_id, num_wanted in output.num_drafts_wanted.items():
            request, own_record = requests.get(request_id), self._records.get(request_id)
            if request is None or own_record is None or request.last_stale_step >= output.step:
                continue
            own_record.is_behind = False
            if request_id in drafts:
                own = drafts[request_id]
                if runner_output.drafting_stopped and len(own.token_ids) < num_wanted:
                    own_record.stops_by_itself(self._max_draft_tokens)
                worker_drafts.take(request_id, own)
            else:  # drafting failed: try again, but not in every step. If no cost is known, it is guessed
                self._benefit.learn(0.0, self._benefit.cost or 1.0, _WORTH_WEIGHT)
                self._back_off(request, own_record.rest_longer(_LONGEST_REST))

    def note_step_seconds(self, step: StepStats, seconds: float) -> None:
        """Note how long a step took in all, on the executor's clock: it decides the worth of drafts."""
        seconds, self._seconds_of_drafting = seconds - self._seconds_of_drafting, 0.0
        if not step.num_decode_tokens:
            return
        self._num_unmeasured += 1
        if self._awake or step.num_draft_tokens or self._num_unmeasured == _MEASURED_EVERY:
            self._num_unmeasured = 0
            self._costs.record(step.num_tokens, seconds, has_drafts=step.num_draft_tokens > 0)

    def _want_drafts(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> dict[str, int]:
        awake = [
            (self._records[request_id], requests[request_id])
            for request_id in output.num_scheduled_tokens
            if request_id in self._awake and _is_sampled(requests[request_id])
        ]
        if not awake or not self._costs.are_known():
            return {}
        self._num_wanted += 1
        self.least_chance = self._least_next if self._num_wanted % _ALL_WANTED_EVERY else 0.0
        wanted: dict[str, int] = {}
        for record, request in awake:
            # All drafts of this step may be accepted, it samples one more token, and one may be in flight.
            num_more = len(output.draft_token_ids.get(request.request_id, ())) + 1 + request.num_output_placeholders
            most = min(record.num_wanted, self._most(request, num_more))
            if most > 0:
                wanted[request.request_id] = most
        return wanted

    def _most(self, request: Request, num_more: int = 0) -> int:
        """How many drafts a step may have of a request once it has `num_more` more tokens. The step samples one more
        token after the last of them."""
        most = min(self._max_draft_tokens, request.max_tokens - request.num_output_tokens - num_more - 1)
        own = request.sampling_params.num_speculative_tokens
        return most if own is None else min(most, own)

    def _due(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> list[tuple[int, Request]]:
        """The requests that have a proposal now, with their indices in the step's columns. The others back
        off, or go on without their last token, or the workers did not draft for them."""
        proposed = self._awake if self._worker_drafts is None else self._worker_drafts
        if not proposed:
            return []
        due = []
        for index, request_id in enumerate(output.cached_requests.request_ids):
            if request_id in proposed and request_id in self._records:
                request = requests[request_id]
                if request.num_computed_tokens == request.num_tokens:
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
        of_kind = self.chances[request.sampling_params.temperature == 0]
        record.learn(request.all_token_ids, of_kind)
        proposal = self._propose(request, min(room, self._most(request)))
        record.note(proposal, request.num_tokens)
        factor = record.factor()
        chances = [min(of_kind.of(chance) * factor, _HIGHEST_CHANCE) for chance in proposal.chances]
        return _Candidate(index, request, proposal.token_ids, list(accumulate(chances, mul)))

    def _propose(self, request: Request, max_tokens: int) -> Proposal:
        """At most `max_tokens` drafts; the step samples one more token after the last of them."""
        if max_tokens < 1:
            return NO_DRAFTS
        try:
            proposal = self._proposer.propose(request, max_tokens)
            num_tokens = min(len(proposal.token_ids), len(proposal.chances), max_tokens)
            for place in range(num_tokens):
                if not (0 <= proposal.token_ids[place] < self._vocab_size and 0 < proposal.chances[place] <= 1):
                    num_tokens = place
                    break
            return Proposal(proposal.token_ids[:num_tokens], proposal.chances[:num_tokens])
        except Exception:
            logger.exception("no more tokens are drafted for request %s", request.request_id)
            del self._records[request.request_id]
            self._awake.pop(request.request_id, None)
            request.waits_for_drafts = False
            return NO_DRAFTS

    def _most_profitable(
        self, candidates: list[_Candidate], num_rows: int, seconds: list[float]
    ) -> tuple[list[int], float]:
        """How many drafts of each candidate make the step yield the most tokens per second.

        Args:
            candidates: with their drafts.
            num_rows: tokens that the step yields without drafts.
            seconds: what it takes with 0, 1, 2, … drafts, up to as many as it has room for.

        Returns:
            The numbers; and the share of the time of the tokens gained that is saved, as drafts take time, too.
        """
        counts = [0] * len(candidates)
        if not any(candidate.chances for candidate in candidates):
            return counts, 0.0
        ranked = sorted(
            (
                (chance, place, number)
                for number, candidate in enumerate(candidates)
                for place, chance in enumerate(candidate.chances)
            ),
            key=lambda entry: (-entry[0], entry[1]),
        )[: len(seconds) - 1]
        num_yielded = list(accumulate((chance for chance, _, _ in ranked), initial=float(num_rows)))
        rates = [tokens / took for tokens, took in zip(num_yielded, seconds, strict=False)]
        gain = max(rates)
        best = rates.index(gain)
        gain /= rates[0]
        soon, late = _REFRESH_STEPS
        self._refresh_after = int(min(max(late * (gain - 1), soon), late))
        if gain <= _LEAST_GAIN:
            return counts, 0.0
        for _, _, number in ranked[:best]:
            counts[number] += 1
        extra_seconds = seconds[best] - seconds[0]
        return counts, 1 - extra_seconds / ((num_yielded[best] - num_rows) * seconds[0] / num_rows)


def _is_sampled(request: Request) -> bool:
    """Whether a request has all of its tokens computed by the step, which samples the next."""
    return request.num_computed_tokens >= request.num_tokens


def _longest_rest(cost: float, num_requests: int) -> int:
    """How many steps a request backs off at most.

    Args:
        cost: of a proposal, in units of a token's time without drafts.
        num_requests: of the batch.
    """
    return max(min(max(_LEAST_REST, math.ceil(cost / _MAX_WASTED_SHARE)), _LONGEST_REST), num_requests)
