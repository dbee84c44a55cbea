"""One reading of /metrics: fetched, parsed, and the quantiles of its histograms."""

import http.client
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from quire_load.printable import printable

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name, such as `quire_step_seconds_bucket`, and its labels in order of their names."""

_PREFIX = "quire_"
_TIMEOUT_S = 3.0
_MOST_BYTES = 32 * 2**20


class ScrapeError(Exception):
    """/metrics could not be read; the text says why, for the person on call."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """All of Quire's samples at one moment."""

    time: float
    """Seconds since the epoch."""
    values: Mapping[Key, float]


def fetch(endpoint: str, path: str = "/metrics") -> str:
    """GET a page.

    Args:
        endpoint: HOST:PORT.
        path: of the page.

    Raises:
        ScrapeError: it could not be read.
    """
    try:
        with closing(http.client.HTTPConnection(endpoint, timeout=_TIMEOUT_S)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ScrapeError(f"http://{endpoint}{path} cannot be read: {why(error)}") from None
    if response.status != http.client.OK:
        raise ScrapeError(f"http://{endpoint}{path} answers {response.status} {printable(response.reason)}")
    return body.decode("utf-8", errors="replace")


def why(error: Exception) -> str:
    """An error of the network, in plain words."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused)"
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:.0f} s"
    return printable(str(error).strip()) or type(error).__name__


def parse(text: str, time: float, keys: dict[str, Key] | None = None) -> Scrape:
    """Parse Quire's samples in Prometheus' text format.

    Args:
        text: the whole answer.
        time: of the reading.
        keys: cache of parsed names and labels, by the part of a line before its value; it is updated. The parser is
            slow, and two readings only differ in the values.

    Raises:
        ScrapeError: it is not that format.
    """
    keys = {} if keys is None else keys
    values: dict[Key, float] = {}
    try:
        for line in text.splitlines():
            # Most of what tritonserver exports is not ours.
            if not line.startswith(_PREFIX):
                continue
            sample, _, text_value = line.rpartition(" ")
            key = keys.get(sample)
            if key is not None:
                values[key] = float(text_value)
                continue
            key, value = _parse_line(line)
            values[key] = float(value)
            if sample.endswith("}"):  # otherwise a value may be followed by a time
                keys[sample] = key
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeError(f"/metrics is not in Prometheus' text format: {printable(str(error))}") from None
    return Scrape(time, values)


def _parse_line(line: str) -> tuple[Key, float]:
    # Alone and without its type on purpose: of a counter whose name does not end in `_total`, such as a bucket that is
    # written as a counter, the parser changes the name.
    (family,) = text_string_to_metric_families(f"{line}\n")
    (sample,) = family.samples
    return (sample.name, tuple(sorted(sample.labels.items()))), sample.value


def quantile(q: float, buckets: Iterable[tuple[float, float]]) -> float | None:
    """The q-quantile of a histogram, as Prometheus' `histogram_quantile` computes it.

    Observations are taken to be spread evenly within their bucket; what lies beyond the last finite bound is given as
    that bound.

    Args:
        q: 0 to 1.
        buckets: (upper bound, how many observations are at most that), in any order, with the bound +Inf.

    Returns:
        None of a histogram without observations.
    """
    ordered: Sequence[tuple[float, float]] = sorted(buckets)
    if not ordered or not math.isinf(ordered[-1][0]) or ordered[-1][1] <= 0:
        return None
    rank = q * ordered[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in ordered:
        # Buckets are written one after the other: a reading in between may see a smaller count after a larger one.
        count = max(count, below)
        if count >= rank and count > 0:
            if math.isinf(bound):
                return lower
            return bound if count == below else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower
