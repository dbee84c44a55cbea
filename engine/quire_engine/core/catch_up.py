"""CatchUp: the moments after an engine is gone, in which others compute again what it had in its KV cache.

::

    an engine is gone ─► its requests are moved ─► each has its next token ─► its next engine is started
                         └─ the others use its cores, too ───────────────┘

The start of an engine takes as many cores as it can get, and those whose streams stand still need them more: it is
soon enough when they go on. Where that takes longer than `CATCH_UP_SECONDS`, the start no longer waits for it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire_engine.messages import EngineCoreOutput, UseCores

CATCH_UP_SECONDS = 2.0
"""About four times what the requests of a full demo engine take on one core of two."""


class _Engine(Protocol):
    """Of a `SupervisedClient` what is needed here."""

    def tell(self, call: UseCores) -> None: ...


class CatchUp:
    """One at a time: when another engine is gone, what the first had left behind is moved again, or is nearly done.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._engines: Sequence[_Engine] = ()
        self._over: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request_ids: Iterable[str], engines: Sequence[_Engine]) -> asyncio.Event:
        """These requests are about to be sent to engines, which have the cores of this host to themselves until then.

        Args:
            request_ids: one at least.
            engines: all that are up on this host.

        Returns:
            Set when it is over.
        """
        self.end()
        self._left, self._engines, self._over = set(request_ids), engines, asyncio.Event()
        for engine in engines:
            engine.tell(UseCores(len(engines)))
        self._timer = asyncio.get_running_loop().call_later(CATCH_UP_SECONDS, self.end)
        return self._over

    def note_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Take note of what comes from any engine."""
        if self._over is not None:
            self._left.difference_update(
                output.request_id for output in outputs if output.new_token_ids or output.finish_reason is not None
            )
            self._end_if_done()

    def remove(self, request_id: str) -> None:
        """A request has ended on this side."""
        if self._over is not None:
            self._left.discard(request_id)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._left:
            self.end()

    def end(self) -> None:
        """End the waiting, and give every engine its own share of the cores. Idempotent."""
        if self._over is None or self._timer is None:
            return
        self._timer.cancel()
        self._over.set()
        self._over = self._timer = None
        for engine in self._engines:
            engine.tell(UseCores(0))
        self._engines = ()
