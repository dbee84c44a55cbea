"""A real Prometheus that judges a real server by the repository's own rules, in less time than on call.

`scale_durations` divides the durations of a rule file and leaves all else as it is. What that does to a rule:

* a level, a ratio, a sign, a quotient of rates (all alerts but one): its threshold means the same at any scale;
* a count per window (`increase(…[10m]) > 2`): the same count has to happen in the shorter window;
* what the server itself takes does not shrink. So `for:` can become shorter than a restart of an engine.
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

__all__ = ["PrometheusServer", "alertmanager", "prometheus", "scale_durations"]

FILES = ROOT / "monitoring" / "prometheus"
SCRAPE_INTERVAL = "500ms"
"""Not scaled: shorter ones would not see more, as the server's own metrics change about as often."""

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


@dataclass(frozen=True, kw_only=True)
class PrometheusServer:
    """A running Prometheus."""

    address: str
    """`host:port`."""

    def is_ready(self) -> bool:
        """Whether queries are answered; until then they are refused."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=10):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """What its HTTP API answers to a GET below /api/v1/."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def alerts(self) -> list[dict[str, Any]]:
        """All that are pending or firing."""
        found: list[dict[str, Any]] = self.get("alerts")["alerts"]
        return found

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every series of an instant query."""
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expression)["result"]]


@contextmanager
def prometheus(target: str, *, factor: float, alertmanager: str | None = None) -> Iterator[PrometheusServer]:
    """Scrape `target` and apply the repository's rules, with all their durations divided by `factor`.

    Args:
        target: `host:port` of the metrics.
        factor: see `scale_durations`.
        alertmanager: `host:port` of whom to tell; unset: nobody.
    """
    with tempfile.TemporaryDirectory(prefix="quire-prometheus-") as name:
        folder = Path(name)
        config = yaml.safe_load(scale_durations((FILES / "prometheus.yml").read_text(encoding="utf-8"), factor))
        config["global"]["scrape_interval"] = SCRAPE_INTERVAL
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
            server = PrometheusServer(address=address)
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
    """Start one of the two in its folder; yields where it listens. Ended afterwards."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TZ": "UTC"}
        )
    try:
        wait_until(lambda: _LISTENING.search(log.read_text()) or process.poll() is not None, f"{command} listens")
        found = _LISTENING.search(log.read_text())
        assert found is not None, f"{command} ended; its log:\n{log.read_text()}"
        yield found[1]
    finally:
        process.kill()  # nothing of it is to be kept, and it takes seconds to end by itself
        process.wait()
