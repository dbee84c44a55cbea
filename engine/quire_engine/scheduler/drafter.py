"""Drafter: chooses draft tokens for a step that is otherwise complete, as many as pay off. Knows no blocks.

For each step:

1. Each request's last proposal is compared with the tokens that came, whether its drafts were computed or not, and the
   request has a new proposal. A proposal has chances; they are corrected by how often drafts of such a chance were
   accepted, over all requests (`draft_chances`), and by how this one's fared next to that. A model drafts one step
   earlier, at the end of a step on the workers, and stops where a further draft has too little chance::

       schedule N     wants drafts of a and c
       step N         ─► tokens of a, b, c ─► drafts of a, c
       schedule N+1   proposes those of a and c

2. All drafts of all requests are sorted by the chance that they are accepted: the product of their own chance and those
   of the drafts before them.
3. The number of drafts is the one with the most tokens per second, by the measured times of steps of each size
   (`step_time`). This is the rule of Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
   Using Goodput" (https://arxiv.org/abs/2406.14066), with measured times in place of a model of the machine.

So a single stream has long drafts, as its steps only wait for memory, and a full batch has hardly any.

Proposing takes time, too. Each request has a balance: the time that its proposals have saved, less the time that they
took, in units of a proposal of one draft. The balance of all requests decides whether a new one begins awake::

                        balance < 0
    awake: a proposal ─────────────► resting: no proposal, and
    in every step     ◄───────────── no step waits for its tokens
                      probe: balance 0

In a probe all resting requests have one proposal each, together: the first brings the proposer's data into the
processor's caches, which the steps fill with weights. Probes come at a fixed interval (`_probe_interval`).
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from quire_engine.draft_chances import DraftChances
from quire_engine.messages import DraftTokens, ModelRunnerOutput, SchedulerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.step_time import StepCurve, moved_mean
from quire_engine.stats import DraftStats, StepStats

logger = logging.getLogger(__name__)

PATIENCE = 8
"""Proposals without benefit after which a new request rests; four times as many of all requests, and of a request whose
proposals have paid."""
_PROBE_SHARE = 0.005
"""Share of the time of all steps that probes may take. (With a probe every 16 steps `copy` lost a quarter.)"""
_LEAST_INTERVAL = 4
"""Least steps between two probes, and between two measurements while all requests rest."""
_LEAST_GAIN = 1.02
"""The least gain in tokens per second for which drafts are computed: it is an estimate."""
_NEXT_CHANCE = 0.7
"""About the chance of a further draft, which is known only once it is drafted."""
_KEPT = 0.9
"""What earlier proposals still count at each new one in a request's acceptance."""
_PRIOR_WEIGHT = 2.0
"""The chances of all requests' drafts count as much as this many drafts of the request itself."""
_FIRST_WANTED, _LEAST_WANTED = 4, 2
"""Drafts wanted of a model: at first, and at least, as the first one is the expensive one."""
_ALL_WANTED_EVERY = 32
"""Steps of drafting after which a model does not stop: drafting may have become cheaper, or its drafts better."""


class Proposer(Protocol):
    """Drafts tokens. A step computes them along with the last known token, and samples after each.

    A draft is accepted if it is the token that the model samples in its place, unless the settings ask for rejection
    sampling (`sampling/rejection.py`). So drafts change how many tokens a step yields, but not which ones.
    (As with any number of rows: bit for bit on the CPU, and on a GPU as far as its kernels are invariant.)

    A step with drafts runs without CUDA graphs, for all of its requests. If a proposer raises for a request, that
    request has no more drafts.
    """

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        """Draft the next tokens, at most `max_tokens`, which is at least 1; none if there is no draft.

        It is not called after every token, but where drafts can be worth their cost.
        """

    def forget(self, request: Request) -> None:
        """The request has ended, with or without drafts."""


