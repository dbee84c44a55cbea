"""Proposer: the seam between the scheduler and whatever guesses the tokens to come."""

from typing import Protocol

from quire_engine.scheduler.request import Request

__all__ = ["Proposer"]


class Proposer(Protocol):
    """Drafts tokens, which a step computes along with the last known one, and samples behind each.

    What a draft is worth shows there: it is accepted if it is the token that the model samples in its place anyway. So
    drafts change how many tokens come of a step, and not which. (As little as anything else that changes how many rows
    are computed together: to the last bit on the CPU, and on a GPU as far as its kernels are alike.)

    A step with drafts is computed without CUDA graphs, for all of its requests. One that raises is not asked again for
    that request.
    """

    def drafts_for(self, request: Request) -> bool:
        """Whether it drafts for a request that has just come. If so, no step follows on from tokens of the request that
        are in flight."""

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """The tokens that may come next, at most `max_tokens`, which is at least 1; none where it has no idea."""
