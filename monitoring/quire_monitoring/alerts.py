"""Sets the address of the runbooks in the alerts: `python -m quire_monitoring.alerts URL`.

Prometheus itself could only take it from an external label, which every alert and every remote write would carry.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

RUNBOOKS = "https://git.example.com/quire/blob/main/docs/runbooks.md"
"""The address in the committed file: an example, as each site has the documentation at its own."""
ALERTS = Path(__file__).resolve().parents[1] / "prometheus" / "alerts.yml"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Set the address at which docs/runbooks.md is read, in every alert. Prometheus then has to load them again."""
    parser = argparse.ArgumentParser(prog="python -m quire_monitoring.alerts", description=main.__doc__)
    parser.add_argument("url", help=f"such as {RUNBOOKS}")
    parser.add_argument("--file", type=Path, default=ALERTS, help="the rules (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        options.file.write_text(render(options.file.read_text(encoding="utf-8"), options.url), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
