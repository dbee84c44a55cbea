"""History from Prometheus, by its HTTP API."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from quire_load.scrape import ScrapeError, why

from quire_dashboard.history import Point
from quire_dashboard.queries import MOST_POINTS, WINDOW_S, Query

__all__ = ["Prometheus"]

_TIMEOUT_S = 5.0


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
            ScrapeError: Prometheus does not answer, or refused.
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

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        data = urllib.parse.urlencode(parameters).encode()
        request = urllib.request.Request(f"{self._url}/api/v1/{what}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise ScrapeError(f"Prometheus at {self._url} refuses the query: {_said(error)}") from None
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
