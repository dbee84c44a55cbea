"""A real Prometheus for tests: the scrape configuration and the rules of monitoring/prometheus, on a port of its own.

What is changed of the configuration is only how often it looks, whom it looks at, and that it tells no Alertmanager.
The rules are the very files. Their windows (`[5m]` … `[6h]`) need no scaling where ratios and quantiles are asked for:
over a window that is longer than the history, these are those of the history. (A rate alone is not: it is divided by
the whole window.)
"""

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.promql import find_tool
from support.serving import ROOT, wait_until

__all__ = ["Prometheus", "Sample", "prometheus"]

CONFIGURATION = ROOT / "monitoring" / "prometheus"
START_DEADLINE_S = 30.0
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an answer, with its values in order of time."""

    labels: dict[str, str]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str, time: float | None = None) -> list[Sample]:
        """An expression at one moment, in seconds since the epoch; unset: now."""
        answer = self._get("query", query=expression, **({} if time is None else {"time": f"{time:.3f}"}))
        if answer["resultType"] == "scalar":
            return [Sample({}, [float(answer["result"][1])])]
        return [Sample(one["metric"], [float(one["value"][1])]) for one in answer["result"]]

    def value(self, expression: str, time: float | None = None) -> float:
        """The value of an expression that has exactly one."""
        samples = self.query(expression, time)
        assert len(samples) == 1, f"{expression}: {samples}"
        return samples[0].values[0]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[Sample]:
        """An expression over a time, as a panel of Grafana's asks."""
        answer = self._get("query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:.3f}")
        return [Sample(one["metric"], [float(text) for _, text in one["values"]]) for one in answer["result"]]

    def label_values(self, selector: str, label: str) -> list[str]:
        """The values of a label of some series, as Grafana's `label_values` asks."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode(errors='replace')}") from None


@contextmanager
def prometheus(
    metrics: str, folder: Path, *, scrape_interval: str = "1s", evaluation_interval: str = "1s"
) -> Iterator[Prometheus]:
    """Start one, and stop it afterwards.

    Args:
        metrics: `host:port` that it scrapes.
        folder: an empty one, for its configuration and its data.
        scrape_interval: instead of the configuration's own.
        evaluation_interval: the same.
    """
    _configure(folder, metrics, {"scrape_interval": scrape_interval, "evaluation_interval": evaluation_interval})
    log = folder / "prometheus.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [find_tool("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             "--web.listen-address=127.0.0.1:0"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        running = Prometheus(f"http://{_address(process, log)}")
        wait_until(lambda: _is_ready(running.url), "Prometheus is ready", START_DEADLINE_S)
        yield running
    finally:
        process.terminate()
        try:
            code = process.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert code == 0, log.read_text(errors="replace")


def _configure(folder: Path, metrics: str, intervals: dict[str, str]) -> None:
    shutil.copytree(CONFIGURATION, folder, dirs_exist_ok=True)
    file = folder / "prometheus.yml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["global"] |= intervals
    del content["alerting"]
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": [metrics]}]), encoding="utf-8")


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where it listens: it picks a free port, and says so in its log."""

    def has_said() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        return _LISTENING.search(log.read_text(errors="replace")) is not None

    wait_until(has_said, "Prometheus listens", START_DEADLINE_S)
    match = _LISTENING.search(log.read_text(errors="replace"))
    assert match is not None
    return match[1]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
