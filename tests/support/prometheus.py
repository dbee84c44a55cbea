"""A real Prometheus, and a real Alertmanager, over the repository's own files, on ports of their own.

The files are changed as little as can be: whom they look at and whom they tell, how often, and, for alerts, how patient
they are: `scale_durations` divides every duration and leaves all else as it is. What that does to a rule:

* a level, a ratio, a sign, a quotient of rates (all alerts but one): its threshold means the same at any scale;
* a count per window (`increase(…[10m]) > 2.5`): the same count has to happen in the shorter window;
* what the server itself takes does not shrink. So `for:` can become shorter than a restart of an engine.

Ratios and quantiles need no scaling: over a window that is longer than the history, they are those of the history. (A
rate alone is not: it is divided by the whole window.)
"""

import json
import os
import re
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.promql import UNPACKED, find_tool
from support.serving import ROOT, wait_until

__all__ = ["FILES", "Prometheus", "Sample", "alertmanager", "prometheus", "scale_durations"]

FILES = ROOT / "monitoring" / "prometheus"

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION = rf"(?:\d+(?:{'|'.join(_UNITS)}))+"
_PLACES = re.compile(
    rf"([\[:])({_DURATION})(?=[\]:])"  # ranges
    rf"|(\boffset )({_DURATION})\b"
    rf"|^(\s*(?:- )?(?:for|keep_firing_for|\w+_interval|group_wait): )({_DURATION})(?=\s*(?:#.*)?$)",
    re.MULTILINE,
)
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


def scale_durations(text: str, factor: float) -> str:
    """Divide every duration of a Prometheus or Alertmanager file: ranges, offsets, `for`, intervals. To a millisecond.

    Names that hold a duration, numbers and prose stay.

    Raises:
        ValueError: a duration would become less than a millisecond.
    """

    def scaled(match: re.Match[str]) -> str:
        before, duration = (group for group in match.groups() if group is not None)
        parts = re.findall(rf"(\d+)({'|'.join(_UNITS)})", duration)
        milliseconds = round(sum(int(number) * _UNITS[unit] for number, unit in parts) / factor)
        if milliseconds < 1:
            raise ValueError(f"{duration} / {factor} is less than a millisecond")
        return f"{before}{milliseconds}ms"

    return _PLACES.sub(scaled, text)


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

    def alerts(self) -> list[dict[str, Any]]:
        """All that are pending or firing."""
        found: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return found

    def is_ready(self) -> bool:
        """Whether queries are answered; until then they are refused."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=60):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False

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
    target: str, *, factor: float = 1.0, scrape_interval: str = "500ms", alertmanager: str | None = None
) -> Iterator[Prometheus]:
    """Scrape `target`, apply the repository's rules, and be ready once something was scraped.

    Args:
        target: `host:port` of the metrics.
        factor: what all durations of the files are divided by; see `scale_durations`.
        scrape_interval: instead of the configuration's; rules are evaluated as often, unless they are scaled.
        alertmanager: `host:port` of whom to tell; unset: nobody.
    """
    with tempfile.TemporaryDirectory(prefix="quire-prometheus-") as name:
        folder = Path(name)
        config = yaml.safe_load(scale_durations((FILES / "prometheus.yml").read_text(encoding="utf-8"), factor))
        config["global"]["scrape_interval"] = scrape_interval
        if factor == 1.0:
            config["global"]["evaluation_interval"] = scrape_interval
        config["alerting"]["alertmanagers"] = (
            [] if alertmanager is None else [{"static_configs": [{"targets": [alertmanager]}]}]
        )
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        (folder / "targets.yml").write_text(json.dumps([{"targets": [target]}]))
        for file in config["rule_files"]:
            text = (FILES / file).read_text(encoding="utf-8")
            (folder / file).write_text(scale_durations(text, factor), encoding="utf-8")
        command = [
            str(find_tool("prometheus")), "--config.file=prometheus.yml", "--storage.tsdb.path=data",
            "--web.listen-address=127.0.0.1:0", "--rules.alert.resend-delay=100ms",
        ]  # fmt: skip
        with _running(command, folder) as address:
            server = Prometheus(f"http://{address}")
            wait_until(lambda: server.is_ready() and server.query("up == 1"), "the first scrape")
            yield server


@contextmanager
def alertmanager(webhook: str, *, factor: float) -> Iterator[str | None]:
    """The real Alertmanager with the repository's example, told to call `webhook` (`host:port`); its `host:port`.

    Debian's looks for a template in /usr/share. Where its package is only unpacked, that folder is put there for this
    process alone; None where the machine does not allow that.
    """
    with tempfile.TemporaryDirectory(prefix="quire-alertmanager-") as name:
        folder = Path(name)
        text = scale_durations((FILES / "alertmanager.yml").read_text(encoding="utf-8"), factor)
        assert "localhost:5001" in text
        (folder / "alertmanager.yml").write_text(text.replace("localhost:5001", webhook), encoding="utf-8")
        binary = find_tool("prometheus-alertmanager")
        command = [
            str(binary), "--config.file=alertmanager.yml", "--storage.path=data", "--cluster.listen-address=",
            "--web.listen-address=127.0.0.1:0",
        ]  # fmt: skip
        if UNPACKED in binary.parents:
            bind = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"']
            bind.append(str(UNPACKED.parent / "share"))
            if subprocess.run([*bind, "true"], capture_output=True, check=False).returncode:
                yield None
                return
            command = [*bind, *command]
        with _running(command, folder) as address:
            yield address


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[str]:
    """Start one of the two in its folder; yields where it listens. Ended afterwards, or when this process is killed."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],  # no preexec_fn: it would fork a process with gRPC's threads
            cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TZ": "UTC"},
        )  # fmt: skip
    try:
        wait_until(lambda: _LISTENING.search(log.read_text()) or process.poll() is not None, f"{command} listens")
        found = _LISTENING.search(log.read_text())
        assert found is not None, f"{command} ended; its log:\n{log.read_text()}"
        yield found[1]
    finally:
        process.kill()  # nothing of it is to be kept, and it takes seconds to end by itself
        process.wait()
