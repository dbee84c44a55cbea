"""Goodput: the share of recent requests that met their objectives.

Verdicts go in, ratios per class and window come out. The engine's frontend, which has the times, decides whether a
request was good (`quire_engine.slo`).

A window is a ring of buckets, each for a sixtieth of it::

      good, all │ 3,4 │ 0,0 │ 7,7 │ … │ 2,5 │     sums over all buckets are kept along
                              ▲ now: the next one to the right is the oldest, and is emptied when its time comes
"""

import time
from collections.abc import Callable, Iterable, Mapping

NUM_BUCKETS = 60


class _Window:
    """Counts of what happened in the last `seconds`, to a sixtieth."""

    def __init__(self, seconds: float) -> None:
        self._bucket_seconds = seconds / NUM_BUCKETS
        self._buckets = [[0, 0] for _ in range(NUM_BUCKETS)]
        self._number = 0
        """Of the present bucket, counted from the clock's zero."""
        self._good = self._all = 0

    def add(self, good: bool, now: float) -> None:
        self._advance(now)
        bucket = self._buckets[self._number % NUM_BUCKETS]
        bucket[0] += good
        bucket[1] += 1
        self._good += good
        self._all += 1

    def ratio(self, now: float) -> float:
        self._advance(now)
        return self._good / self._all if self._all else 1.0

    def _advance(self, now: float) -> None:
        number = int(now / self._bucket_seconds)
        for passed in range(max(self._number + 1, number - NUM_BUCKETS + 1), number + 1):
            bucket = self._buckets[passed % NUM_BUCKETS]
            self._good -= bucket[0]
            self._all -= bucket[1]
            bucket[:] = (0, 0)
        self._number = max(self._number, number)


class Goodput:
    """The windows of every class.

    Args:
        slo_classes: all classes; verdicts of others are ignored.
        windows: name → seconds.
        clock: seconds, monotonic.
    """

    def __init__(
        self, slo_classes: Iterable[str], windows: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._windows = {
            slo_class: {name: _Window(seconds) for name, seconds in windows.items()} for slo_class in slo_classes
        }

    def record(self, slo_class: str, good: bool) -> None:
        """Record a verdict."""
        now = self._clock()
        for window in self._windows.get(slo_class, {}).values():
            window.add(good, now)

    def ratios(self) -> dict[tuple[str, str], float]:
        """(class, window) → share of good requests, 0 to 1; 1 if there were none."""
        now = self._clock()
        return {
            (slo_class, name): window.ratio(now)
            for slo_class, windows in self._windows.items()
            for name, window in windows.items()
        }
