"""Edits `monitoring/prometheus/alerts.yml`, which is written by hand but for two things: the limits, which are those of
`quire_client.symptoms`, and the address of the runbooks: `python -m quire_monitoring.alerts [URL]`.

Prometheus itself could only take the address from an external label, which every alert and every remote write would
carry.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path

from quire_client.symptoms import SYMPTOMS

RUNBOOKS = "https://git.example.com/quire/blob/main/docs/runbooks.md"
"""The address in the committed file: an example, as each site has the documentation at its own."""
ALERTS = Path(__file__).resolve().parents[1] / "prometheus" / "alerts.yml"
"""The file of the checkout."""
INSTALLED = "share/quire/prometheus/alerts.yml"
"""Where a wheel puts it, below the environment's root."""
_MARKED = re.compile(r"(?m)^(.*)# (\w+): ([\w ]+)$")
"""A line and the limits in it, such as `increase(x[10m]) >= 3  # engine_restarts: window times`."""


def render(alerts: str, runbooks: str) -> str:
    """The rules with every `runbook_url` at another address.

    Args:
        alerts: the rules, as YAML.
        runbooks: the absolute address of docs/runbooks.md.

    Raises:
        ValueError: the address is not absolute, or has more than a path.
    """
    if not re.fullmatch(r"https?://[^\s#?\"'{}/]+(/[^\s#?\"'{}]*)?", runbooks):
        raise ValueError(f"{runbooks!r} is not the address of a page: https://HOST/PATH, without ? and #")
    return re.sub(r"(?m)^( +runbook_url: )[^#\n]*#", lambda line: f"{line[1]}{runbooks}#", alerts)


def with_limits(alerts: str) -> str:
    """The rules with the limits of the table.

    Raises:
        ValueError: a line names one that is not there.
    """
    return _MARKED.sub(_line_with_limits, alerts)


def find_alerts() -> Path:
    """The rules of this version: of the checkout, or of the wheel that this package comes from."""
    if ALERTS.exists():
        return ALERTS
    installed = (file for file in files("quire") or () if file.as_posix().endswith(INSTALLED))
    return next((Path(str(file.locate())).resolve() for file in installed), ALERTS)


def _line_with_limits(line: re.Match[str]) -> str:
    rule, symptom, names = line.groups()
    for name in names.split():
        if symptom not in SYMPTOMS or name not in SYMPTOMS[symptom].limits:
            raise ValueError(f"there is no limit {symptom}: {name}")
        limit = SYMPTOMS[symptom].limits[name].begins
        place, number = (r"\[\w+", f"[{limit / 60:g}m") if name == "window" else (r"[<>]=? [\d.]+", f"{limit:g}")
        rule = re.sub(place, lambda old, new=number: re.sub(r"\[\w+|[\d.]+", new, old[0]), rule, count=1)
    return f"{rule}# {symptom}: {names}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Set the address at which docs/runbooks.md is read, in every alert; without one, set the limits. Prometheus then
    has to load them again."""
    parser = argparse.ArgumentParser(prog="python -m quire_monitoring.alerts", description=main.__doc__)
    parser.add_argument("url", nargs="?", default="", help=f"such as {RUNBOOKS}")
    parser.add_argument("--file", type=Path, default=find_alerts(), help="the rules (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        alerts = options.file.read_text(encoding="utf-8")
        edited = render(alerts, options.url) if options.url else with_limits(alerts)
        options.file.write_text(edited, encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
