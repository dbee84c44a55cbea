"""WorkerDrafts: the `Proposer` of the methods whose model runs on the workers, beside the one that they draft for.

Such a model drafts at the end of a step, as soon as the step's tokens are known. The drafts come with the result, and
the next step can compute them::

    schedule N     wants drafts of a and c
    step N         ─► tokens of a, b, c ─► drafts of a, c
    schedule N+1   asks WorkerDrafts for those of a and c
"""

from quire_engine.messages import DraftTokens
from quire_engine.scheduler.proposer import NO_DRAFTS, Proposal
from quire_engine.scheduler.request import Request


class WorkerDrafts:
    """Keeps the drafts that came with a result until they are asked for."""

    def __init__(self) -> None:
        self._drafts: dict[str, DraftTokens] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether drafts have come for a request."""
        return request_id in self._drafts

    def __len__(self) -> int:
        """Requests for which drafts have come."""
        return len(self._drafts)

    def take(self, request_id: str, drafts: DraftTokens) -> None:
        """Keep what was drafted for a request, in place of what came before."""
        self._drafts[request_id] = drafts

    def drafts_for(self, request: Request) -> bool:
        """For all."""
        return True

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """What came last, once; nothing if the request has other tokens now: it was preempted, or goes on without."""
        drafts = self._drafts.pop(request.request_id)
        if drafts.start != request.num_tokens:
            return NO_DRAFTS
        return Proposal(drafts.token_ids[:max_tokens], drafts.chances[:max_tokens])

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._drafts.pop(request.request_id, None)