@dataclass(slots=True)
class DraftRecord:
    """A request's drafts: how many were accepted, and whether proposing them pays."""

    balance: float
    """In costs of a proposal of one draft."""
    accepted: float = 0.0
    """Drafts; older ones count less."""
    expected: float = 0.0
    """As many as all requests' drafts of such chances let expect."""
    proposal: DraftTokens | None = None
    """The last one, until it is compared with the tokens that came."""
    computed: tuple[int, float, int] | None = None
    """If drafts of it are computed: their number, the time that they add to the step, and how many were proposed."""
    is_behind: bool = True
    """Whether a model has to compute more of the request than the last step's tokens before it can draft."""
    num_wanted: int = _FIRST_WANTED
    """How many drafts to want of a model, which takes longer for each of them."""
    stops: bool = False
    """Whether its model stops by itself where a draft has too little chance: all that there may be are wanted."""

    def learn(self, token_ids: Sequence[int], chances: DraftChances) -> int:
        """Compare the last proposal with the tokens that followed, as far as they are known: up to the first wrong one.

        Args:
            token_ids: all of the request.
            chances: of all requests of its kind; they learn, too.

        Returns:
            How many of its drafts were right.
        """
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return 0
        accepted, expected = 0, 0.0
        tokens = token_ids[proposal.start : proposal.start + len(proposal.token_ids)]
        for token_id, draft, chance in zip(tokens, proposal.token_ids, proposal.chances, strict=False):
            is_right = token_id == draft
            expected += chances.of(chance)
            accepted += is_right
            chances.learn(chance, is_right)
            if not is_right:
                break
        if expected:
            self.accepted = _KEPT * self.accepted + accepted
            self.expected = _KEPT * self.expected + expected
        return accepted

    @property
    def acceptance(self) -> float:
        """The correction of its drafts' chances against those of all requests."""
        return (self.accepted + _PRIOR_WEIGHT) / (self.expected + _PRIOR_WEIGHT)

    def note_useful_drafts(self, num_drafts: int) -> None:
        """Note how many of its drafts were useful. Next time one more is wanted, as it may be useful, too. The number
        shrinks by at most one."""
        self.num_wanted = max(num_drafts + 1, self.num_wanted - 1, _LEAST_WANTED)


