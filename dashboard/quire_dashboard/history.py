"""History: the readings of the last hour, in compact form.

    keys     [ k0   k1   k2  …  k9 ]          every sample ever seen, in order of appearance; only grows
    rows     [ 12.  0.4  7. ]                 an hour ago: k3 and later had not appeared yet
             [ 13.  0.4  9.  1. ]
             [ 13.  nan  9.  1.  …  3. ]      k1 was missing: its model was unloaded, or its engine gone

Counters are kept as if they were never reset: a value below its predecessor means that the server was restarted, and
what was counted before is added to all that follow. So an increase is one subtraction, even over restarts.
"""

import bisect
import math
import threading
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_load.scrape import Key, Scrape

_NAN = math.nan
_CUMULATIVE = ("_total", "_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one line of a chart."""

    time: float
    """Seconds since the epoch."""
    series: str
    value: float
    """nan: there was none, and the line ends until there is one again."""


@dataclass(frozen=True, slots=True)
class View:
    """Immutable readings, and the column of each sample in their rows."""

    index: Mapping[Key, int]
    times: list[float]
    rows: list["array[float]"]
    first: int = 0
    """Number of the first of these readings, counted from the very first one."""
    _found: dict[object, list[tuple[dict[str, str], int]]] = field(default_factory=dict, compare=False)
    """Answers of `columns`: a chart asks the same for each of its moments."""

    def columns(self, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], int]]:
        """The samples of a name that have all these labels: (all their labels, column)."""
        wanted = frozenset(labels.items())
        found = self._found.get((name, wanted))
        if found is None:
            samples = [(own, column) for (metric, own), column in self.index.items() if metric == name]
            found = [(dict(own), column) for own, column in samples if wanted <= set(own)]
            self._found[name, wanted] = found
        return found

    def at(self, column: int, row: int) -> float:
        """The value, nan where the sample was not there."""
        values = self.rows[row]
        return values[column] if column < len(values) else _NAN

    def increase(self, column: int, first: int, last: int) -> float:
        """How much a counter grew between two readings; what appeared in between began at its first value."""
        while first < last and math.isnan(self.at(column, first)):
            first += 1
        while last > first and math.isnan(self.at(column, last)):
            last -= 1
        grown = self.at(column, last) - self.at(column, first)
        return 0.0 if math.isnan(grown) else max(0.0, grown)

    @property
    def last(self) -> int:
        """Number of the last of these readings; one less than `first` when there is none."""
        return self.first + len(self.rows) - 1

    def row_at(self, time: float) -> int:
        """The last reading that is not after `time`, else the first one."""
        return max(0, bisect.bisect_right(self.times, time) - 1)


class Ring:
    """The last `size` readings. One thread appends, any may read."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._index: dict[Key, int] = {}
        self._is_cumulative: list[bool] = []
        self._times: deque[float] = deque(maxlen=size)
        self._rows: deque[array[float]] = deque(maxlen=size)
        self._last_seen: list[float] = []
        self._before_restarts: list[float] = []
        self._num_readings = 0
        self._view: View | None = None
        self._known: tuple[dict[Key, int], dict[object, list[tuple[dict[str, str], int]]]] | None = None
        """The index, and what views have found in it; both until there is another sample."""

    def append(self, scrape: Scrape) -> None:
        """Append one reading. If the clock has been set back, those before are forgotten: windows go by time."""
        with self._lock:
            if self._times and scrape.time < self._times[-1]:
                self._times.clear()
                self._rows.clear()
            for key in scrape.values:
                if key not in self._index:
                    self._index[key] = len(self._index)
                    self._is_cumulative.append(key[0].endswith(_CUMULATIVE))
                    self._last_seen.append(_NAN)
                    self._before_restarts.append(0.0)
            row = array("d", [_NAN]) * len(self._index)
            for key, value in scrape.values.items():
                column = self._index[key]
                row[column] = self._adjusted(column, value) if self._is_cumulative[column] else value
            self._times.append(scrape.time)
            self._rows.append(row)
            self._num_readings += 1
            self._view = None

    def _adjusted(self, column: int, value: float) -> float:
        if value < self._last_seen[column]:
            self._before_restarts[column] += self._last_seen[column]
        self._last_seen[column] = value
        return value + self._before_restarts[column]

    def view(self) -> View:
        """The present readings."""
        with self._lock:
            if self._view is None:
                first = self._num_readings - len(self._rows)
                if self._known is None or len(self._known[0]) != len(self._index):
                    self._known = dict(self._index), {}
                index, found = self._known
                self._view = View(index, list(self._times), list(self._rows), first, found)
            return self._view
