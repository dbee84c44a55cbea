"""DraftRecord: how many of a request's drafts were right, whether they were computed or not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_engine.draft_chances import DraftChances
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal
from quire_engine.scheduler.step_time import MEAN_WEIGHT

_WEIGHT_KEPT = 0.9
"""What earlier proposals still count at each new one."""
_PRIOR_WEIGHT = 2.0
"""The chances of all requests' drafts count as much as this many drafts of the request itself."""
_GUESSED_GAIN = 2.0
"""The first guess of a proposal's worth, as a multiple of its cost."""
_WORTH_WEIGHT = 0.1
"""Weight of the last proposal in the mean worth: in any text some proposals are worth nothing."""
_WANTED_WEIGHT = 0.25
"""Weight of the last proposal in the mean number of useful drafts."""
_FIRST_WANTED = 4
"""Drafts wanted of a model at first."""


@dataclass(slots=True)
class ProposalBenefit:
    """The mean worth and the mean cost of a proposal.

    The worth is a mean over many proposals, as only some have drafts. The cost is a mean over a few, as a process's
    first proposals are expensive. The worth begins as a multiple of the cost, so cheap proposals refute the guess as
    soon as expensive ones.
    """

    worth: float = 0.0
    """Time that the drafts were expected to save. The unit of both is the time of a token without drafts."""
    cost: float = 0.0
    guessed_share: float = 1.0
    """The share of the worth that is still the guess, `_GUESSED_GAIN` times the cost."""

    def pays(self) -> bool:
        """Whether a proposal is worth its cost."""
        return self.worth + self.guessed_share * _GUESSED_GAIN * self.cost >= self.cost

    def learn(self, worth: float, cost: float, weight: float) -> None:
        """Add a proposal; its worth has this weight against all earlier ones."""
        if self.guessed_share == 1.0:
            self.cost = cost
        self.cost += (cost - self.cost) * MEAN_WEIGHT
        self.guessed_share *= 1 - weight
        self.worth += (worth - self.worth) * weight


class DraftRecord:
    """Compares each proposal with the tokens that came in its place.

    So it also learns from drafts that were not computed, which cost nothing: a request whose drafts do not pay is
    watched, and drafted for again once they would have been right.

    Args:
        of_all: the benefit of proposals over all requests.
        first_rest: steps for which it backs off at first.
    """

    __slots__ = (
        "_accepted",
        "_benefit",
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

    def __init__(self, of_all: ProposalBenefit, first_rest: int = 0) -> None:
        self._accepted = 0.0
        self._expected = 0.0
        self._proposal = NO_DRAFTS
        self._start = 0
        self._benefit = replace(of_all)
        self._rest = first_rest
        self.is_behind = True
        """Whether a model has to compute more of it than the last step's tokens before it can draft."""
        self.catch_up_seconds = 0.0
        """Time that a model needed to catch up with it before the last drafts; not yet counted as a cost."""
        self._mean_worth = _FIRST_WANTED - 1.0
        """Mean number of useful drafts."""
        self.num_wanted = _FIRST_WANTED
        """How many drafts to want of a model, which takes longer for each of them."""
        self._stops = False

    def take_catch_up_seconds(self) -> float:
        """Return `catch_up_seconds`, once."""
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
        """The correction of its drafts' chances against those of all requests."""
        return (self._accepted + _PRIOR_WEIGHT) / (self._expected + _PRIOR_WEIGHT)

    def note(self, proposal: Proposal, start: int) -> None:
        """Remember a proposal, to compare it with what follows.

        Args:
            proposal: the drafts.
            start: where the first of them would be, among the request's tokens.
        """
        self._proposal, self._start = proposal, start

    def note_benefit(self, worth: float, cost: float, longest_rest: int) -> int:
        """Note the benefit of a proposal. If it does not pay, in the mean either, the request backs off: longer each
        time, and half as long after each proposal that paid. After such a one the next follows at once, as the model
        has caught up with the request.

        Args:
            worth: the time that the drafts are expected to save in this step, in units of a token's without drafts; 0
                if there are none.
            cost: the time that the proposal takes, likewise.
            longest_rest: in steps.

        Returns:
            For how many steps the request backs off.
        """
        self._benefit.learn(worth, cost, _WORTH_WEIGHT)
        if self._benefit.pays():
            self._rest = 0
            return 0
        if worth > cost:
            self._rest //= 2
            return 0
        return self.rest_longer(longest_rest)

    def rest_longer(self, longest_rest: int) -> int:
        """Back off for longer than the last time, whatever the benefit; returns the number of steps."""
        self._rest = min(2 * self._rest + 1, longest_rest)
        self.is_behind = True
        return self._rest

    def note_useful_drafts(self, num_drafts: int) -> None:
        """Note how many of its drafts were useful. Next time one more is wanted, as it may be useful, too. The number
        shrinks by at most one, and not below the mean plus one: the first draft is the expensive one, so a single draft
        costs nearly as much as several."""
        if self._stops:
            return
        self._mean_worth += (num_drafts - self._mean_worth) * _WANTED_WEIGHT
        self.num_wanted = max(num_drafts + 1, self.num_wanted - 1, math.ceil(self._mean_worth) + 1)

    def stops_by_itself(self, most: int) -> None:
        """Its model stops by itself where a draft has too little chance: want as many as possible."""
        self._stops, self.num_wanted = True, most
