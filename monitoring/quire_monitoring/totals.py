"""Totals: every metric of an engine as it is now, for exporters that are asked for all of it at once.

Which metrics there are and what they count comes from the same table and the same accumulator as with every other
exporter; this only adds up.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import MetricDefinition, MetricKind, Series, series


@dataclass(frozen=True, slots=True)
class Histogram:
    """All observations of one series."""

    cumulative_counts: Sequence[int]
    """How many were at most as large as each bound; the last entry is the number of all."""
    sum: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its series."""

    definition: MetricDefinition
    labels: Mapping[str, str]
    """Of every series."""
    series: Sequence[tuple[Mapping[str, str], float | Histogram]]
    """Own labels and present value of each."""


class Totals:
    """Adds up. Thread-safe.

    Args:
        accumulator: where statistics are recorded.
        definitions: the metrics.
        labels: of every series: model, version and engine.
        health: whether the engine is up, and the same for each rank; called by every `read`.
        aliases: whether there are metrics of vLLM's names among the definitions.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        definitions: Sequence[MetricDefinition],
        labels: Mapping[str, str],
        health: Callable[[], tuple[bool, Sequence[bool]]],
        *,
        aliases: bool = False,
    ) -> None:
        self.definitions = tuple(definitions)
        self._accumulator, self._reader = accumulator, accumulator.reader(aliases=aliases)
        self._labels, self._health, self._aliases = dict(labels), health, aliases
        self._lock = threading.Lock()
        self._counters: Counter[Series] = Counter()
        self._sums: Counter[Series] = Counter()
        self._buckets = {
            series(definition.name, **own): definition.buckets
            for definition in self.definitions
            if definition.kind is MetricKind.HISTOGRAM
            for own in definition.label_sets()
        }
        self._counts = {one: [0] * (len(buckets) + 1) for one, buckets in self._buckets.items()}

    def add_up(self) -> None:
        """Add what was recorded since the last call; bounds the memory between two reads."""
        with self._lock:
            counters, observations = self._reader.take()
            self._counters.update(counters)
            for one, values in observations.items():
                grown = cumulative_counts(self._buckets[one], values)
                self._counts[one] = [count + growth for count, growth in zip(self._counts[one], grown, strict=True)]
                self._sums[one] += sum(values)  # type: ignore[assignment]

    def read(self) -> Iterator[Family]:
        """Every metric, with all its series, in the order of the definitions."""
        self.add_up()
        gauges = self._accumulator.gauges(*self._health(), aliases=self._aliases)
        with self._lock:
            families = [self._family(definition, gauges) for definition in self.definitions]
        yield from families

    def _family(self, definition: MetricDefinition, gauges: Mapping[Series, float]) -> Family:
        labels = self._labels
        if definition.name.startswith("vllm:"):
            labels = {**labels, "model_name": labels.get("model", "")}
        found: list[tuple[Mapping[str, str], float | Histogram]] = []
        known = gauges if definition.kind is MetricKind.GAUGE else self._counters
        come = [dict(own) for name, own in known if name == definition.name] if definition.is_open else []
        for own in (*definition.label_sets(), *come):
            one = series(definition.name, **own)
            if definition.kind is MetricKind.HISTOGRAM:
                found.append((own, Histogram(self._counts[one], self._sums[one])))
            else:
                found.append((own, known[one]))
        return Family(definition, labels, found)


def cumulative_counts(buckets: Sequence[float], values: Sequence[float]) -> list[int]:
    """How many values are at most as large as each bound; the last entry is the number of all."""
    counts = [0] * (len(buckets) + 1)
    for value in values:
        counts[bisect_left(buckets, value)] += 1
    return list(accumulate(counts))


def bucket_bound(bound: float) -> str:
    """A bucket's upper bound as Triton writes it in the label `le`."""
    return "+Inf" if bound == float("inf") else f"{bound:.16g}"
