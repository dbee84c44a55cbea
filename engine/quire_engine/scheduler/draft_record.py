"""DraftRecord: how a request's drafts have fared, whether they were computed or not."""

import math
from collections.abc import Sequence

from quire_engine.draft_chances import DraftChances
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal

__all__ = ["DraftRecord"]

_WEIGHT_KEPT = 0.9
"""Of what is known, at each new proposal."""
_PRIOR_WEIGHT = 2.0
"""How many drafts of the request's own weigh as much as that they fare as those of all requests."""
_GAIN_WEIGHT = 0.1
"""Of the last time that it was asked for drafts, in what asking gains: in any text some are worth nothing."""
_WANTED_WEIGHT = 0.25
"""Of the last time, in how many drafts were worth asking for."""
_FIRST_WANTED = 4
"""Drafts that a model is asked for first."""


class DraftRecord:
    """Compares each proposal with the tokens that came in its place.

    So it also learns from drafts that were not computed, which cost nothing: a request whose drafts are no longer worth
    computing is watched, and drafted for again once they would have been right.

    Args:
        gain: of asking such a request for drafts, in the mean; see `was_asked`.
        first_rest: steps for which it rests at first.
    """

    __slots__ = (
        "_accepted",
        "_expected",
        "_gain",
        "_has_rested",
        "_mean_worth",
        "_proposal",
        "_rest",
        "_start",
        "_stops",
        "catch_up_seconds",
        "num_wanted",
    )

    def __init__(self, gain: float, first_rest: int = 0) -> None:
        self._accepted = 0.0
        self._expected = 0.0
        self._proposal = NO_DRAFTS
        self._start = 0
        self._gain = gain
        self._rest = first_rest
        self._has_rested = True
        self.catch_up_seconds = 0.0
        """What a model has computed for it before it could draft, the last time."""
        self._mean_worth = _FIRST_WANTED - 1.0
        """How many drafts were worth asking for."""
        self.num_wanted = _FIRST_WANTED
        """How many drafts are worth asking a model for, which takes longer for each of them."""
        self._stops = False

    def has_rested(self) -> bool:
        """Whether it has rested since the last time that this was asked, or this was never asked."""
        has_rested, self._has_rested = self._has_rested, False
        return has_rested

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

    def was_asked(self, gain: float, longest_rest: int) -> int:
        """Say what it gained to ask the request for drafts. If too little, also in the mean, it rests: longer each
        time, and half as long for each time that was worth it. After such a time it is asked again at once: what a
        model had to compute first is computed then.

        Args:
            gain: the time that its drafts are expected to save in this step, by the time that asking takes; 0 if it has
                none.
            longest_rest: in steps.

        Returns:
            For how many steps it is not to be asked now.
        """
        self._gain += (gain - self._gain) * _GAIN_WEIGHT
        if self._gain >= 1:
            self._rest = 0
        elif gain > 1:
            self._rest //= 2
            return 0
        else:
            self._rest = min(2 * self._rest + 1, longest_rest)
            self._has_rested = True
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
