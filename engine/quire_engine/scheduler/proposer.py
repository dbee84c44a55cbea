"""Proposer: the seam between the scheduler and the method that drafts tokens."""

from dataclasses import dataclass
from typing import Protocol

from quire_engine.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, and how likely each is to be accepted."""

    token_ids: list[int]
    chances: list[float]
    """For each, the estimated chance in (0, 1] that it is accepted if those before it were."""


NO_DRAFTS = Proposal([], [])


class Proposer(Protocol):
    """Drafts tokens. A step computes them along with the last known token, and samples after each.

    A draft is accepted if it is the token that the model samples in its place, unless the settings ask for rejection
    sampling (`sampling/rejection.py`). So drafts change how many tokens a step
    yields, but not which ones. (Like anything that changes how many rows are computed together: bit for bit on the CPU,
    and on a GPU as far as its kernels compute alike.)

    A step with drafts runs without CUDA graphs, for all of its requests. If a proposer raises for a request, it is not
    asked again for that request.
    """

    def drafts_for(self, request: Request) -> bool:
        """Whether it drafts for a new request. If so, no step of the request is scheduled while its last token is in
        flight."""

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Draft the next tokens, at most `max_tokens`, which is at least 1; none if there is no draft.

        It is not asked after every token: only where its drafts can be worth their cost.
        """

    def forget(self, request: Request) -> None:
        """The request has ended, with or without drafts."""
