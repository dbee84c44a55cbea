"""FaultIsolation: finds the request that made a step fail. Knows the order of suspects, but no blocks and no budgets.

::

    failed step ──► suspects ──► isolated: runs alone ──► cleared ──► all go on, in their old order
                                          └──► fails again: the faulty request, which ends
"""

from collections.abc import Sequence

from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue


class FaultIsolation:
    """Holds the requests of failed steps until they may run together again."""

    def __init__(self) -> None:
        self.suspects = FCFSRequestQueue()
        """Requests of a failed step, which wait to run one at a time."""
        self.isolated: Request | None = None
        """The suspect that runs alone until it has survived one token."""
        self.cleared = FCFSRequestQueue()
        """Suspects that have survived one; they wait until the others have run, too."""

    @property
    def is_active(self) -> bool:
        """Whether a request runs alone, or still has to."""
        return self.isolated is not None or bool(self.suspects)

    def add_suspects(self, requests: Sequence[Request]) -> None:
        """Put all requests of a failed step ahead of the present suspects."""
        self.isolated = None
        for request in reversed(requests):
            self.suspects.prepend(request)

    def clear(self) -> None:
        """Clear the isolated request: it has survived a token."""
        assert self.isolated is not None
        self.cleared.add(self.isolated)
        self.isolated = None

    def request_ended(self, request: Request) -> None:
        """If it was the isolated one, make room for the next suspect."""
        if request is self.isolated:
            self.isolated = None

    def take_cleared(self) -> list[Request]:
        """Remove and return the cleared requests, in their old order; empty while a suspect is left."""
        if not self.cleared or self.suspects or self.isolated is not None:
            return []
        taken, self.cleared = list(self.cleared), FCFSRequestQueue()
        return taken
