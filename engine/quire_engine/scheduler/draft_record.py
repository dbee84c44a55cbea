"""DraftRecord: how a request's drafts have fared, whether they were computed or not."""

from collections.abc import Sequence

from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal

__all__ = ["DraftRecord"]

_WEIGHT_KEPT = 0.9
"""Of what is known, at each new proposal."""
_PRIOR_WEIGHT = 2.0
"""How many drafts of the request's own weigh as much as the record of all requests."""
_WORTH_WEIGHT = 0.125
"""Of the last time that it was asked for drafts, in what asking is worth."""


class DraftRecord:
    """Compares each proposal with the tokens that came in its place.

    So it also learns from drafts that were not computed, which cost nothing: a request whose drafts are no longer worth
    computing is watched, and drafted for again once they would have been right.

    Args:
        worth: accepted tokens that asking such a request for drafts yields in the mean.
    """

    __slots__ = ("_accepted", "_expected", "_proposal", "_rest", "_rest_left", "_start", "_worth")

    def __init__(self, worth: float) -> None:
        self._accepted = 0.0
        self._expected = 0.0
        self._proposal = NO_DRAFTS
        self._start = 0
        self._worth = worth
        """Tokens that a step yields in addition if the request is asked for drafts, in the mean."""
        self._rest = self._rest_left = 0

    def is_passed_over(self) -> bool:
        """Whether it is not asked for drafts in this step; counts the step."""
        if self._rest_left == 0:
            return False
        self._rest_left -= 1
        return True

    def learn(self, token_ids: Sequence[int]) -> tuple[float, float]:
        """Compare the last proposal with the tokens that followed, as far as they are known.

        Args:
            token_ids: all of the request.

        Returns:
            How many drafts were right, and how many should have been by their chances: up to the first wrong one.
        """
        accepted = expected = 0.0
        chances = self._proposal.chances
        for place, draft in enumerate(self._proposal.token_ids):
            if self._start + place >= len(token_ids):
                break
            expected += chances[place]
            if token_ids[self._start + place] != draft:
                break
            accepted += 1.0
        self._proposal = NO_DRAFTS
        if expected:
            self._accepted = _WEIGHT_KEPT * self._accepted + accepted
            self._expected = _WEIGHT_KEPT * self._expected + expected
        return accepted, expected

    def factor(self, prior: float) -> float:
        """By what its proposals' chances are to be multiplied.

        Args:
            prior: the same for all requests together.
        """
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._expected + _PRIOR_WEIGHT)

    def note(self, proposal: Proposal, start: int) -> None:
        """Remember a proposal, to compare it with what follows.

        Args:
            proposal: the drafts.
            start: where the first of them would be, among the request's tokens.
        """
        self._proposal, self._start = proposal, start

    def was_asked(self, num_gained: float, least: float, longest_rest: int) -> None:
        """Say what it was worth to ask the request for drafts. If too little in the mean, it rests, longer each time.

        Args:
            num_gained: accepted tokens that are expected of its drafts in this step; 0 if it has none.
            least: what makes up for the time that asking takes.
            longest_rest: in steps.
        """
        self._worth += (num_gained - self._worth) * _WORTH_WEIGHT
        self._rest = min(2 * self._rest + 1, longest_rest) if self._worth < least else 0
        self._rest_left = self._rest
