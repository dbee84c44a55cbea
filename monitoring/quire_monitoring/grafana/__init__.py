"""Generates Grafana's dashboards: `python -m quire_monitoring.grafana`.

It writes one JSON file per dashboard to `monitoring/grafana/dashboards/`; these are committed, and a test checks that
they are what this package generates. Queries use the metrics in `definitions` and of the recording rules in
`monitoring/prometheus/recording_rules.yml`, which another test checks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from quire_monitoring.grafana.boards import DASHBOARDS
from quire_monitoring.grafana.render import GRID_WIDTH, Dashboard, Panel, Row, queries, render

__all__ = ["DASHBOARDS", "GRID_WIDTH", "OUTPUT", "Dashboard", "Panel", "Row", "main", "queries", "render"]

OUTPUT = Path(__file__).resolve().parents[2] / "grafana" / "dashboards"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all dashboards, or with `--check` only say which are not up to date."""
    parser = argparse.ArgumentParser(prog="python -m quire_monitoring.grafana", description=main.__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    stale = []
    for dashboard in DASHBOARDS:
        file = options.output / f"{dashboard.uid}.json"
        text = render(dashboard)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file)
            if not options.check:
                options.output.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    for file in stale:
        print(f"{file}: {'not up to date' if options.check else 'written'}")
    return int(options.check and bool(stale))
