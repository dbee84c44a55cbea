"""LockstepClient: the engines that share the experts behind one frontend. None of them can go on without the others.

Requests are divided among them, and go on on another when theirs dies, as those of all replicas (`DataParallelClient`);
but those of all wait until the dead one is up again. Where it does not stay up, all end, and new ones are rejected.
"""

from collections.abc import Sequence
from functools import partial

from quire_engine.config import EngineConfig
from quire_engine.core.data_parallel_client import DataParallelClient
from quire_engine.core.journal import JournalEntry
from quire_engine.core.lockstep.owner import LockstepOwner
from quire_engine.core.supervised_client import OnRecovery, SupervisedClient


class LockstepClient(DataParallelClient):
    """A `DataParallelClient` whose replicas depend on each other.

    Args:
        config: all settings.
        on_recovery: as of a `DataParallelClient`.
    """

    def __init__(self, config: EngineConfig, on_recovery: OnRecovery = lambda stats, replayed_ids: None) -> None:
        self._owner = LockstepOwner(config.parallel)
        try:
            super().__init__(config, on_recovery, partial(SupervisedClient, lockstep=self._owner))
        except BaseException:
            self._owner.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether all take requests: each has experts that the others need."""
        return all(replica.is_alive for replica in self._replicas)

    @property
    def outage(self) -> str | None:
        """Why not all take requests; None while all do."""
        down = [f"engine {index}: {one.outage}" for index, one in enumerate(self._replicas) if not one.is_alive]
        return "; ".join(down) or None

    def _candidates(self) -> list[int]:
        """Those that may get a request. One that does not stay up holds up all: it gets it, and says so."""
        failing = [index for index, replica in enumerate(self._replicas) if replica.has_given_up]
        return failing or super()._candidates()

    def _on_down(self, index: int) -> None:
        """Requests wait for an engine, or are about to end with it, as those of all others then do."""
        error = self._replicas[index].unavailable
        if error is not None:
            for other in self._replicas:
                if not other.has_given_up:
                    other.end_all(error)
        super()._on_down(index)

    def _begin_to_catch_up(self, entries: Sequence[JournalEntry]) -> None:
        """Does nothing: no engine goes on before the dead one is up again, so none has a use for its cores."""

    def shutdown(self) -> None:
        """End all engine cores, or the attempts to start them. Idempotent; may be called from any thread."""
        self._owner.end_generation()  # engines that wait for another one in a step end, too
        super().shutdown()
        self._owner.close()
