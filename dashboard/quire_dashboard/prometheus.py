"""History from Prometheus, by its HTTP API."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from quire_dashboard.history import Point
from quire_dashboard.queries import MOST_POINTS, WINDOW_S, Query
from quire_dashboard.scrape import ScrapeError, why

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
        step = max(1.0, (end - start) / MOST_POINTS)
        # Two scrapes at Prometheus' usual interval of 15 s must fall into every window.
        window = max(WINDOW_S, 4 * step)
        expression = query.promql(labels, window)
        answer = self._get("query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:.3f}")
        points = []
        for line in answer["result"]:
            series = line["metric"].get(by, "")
            for time, text in line["values"]:
                value = float(text)
                if math.isfinite(value):
                    points.append(Point(float(time), series, value))
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
