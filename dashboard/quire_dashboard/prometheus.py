"""History from Prometheus, by its HTTP API."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from quire_load.scrape import Key, Scrape, ScrapeError, why

from quire_dashboard.history import Point
from quire_dashboard.queries import MOST_POINTS, WINDOW_S, Query, selector

_TIMEOUT_S = 5.0
_READINGS_S = 15.0
"""Between two of `Prometheus.readings`: Prometheus' usual interval."""


class Prometheus:
    """A Prometheus that scrapes the server.

    Args:
        url: its base URL.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def range(self, query: Query, by: str, labels: Mapping[str, str], start: float, end: float) -> list[Point]:
        """A query between two moments, in seconds since the epoch; `by` is the label that distinguishes the lines.

        Raises:
            ScrapeError: Prometheus does not answer, or rejects the query.
        """
        step = max(1.0, round((end - start) / MOST_POINTS, 3))
        start = end - int((end - start) / step) * step  # so that the last moment is `end`
        # Two scrapes at Prometheus' usual interval of 15 s must fall into every window.
        window = max(WINDOW_S, 4 * step)
        expression = query.promql(labels, window)
        moments = {"start": f"{start:.3f}", "end": f"{end + 0.001:.3f}", "step": f"{step:.3f}"}
        answer = self._get("query_range", query=expression, **moments)
        points = []
        for line in answer["result"]:
            series = line["metric"].get(by, "")
            before = math.inf
            for time, text in line["values"]:
                value = float(text)
                if time - before > 1.5 * step:  # it says nothing of moments without a value
                    points.append(Point(before + step, series, math.nan))
                points.append(Point(float(time), series, value if math.isfinite(value) else math.nan))
                before = float(time)
        return points

    def readings(self, keys: Collection[Key], labels: Mapping[str, str], start: float, end: float) -> list[Scrape]:
        """What readings of /metrics would have been between two moments.

        Args:
            keys: samples of a reading, which say what labels each name has besides those that Prometheus adds.
            labels: of the server's series.
            start: seconds since the epoch.
            end: likewise.

        Returns:
            None when a series comes from several servers: which of them is meant cannot be told.

        Raises:
            ScrapeError: Prometheus does not answer, or rejects the query.
        """
        own_labels: dict[str, set[str]] = defaultdict(set)
        for name, pairs in keys:
            own_labels[name].update(label for label, _ in pairs)
        expression = f'{{__name__=~"quire_.+",{selector(labels)[1:]}'
        moments = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{_READINGS_S:.3f}"}
        found: dict[float, dict[Key, float]] = defaultdict(dict)
        for line in self._get("query_range", query=expression, **moments)["result"]:
            name = line["metric"]["__name__"]
            own = own_labels.get(name)
            if own is None:
                continue
            key = (name, tuple(sorted((label, value) for label, value in line["metric"].items() if label in own)))
            for time, text in line["values"]:
                if key in found[float(time)]:
                    return []
                found[float(time)][key] = float(text)
        return [Scrape(time, values) for time, values in sorted(found.items())]

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        data = urllib.parse.urlencode(parameters).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/{what}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise ScrapeError(f"Prometheus at {self._url} rejects the query: {_said(error)}") from None
        except urllib.error.URLError as error:
            reason = error.reason if isinstance(error.reason, Exception) else error
            raise ScrapeError(f"Prometheus at {self._url} cannot be asked: {why(reason)}") from None
        except (OSError, ValueError) as error:
            raise ScrapeError(f"Prometheus at {self._url} cannot be asked: {why(error)}") from None
        data_of_answer: dict[str, Any] = body["data"]
        return data_of_answer


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
