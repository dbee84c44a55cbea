"""CatchUp: the moments after an engine is lost, in which other engines compute again what it had in its KV cache.

::

    an engine is lost ─► its requests are moved ─► each has its next token ─► its next engine is started
                         └─ the others use its cores, too ────────────────┘

The start of an engine takes as many cores as it can get. Streams that stand still need them more, so the start waits
for them, but not longer than `CATCH_UP_SECONDS`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire_engine.messages import EngineCoreOutput, UseCores

CATCH_UP_SECONDS = 2.0
"""About four times what the requests of a full demo engine take on one core of two."""


class _Engine(Protocol):
    """The part of a `Replica` that is needed here."""

    def tell(self, call: UseCores) -> None: ...


class CatchUp:
    """One at a time: when another engine is lost, the requests of the first are moved again, or have nearly caught up.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._engines: Sequence[_Engine] = ()
        self._over: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request_ids: Iterable[str], engines: Sequence[_Engine]) -> asyncio.Event:
        """Begin to wait for the next tokens of requests that are about to be sent to other engines.

        Args:
            request_ids: at least one.
            engines: all that are up on this host: they have its cores to themselves meanwhile.

        Returns:
            Set when the wait is over.
        """
        self.end()
        self._left, self._engines, self._over = set(request_ids), engines, asyncio.Event()
        for engine in engines:
            engine.tell(UseCores(len(engines)))
        self._timer = asyncio.get_running_loop().call_later(CATCH_UP_SECONDS, self.end)
        return self._over

    def note_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Count what any engine sends."""
        if self._over is not None:
            self._left.difference_update(
                output.request_id for output in outputs if output.new_token_ids or output.finish_reason is not None
            )
            self._end_if_done()

    def remove(self, request_id: str) -> None:
        """Wait for a request no longer: it was aborted."""
        if self._over is not None:
            self._left.discard(request_id)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._left:
            self.end()

    def end(self) -> None:
        """End the wait, and give every engine its own share of the cores. Idempotent."""
        if self._over is None or self._timer is None:
            return
        self._timer.cancel()
        self._over.set()
        self._over = self._timer = None
        for engine in self._engines:
            engine.tell(UseCores(0))
        self._engines = ()
