"""`python -m quire_monitoring.grafana`: write one JSON file per dashboard to `OUTPUT`."""

from quire_monitoring.grafana import DASHBOARDS, OUTPUT, render

for dashboard in DASHBOARDS:
    (OUTPUT / f"{dashboard.uid}.json").write_text(render(dashboard), encoding="utf-8")