class Drafter:
    """Gives drafts the tokens that a step has left. In this step no request waits or is preempted for them.

    Args:
        proposer: drafts the tokens; None: a model on the workers does.
        vocab_size: drafts are cut before the first token id outside [0, vocab_size).
        max_draft_tokens: of a request in a step.
        max_num_rows: positions that a step may sample: the number that the memory was measured with.
        curve: how long steps take; unset: that is learned.
        patience: see `PATIENCE`.
        reads_prompts: a model on the workers needs the token ids of whole prompts.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        vocab_size: int,
        max_draft_tokens: int,
        max_num_rows: int,
        curve: StepCurve | None = None,
        patience: int = PATIENCE,
        *,
        reads_prompts: bool = True,
    ) -> None:
        self._proposer, self._reads_prompts = proposer, reads_prompts
        self._vocab_size, self._max_draft_tokens, self._max_num_rows = vocab_size, max_draft_tokens, max_num_rows
        self._costs = StepCurve() if curve is None else curve
        self._patience = patience
        self._records: dict[str, DraftRecord] = {}
        self._resting: set[str] = set()
        """Requests without proposals until the next probe; the others have one in every step."""
        self._from_workers: dict[str, DraftTokens] = {}
        """Drafts that came with a result, until the next step is scheduled."""
        self.chances = [DraftChances(), DraftChances()]
        """What drafts' chances are worth: for sampled requests, and for greedy ones."""
        self.least_chance = self._least_next = 0.0
        """`least_draft_chance` of the next step that drafts are wanted after, and where the model may stop."""
        self._balance = 4.0 * patience
        """Balance of all requests."""
        self._token_seconds = 0.0
        """Time of a token in a step without drafts; 0: not known yet."""
        self._catch_up_seconds = 0.0
        """Mean time in which a model caught up with a request that was new or had rested. It is spent whether another
        proposal follows or not, so it counts in the interval of probes, and in no balance."""
        self._step = self._next_probe = 0
        self._num_rows = 0
        """Requests in the last step."""
        self._num_wanted = 0
        """Steps that drafts were wanted after."""
        self._seconds_of_drafting = 0.0
        self.stats = DraftStats()

    # -- requests come and go ---------------------------------------------------------------------------------------

    def take_note(self, request: Request) -> None:
        """Begin to draft for a new request. A model may need the token ids of the whole prompt, a proposer those of
        some of it: beside images."""
        own = request.sampling_params.num_speculative_tokens
        num_given = sum(part.length for part in request.prompt_parts)
        has_ids = not num_given or (self._proposer is not None and num_given < request.num_prompt_tokens)
        has_ids = has_ids or not self._reads_prompts
        request.is_drafted = own != 0 and has_ids and not request.options.pooling_params
        if request.is_drafted:
            record = self._records[request.request_id] = DraftRecord(self._patience)
            request.waits_for_drafts = True
            if self._balance < 0:
                self._rest(request, record)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._drop(request.request_id)
        self._from_workers.pop(request.request_id, None)
        if self._proposer is not None:
            try:
                self._proposer.forget(request)
            except Exception:
                logger.exception("the end of request %s", request.request_id)

    def _drop(self, request_id: str) -> None:
        self._records.pop(request_id, None)
        self._resting.discard(request_id)

    def _rest(self, request: Request, record: DraftRecord) -> None:
        self._resting.add(request.request_id)
        request.waits_for_drafts = False
        record.balance, record.is_behind = 0.0, True
        if self._next_probe <= self._step:  # no request rested when it was due
            self._next_probe = self._step + self._probe_interval()

    @property
    def _is_awake(self) -> bool:
        """Whether any request has proposals in every step."""
        return len(self._resting) < len(self._records)

    def _probe_interval(self) -> int:
        """Steps until the next probe. In larger batches at least the number of requests, so that each step has hardly
        more than one proposal without benefit."""
        seconds = self._costs.proposal_seconds(_LEAST_WANTED) + self._catch_up_seconds
        cost = seconds / self._token_seconds if self._token_seconds else 1.0
        return max(_LEAST_INTERVAL, self._num_rows, math.ceil(cost / _PROBE_SHARE))

    # -- a step -----------------------------------------------------------------------------------------------------

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
        self._num_rows = num_rows = len(output.num_scheduled_tokens)
        room = min(num_tokens, self._max_num_rows - num_rows)
        due = self._due(output, requests) if room > 0 else []
        if not due or not self._costs.are_known():
            return []
        computed = sum(output.num_scheduled_tokens.values())
        if computed == num_rows and self._costs.is_unknown(computed):
            return []
        began_at = time.thread_time()
        chances_of = [self._chances(request, room) for _, request in due]
        num_drafts = min(room, sum(map(len, chances_of)))
        seconds = self._costs.seconds(computed, max(num_drafts, self._max_draft_tokens))
        counts = _most_profitable(chances_of, num_rows, seconds[: num_drafts + 1])
        num_chosen = sum(counts)
        if self._proposer is not None:
            self._costs.record_proposals(len(due), time.thread_time() - began_at)
        self._token_seconds = token_seconds = seconds[0] / num_rows
        extra = (seconds[num_chosen] - seconds[0]) / max(num_chosen, 1) / token_seconds
        # The first draft of a step costs more than the others.
        row_seconds = (seconds[-1] - seconds[1]) / max(len(seconds) - 2, 1)
        self._least_next = (self._costs.draft_seconds + row_seconds) / token_seconds / _NEXT_CHANCE
        chosen: list[tuple[int, Request, list[int]]] = []
        for (column, request), chances, count in zip(due, chances_of, counts, strict=True):
            record = self._records.get(request.request_id)
            num_proposed = len(chances) if self._proposer is None else 1
            if num_proposed == 0 or record is None:
                continue  # its drafts came too late, which says nothing of their worth; or its proposal failed
            if count:
                record.computed = count, extra * count, num_proposed
            else:
                self._settle(request, record, 0.0, num_proposed)
            record.note_useful_drafts(sum(chance >= self._least_next for chance in chances) if count else 0)
            assert record.proposal is not None
            chosen.append((column, request, record.proposal.token_ids[:count]))
        return chosen

    def _due(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> list[tuple[int, Request]]:
        """The requests that have a proposal now, with their indices in the step's columns. The others rest, or go on
        without their last token, or the workers did not draft for them."""
        on_workers = self._proposer is None
        if not (self._from_workers if on_workers else self._is_awake):
            return []
        due = []
        for index, request_id in enumerate(output.cached_requests.request_ids):
            has_any = request_id in self._from_workers if on_workers else request_id not in self._resting
            if has_any and request_id in self._records:
                request = requests[request_id]
                if request.num_computed_tokens == request.num_tokens:
                    due.append((index, request))
        return due

    def _chances(self, request: Request, room: int) -> list[float]:
        """Propose at most `room` drafts for a request whose last token is known and scheduled. Returns for each the
        chance that it and those before it are accepted."""
        record = self._records[request.request_id]
        of_kind = self.chances[request.sampling_params.temperature == 0]
        num_right = record.learn(request.all_token_ids, of_kind)
        if record.computed is not None:
            (number, extra, num_proposed), record.computed = record.computed, None
            self._settle(request, record, min(num_right, number) - extra, num_proposed)
        record.proposal = proposal = self._propose(request, min(room, self._most(request)))
        chances = [min(of_kind.of(chance) * record.acceptance, 1.0) for chance in proposal.chances]
        return list(accumulate(chances, mul))

    def _propose(self, request: Request, max_tokens: int) -> DraftTokens:
        """The proposer's drafts, or the last ones of the workers, as far as they are within the vocabulary; none if the
        request has gone on without them."""
        drafts, start = self._from_workers.pop(request.request_id, None), request.num_tokens
        try:
            if self._proposer is not None and max_tokens > 0:
                drafts = self._proposer.propose(request, max_tokens)
            if drafts is None or drafts.start != start:
                return DraftTokens(start, [], [])
            number, placeholders = 0, {request.all_token_ids[part.start] for part in request.prompt_parts}
            for token_id, chance in zip(drafts.token_ids, drafts.chances, strict=False):
                if number >= max_tokens or not (0 <= token_id < self._vocab_size and 0 < chance <= 1):
                    break
                if token_id in placeholders:
                    break
                number += 1
            return DraftTokens(start, drafts.token_ids[:number], drafts.chances[:number])
        except Exception:
            logger.exception("no more tokens are drafted for request %s", request.request_id)
            self._drop(request.request_id)
            request.waits_for_drafts = False
            return DraftTokens(start, [], [])

    def _most(self, request: Request, num_more: int = 0) -> int:
        """How many drafts a step may have of a request once it has `num_more` more tokens. The step samples one more
        token after the last of them."""
        most = min(self._max_draft_tokens, request.max_tokens - request.num_output_tokens - num_more - 1)
        own = request.sampling_params.num_speculative_tokens
        return most if own is None else min(most, own)

    def _settle(self, request: Request, record: DraftRecord, worth: float, num_proposed: int) -> None:
        """Count what a proposal saved, in times of a token without drafts, less its cost."""
        unit, most = self._costs.propose_seconds, 4.0 * self._patience
        seconds = worth * self._token_seconds - self._costs.proposal_seconds(num_proposed)
        change = seconds / unit if unit else 0.0
        self._balance = max(min(self._balance + change, most), -most - 1)
        record.balance = min(record.balance + change, most)
        if record.balance < 0:
            self._rest(request, record)

    # -- drafts of the workers --------------------------------------------------------------------------------------

    def wanted(self, output: SchedulerOutput, requests: Mapping[str, Request], num_tokens: int) -> dict[str, int]:
        """How many tokens the workers are to draft at the end of the step of `choose`, with its drafts now, for each
        request that it samples; not for those that rest."""
        wanted: dict[str, int] = {}
        if self._proposer is None:
            for new in output.new_requests:
                if new.request_id in self._records:  # new or preempted: the model has no keys and values of it
                    self._records[new.request_id].is_behind = True
            has_room = num_tokens > 0 and self._max_num_rows > self._num_rows
            drafted: Collection[str] = (
                output.num_scheduled_tokens if has_room and self._is_awake and self._costs.are_known() else ()
            )
            for request_id in drafted:
                record = self._records.get(request_id)
                if record is None or request_id in self._resting:
                    continue
                request = requests[request_id]
                # All drafts of this step may be accepted, it samples one more token, and one may be in flight.
                num_more = len(output.draft_token_ids.get(request_id, ())) + 1 + request.num_output_placeholders
                most = self._most(request, num_more)
                most = most if record.stops else min(record.num_wanted, most)
                if most > 0 and request.num_computed_tokens >= request.num_tokens:
                    wanted[request_id] = most
        if wanted:
            self._num_wanted += 1
            self.least_chance = self._least_next if self._num_wanted % _ALL_WANTED_EVERY else 0.0
        self._step += bool(output.num_scheduled_tokens)  # where steps overlap, one may be empty
        if self._step >= self._next_probe and self._resting:
            for request_id in self._resting:
                requests[request_id].waits_for_drafts = True
            self._resting.clear()
            self._next_probe = self._step + self._probe_interval()
        return wanted

    def take_result(
        self, output: SchedulerOutput, runner_output: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Count a step's drafts, and the accepted ones; take the workers' drafts, and their cost, for requests that do
        not ignore the step's result."""
        for request_id, token_ids in output.draft_token_ids.items():
            sampled = runner_output.sampled_token_ids.get(request_id)
            if sampled is not None:
                self.stats.count(len(token_ids), len(sampled) - 1)
        if not output.num_drafts_wanted or self._proposer is not None:
            return
        seconds, drafts = runner_output.draft_seconds, runner_output.drafts
        first_seconds = runner_output.first_draft_seconds
        self._seconds_of_drafting += seconds
        records = [self._records[request_id] for request_id in output.num_drafts_wanted if request_id in self._records]
        num_behind = sum(record.is_behind for record in records)
        num_further = sum(len(own.token_ids) - 1 for own in drafts.values())
        if drafts:  # what a model has to make up for is no cost of the proposal
            self._costs.record_proposals(len(drafts), first_seconds, is_upper_bound=num_behind > 0)
        if num_further > 0:
            self._costs.record_drafting(num_further, seconds - first_seconds)
        if num_behind:
            each = max(first_seconds - len(drafts) * self._costs.propose_seconds, 0.0) / num_behind
            self._catch_up_seconds = moved_mean(self._catch_up_seconds or each, each)
        for request_id, num_wanted in output.num_drafts_wanted.items():
            request, record = requests.get(request_id), self._records.get(request_id)
            if request is None or record is None or request.last_stale_step >= output.step:
                continue
            record.is_behind = False
            if request_id in drafts:
                self._from_workers[request_id] = drafts[request_id]
                record.stops |= runner_output.drafting_stopped and len(drafts[request_id].token_ids) < num_wanted
            else:  # drafting failed
                self._balance -= self._balance >= 0
                self._rest(request, record)

    def note_step_seconds(self, step: StepStats, seconds: float) -> None:
        """Note how long a step took in all, on the executor's clock: it decides the worth of drafts."""
        seconds, self._seconds_of_drafting = seconds - self._seconds_of_drafting, 0.0
        is_due = self._is_awake or step.num_draft_tokens > 0 or self._step % _LEAST_INTERVAL == 0
        if step.num_decode_tokens and is_due:
            self._costs.record(step.num_tokens, seconds, has_drafts=step.num_draft_tokens > 0)


def _most_profitable(chances_of: list[list[float]], num_rows: int, seconds: list[float]) -> list[int]:
    """How many drafts of each candidate make the step yield the most tokens per second.

    Args:
        chances_of: for each candidate, the chances that its drafts are accepted, descending.
        num_rows: tokens that the step yields without drafts.
        seconds: what it takes with 0, 1, 2, … drafts, up to as many as it has room for.
    """
    ranked = sorted(
        ((chance, place, number) for number, chances in enumerate(chances_of) for place, chance in enumerate(chances)),
        key=lambda entry: (-entry[0], entry[1]),
    )
    num_yielded = accumulate((chance for chance, _, _ in ranked), initial=float(num_rows))
    rates = [tokens / took for tokens, took in zip(num_yielded, seconds, strict=False)]
    best = rates.index(max(rates))
    counts = [0] * len(chances_of)
    if rates[best] > _LEAST_GAIN * rates[0]:
        for _, _, number in ranked[:best]:
            counts[number] += 1
    return counts
