"""Trials: finds out which request made a step fail. Knows whose turn it is, and nothing of blocks or budgets.

::

    failed step ──► suspects ──► on trial, alone ──► acquitted ──► all go on, in their old order
                                       └──► fails again: the culprit, which ends
"""

from collections.abc import Sequence

from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue

__all__ = ["Trials"]


class Trials:
    """The requests of failed steps, until they may run together again."""

    def __init__(self) -> None:
        self.suspects = FCFSRequestQueue()
        """Requests of a failed step, which wait to be tried one at a time."""
        self.on_trial: Request | None = None
        """The suspect that runs alone until it has survived one token."""
        self.acquitted = FCFSRequestQueue()
        """Suspects that have; they wait for the trials of the others."""

    @property
    def are_on(self) -> bool:
        """Whether somebody is on trial, or still to be."""
        return self.on_trial is not None or bool(self.suspects)

    def add_suspects(self, requests: Sequence[Request]) -> None:
        """Let all requests of a failed step be tried, before those that were suspects already."""
        self.on_trial = None
        for request in reversed(requests):
            self.suspects.prepend(request)

    def acquit(self) -> None:
        """The one on trial has survived a token."""
        assert self.on_trial is not None
        self.acquitted.add(self.on_trial)
        self.on_trial = None

    def request_ended(self, request: Request) -> None:
        """When that was the one on trial, the next one's turn has come."""
        if request is self.on_trial:
            self.on_trial = None

    def take_acquitted(self) -> list[Request]:
        """All who have survived, in their old order, once nobody is left to be tried."""
        if not self.acquitted or self.suspects or self.on_trial is not None:
            return []
        taken, self.acquitted = list(self.acquitted), FCFSRequestQueue()
        return taken
