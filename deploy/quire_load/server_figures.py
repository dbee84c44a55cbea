"""What the server measured of a run: its histograms after it, less those before it.

Series of all labels are added up, but for the model's: engines, replicas and classes of one model are one.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_load.scrape import Key, Scrape, fetch, parse, quantile

HISTOGRAMS = {
    "ttft": "quire_time_to_first_token_seconds", "tpot": "quire_time_per_output_token_seconds",
    "itl": "quire_inter_token_latency_seconds", "e2el": "quire_e2e_request_latency_seconds",
}  # fmt: skip
"""By the names of `report.METRICS`."""
_VERDICTS = "quire_slo_requests_total"
_POLL_S, _QUIET_S, _SETTLE_S = 0.2, 1.2, 5.0
"""Histograms of tokens are written once a second; a server with other load never becomes quiet."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations of a run."""

    count: float
    total: float
    buckets: Sequence[tuple[float, float]]
    """Upper bound → how many were at most that."""

    def percentile_ms(self, q: float) -> float | None:
        """The q-quantile as far as the buckets tell it, in milliseconds; None without observations."""
        value = quantile(q, self.buckets)
        return None if value is None else 1000 * value


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFigures:
    """What the server says of a run."""

    histograms: Mapping[str, Histogram]
    """By the names of `HISTOGRAMS`."""
    verdicts: Mapping[str, Mapping[str, int]]
    """SLO class → good and miss → requests."""

    def as_dict(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """As JSON, with the names of the client's."""
        values: dict[str, Any] = {}
        for name, histogram in self.histograms.items():
            values[f"num_{name}"] = int(histogram.count)
            values[f"mean_{name}_ms"] = 1000 * histogram.total / histogram.count if histogram.count else None
            values[f"median_{name}_ms"] = histogram.percentile_ms(0.5)
            values |= {f"p{q:g}_{name}_ms": histogram.percentile_ms(q / 100) for q in percentiles}
        return {**values, "goodput": {name: dict(of) for name, of in self.verdicts.items()}}


def settled(metrics: str, *, sleep: Callable[[float], None] = time.sleep) -> Scrape:
    """A reading of /metrics that everything is in which happened before: what ended a moment ago is written later.

    Args:
        metrics: HOST:PORT.
        sleep: waits so many seconds.

    Raises:
        ScrapeError: it cannot be read.
    """
    keys: dict[str, Key] = {}
    reading, quiet_s, waited_s = parse(fetch(metrics), time.time(), keys), 0.0, 0.0
    while quiet_s < _QUIET_S and waited_s < _SETTLE_S:
        sleep(_POLL_S)
        latest = parse(fetch(metrics), time.time(), keys)
        quiet_s = quiet_s + _POLL_S if _told(latest) == _told(reading) else 0.0
        waited_s += _POLL_S
        reading = latest
    return reading


def _told(reading: Scrape) -> dict[Any, float]:
    names = {f"{name}_count" for name in HISTOGRAMS.values()}
    return {key: value for key, value in reading.values.items() if key[0] in names}


def difference(before: Scrape, after: Scrape, model: str) -> ServerFigures:
    """What lies between two readings. A series that began anew in between counts from 0."""
    grown: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for key, value in after.values.items():
        if ("model", model) in key[1]:
            earlier = before.values.get(key, 0.0)
            grown[key[0]].append((dict(key[1]), value - earlier if value >= earlier else value))
    histograms = {}
    for short, name in HISTOGRAMS.items():
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in grown[f"{name}_bucket"]:
            buckets[float(labels.get("le", math.nan))] += value
        count, total = (sum(value for _, value in grown[f"{name}_{suffix}"]) for suffix in ("count", "sum"))
        histograms[short] = Histogram(count, total, sorted(buckets.items()))
    verdicts: dict[str, dict[str, int]] = defaultdict(lambda: {"good": 0, "miss": 0})
    for labels, value in grown[_VERDICTS]:
        if value:
            verdicts[labels.get("slo", "")][labels.get("verdict", "")] += int(value)
    return ServerFigures(histograms=histograms, verdicts=verdicts)
