"""A clock that a test moves on, and an event loop whose time passes only when everybody sleeps, and then at once."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Clock", "run_in_virtual_time"]

_T = TypeVar("_T")


class Clock:
    """A clock in seconds that only a test advances."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Does not wait: the loop's clock moves on by as long as it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        events = super().select(0)
        if not events:
            self.now += max(timeout, 0.0)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """Run it to its end in a new loop; the loop's clock begins at 0."""
    loop = _Loop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
