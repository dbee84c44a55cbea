"""Proposer: the seam between the scheduler and the method that drafts tokens."""

from dataclasses import dataclass
from typing import Protocol

from quire_engine.messages import DraftTokens
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
    sampling (`sampling/rejection.py`). So drafts change how many tokens a step yields, but not which ones.
    (As with any number of rows: bit for bit on the CPU, and on a GPU as far as its kernels are invariant.)

    A step with drafts runs without CUDA graphs, for all of its requests. If a proposer raises for a request, that
    request has no more drafts.
    """

    def drafts_for(self, request: Request) -> bool:
        """Whether it drafts for a new request. If so, no step of the request is scheduled while its last token is in
        flight."""

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """Draft the next tokens, at most `max_tokens`, which is at least 1; none if there is no draft.

        It is not called after every token, but where drafts can be worth their cost.
        """

    def forget(self, request: Request) -> None:
        """The request has ended, with or without drafts."""


class WorkerDrafts:
    """The `Proposer` of methods whose model runs on the workers: keeps the drafts that came with a result until the
    next step is scheduled.

    Such a model drafts at the end of a step, as soon as the step's tokens are known. The drafts come with the result,
    and the next step can compute them::

        schedule N     wants drafts of a and c
        step N         ─► tokens of a, b, c ─► drafts of a, c
        schedule N+1   takes those of a and c from WorkerDrafts
    """

    def __init__(self) -> None:
        self._drafts: dict[str, DraftTokens] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether drafts have come for a request."""
        return request_id in self._drafts

    def __len__(self) -> int:
        """Requests for which drafts have come."""
        return len(self._drafts)

    def take(self, request_id: str, drafts: DraftTokens) -> None:
        """Keep the drafts of a request, in place of earlier ones."""
        self._drafts[request_id] = drafts

    def drafts_for(self, request: Request) -> bool:
        """For every request."""
        return True

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """The last drafts, once; none if the request has other tokens now, as it was preempted or went on without."""
        drafts = self._drafts.pop(request.request_id)
        if drafts.start != request.num_tokens:
            return NO_DRAFTS
        return Proposal(drafts.token_ids[:max_tokens], drafts.chances[:max_tokens])

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._drafts.pop(request.request_id, None)
