"""Generates Grafana's dashboards: `python -m quire_monitoring.grafana`.

The files are committed, and a test compares them with what this package generates. Queries use the metrics of
`definitions` and the recording rules of `monitoring/prometheus/recording_rules.yml`; another test checks that.
"""

from pathlib import Path

from quire_monitoring.grafana.boards import DASHBOARDS
from quire_monitoring.grafana.render import GRID_WIDTH, Dashboard, Panel, Row, queries, render

__all__ = ["DASHBOARDS", "GRID_WIDTH", "OUTPUT", "Dashboard", "Panel", "Row", "queries", "render"]

OUTPUT = Path(__file__).resolve().parents[2] / "grafana" / "dashboards"
