"""DraftRecord: how a request's drafts have fared, whether they were computed or not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_engine.draft_chances import DraftChances
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal
from quire_engine.scheduler.step_costs import MEAN_WEIGHT

_WEIGHT_KEPT = 0.9
"""Of what is known, at each new proposal."""
_PRIOR_WEIGHT = 2.0
"""How many drafts of the request's own weigh as much as that they fare as those of all requests."""
_GUESSED_GAIN = 2.0
"""What asking for drafts is worth, by what it costs, before the first request for drafts."""
_WORTH_WEIGHT = 0.1
"""Of the last time that it was asked for drafts, in what asking is worth: in any text some are worth nothing."""
_WANTED_WEIGHT = 0.25
"""Of the last time, in how many drafts were worth asking for."""
_FIRST_WANTED = 4
"""Drafts that a model is asked for first."""


@dataclass(slots=True)
class AskingYield:
    """What asking a request for drafts was worth and what it cost, in the mean.

    What it is worth is a matter of many times, as only some have drafts. What it costs is known after a few, and the
    first of all are dear. The worth begins with a guess, some times the cost: so cheap askings refute it as soon as
    dear ones.
    """

    worth: float = 0.0
    """Time that the drafts were expected to save in the step; in that of a token without drafts, as the cost."""
    cost: float = 0.0
    guessed_share: float = 1.0
    """Of the worth, that is the guess: `_GUESSED_GAIN` times the cost."""

    def pays(self) -> bool:
        """Whether asking is worth what it costs."""
        return self.worth + self.guessed_share * _GUESSED_GAIN * self.cost >= self.cost

    def learn(self, worth: float, cost: float, weight: float) -> None:
        """Take note of one asking, whose worth counts so much against all those before it."""
        if self.guessed_share == 1.0:
            self.cost = cost
        self.cost += (cost - self.cost) * MEAN_WEIGHT
        self.guessed_share *= 1 - weight
        self.worth += (worth - self.worth) * weight


class DraftRecord:
    """Compares each proposal with the tokens that came in its place.

    So it also learns from drafts that were not computed, which cost nothing: a request whose drafts are no longer worth
    computing is watched, and drafted for again once they would have been right.

    Args:
        of_all: what asking yields, of all requests.
        first_rest: steps for which it rests at first.
    """

    __slots__ = (
        "_accepted",
        "_asking",
        "_expected",
        "_mean_worth",
        "_proposal",
        "_rest",
        "_start",
        "_stops",
        "catch_up_seconds",
        "is_behind",
        "num_wanted",
    )

    def __init__(self, of_all: AskingYield, first_rest: int = 0) -> None:
        self._accepted = 0.0
        self._expected = 0.0
        self._proposal = NO_DRAFTS
        self._start = 0
        self._asking = replace(of_all)
        self._rest = first_rest
        self.is_behind = True
        """Whether a model has more to compute of it, before it can draft, than the last step's tokens."""
        self.catch_up_seconds = 0.0
        """What a model has computed for it before it could draft, the last time."""
        self._mean_worth = _FIRST_WANTED - 1.0
        """How many drafts were worth asking for."""
        self.num_wanted = _FIRST_WANTED
        """How many drafts are worth asking a model for, which takes longer for each of them."""
        self._stops = False

    def take_catch_up_seconds(self) -> float:
        """Those that no asking was charged with yet."""
        seconds, self.catch_up_seconds = self.catch_up_seconds, 0.0
        return seconds

    def learn(self, token_ids: Sequence[int], chances: DraftChances) -> None:
        """Compare the last proposal with the tokens that followed, as far as they are known: up to the first wrong one.

        Args:
            token_ids: all of the request.
            chances: of all requests of its kind; they learn, too.
        """
        accepted = expected = 0.0
        proposal, self._proposal = self._proposal, NO_DRAFTS
        for token_id, draft, chance in zip(
            token_ids[self._start : self._start + len(proposal.token_ids)], proposal.token_ids, proposal.chances,
            strict=False,
        ):  # fmt: skip
            is_right = token_id == draft
            expected += chances.of(chance)
            accepted += is_right
            chances.learn(chance, is_right)
            if not is_right:
                break
        if expected:
            self._accepted = _WEIGHT_KEPT * self._accepted + accepted
            self._expected = _WEIGHT_KEPT * self._expected + expected

    def factor(self) -> float:
        """By what the chances of its proposals are to be multiplied, next to what they are for all."""
        return (self._accepted + _PRIOR_WEIGHT) / (self._expected + _PRIOR_WEIGHT)

    def note(self, proposal: Proposal, start: int) -> None:
        """Remember a proposal, to compare it with what follows.

        Args:
            proposal: the drafts.
            start: where the first of them would be, among the request's tokens.
        """
        self._proposal, self._start = proposal, start

    def was_asked(self, worth: float, cost: float, longest_rest: int) -> int:
        """Say what it yielded to ask the request for drafts. If too little, also in the mean, it rests: longer each
        time, and half as long for each time that was worth it. After such a time it is asked again at once: what a
        model had to compute first is computed then.

        Args:
            worth: the time that its drafts are expected to save in this step, in that of a token without drafts; 0 if
                it has none.
            cost: the time that asking takes, likewise.
            longest_rest: in steps.

        Returns:
            For how many steps it is not to be asked now.
        """
        self._asking.learn(worth, cost, _WORTH_WEIGHT)
        if self._asking.pays():
            self._rest = 0
            return 0
        if worth > cost:
            self._rest //= 2
            return 0
        return self.rest_longer(longest_rest)

    def rest_longer(self, longest_rest: int) -> int:
        """Let it rest, for longer than the last time, whatever asking yields otherwise; see `was_asked`."""
        self._rest = min(2 * self._rest + 1, longest_rest)
        self.is_behind = True
        return self._rest

    def was_worth(self, num_drafts: int) -> None:
        """Say how many of its drafts were worth asking for: next time one more is wanted, to see whether that is worth
        it, too; but at most one fewer than the last time, and one more than in the mean. The first draft is the dear
        one: whoever asks for one alone because of a few bad guesses pays nearly as much for little."""
        if self._stops:
            return
        self._mean_worth += (num_drafts - self._mean_worth) * _WANTED_WEIGHT
        self.num_wanted = max(num_drafts + 1, self.num_wanted - 1, math.ceil(self._mean_worth) + 1)

    def stops_by_itself(self, most: int) -> None:
        """Say that its model stops where a draft has too little chance: it may be asked for as many as there may be."""
        self._stops, self.num_wanted = True, most
