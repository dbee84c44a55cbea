"""The example for Alertmanager, by the real one."""

import json
import urllib.request
from typing import Any

import pytest
from support.prometheus import alertmanager
from support.serving import wait_until


def test_what_is_down_silences_what_is_of_it() -> None:
    """An engine its own model's alerts, a server those of all models."""
    engine = {"instance": "a:8002", "model": "m", "version": "1", "engine": "0"}
    of_others = [{**engine, "model": "n"}, {**engine, "version": "2"}, {**engine, "instance": "b:8002"}]
    down = {"alertname": "QuireEngineDown", "severity": "page", **engine}
    silenced = {"alertname": "QuireQueueGrowing", "severity": "page", "reason": "queue", **engine}
    heard = [{**silenced, **labels} for labels in of_others]
    objectives = {"alertname": "QuireSLOBurnFast", "severity": "page", "model": "m", "version": "1", "slo": "default"}
    with alertmanager("127.0.0.1:9", factor=1.0) as address:
        if address is None:
            pytest.skip("Debian's Alertmanager is only unpacked, and its template cannot be put where it looks for it")
        url = f"http://{address}/api/v2/alerts"
        alerts = [down, silenced, *heard, objectives]
        wait_until(lambda: inhibited(url, alerts) == [silenced], "it knows what is down")
        server = {"alertname": "QuireServerDown", "severity": "page", "instance": "a:8002", "job": "quire"}
        alerts.append(server)
        wait_until(lambda: inhibited(url, alerts) == [down, silenced, *heard[:2]], "it knows that the server is down")


def inhibited(url: str, alerts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Have Alertmanager take these; which of them another one silences, in their order.

    Its inhibitor knows what silences others a moment after that is listed, and then for all of them at once.
    """
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).close()
    seen: list[dict[str, Any]] = []

    def all_are_there() -> bool:
        with urllib.request.urlopen(url, timeout=30) as response:
            seen[:] = json.load(response)
        return len(seen) == len(alerts)

    wait_until(all_are_there, "Alertmanager has them all")
    found = [alert["labels"] for alert in seen if alert["status"]["inhibitedBy"]]
    return [labels for labels in alerts if labels in found]
