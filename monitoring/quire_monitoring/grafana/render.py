"""What a dashboard of Grafana's is made of here, and how it becomes Grafana's JSON."""

import json
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_WIDTH = 24
_OF_MODEL = 'job=~"$job", instance=~"$instance", model=~"$model"'
_ANNOTATIONS = (
    ("Engine restarts", "orange", "{{model}}",
     f"sum by (model) (changes(quire_engine_restarts_total{{{_OF_MODEL}}}[1m])) > 0"),
    ("Server restarts", "red", "{{model}}",
     f"sum by (model) (changes(quire_server_start_time_seconds{{{_OF_MODEL}}}[1m])) > 0"),
    # Each load has series of its own, which do not change.
    ("Model loads", "blue", "{{model}}, settings {{settings}}",
     f"max by (model, settings) (quire_model_load_timestamp_seconds{{{_OF_MODEL}}}) > time() - 60"),
)  # fmt: skip
"""Name, color, what is said, and the query that has a value when it happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart: queries with their legends."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """Each a PromQL expression and the legend of its series."""
    description: str
    unit: str = "short"
    kind: str = "timeseries"
    """`timeseries`, `stat` or `heatmap`."""
    maximum: float | None = None
    is_stacked: bool = False
    red_below: float | None = None
    """A stat is red below this value; a chart has a line there."""
    red_above: float | None = None
    """The same, the other way round."""
    page: str | None = None
    """The page of Quire's own dashboard that shows more of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Panels side by side, sharing the whole width."""

    panels: tuple[Panel, ...]
    height: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    rows: tuple[Row, ...]


def queries(dashboard: Dashboard) -> list[str]:
    """Every PromQL expression of a dashboard, those of its variables and annotations included."""
    variables = [item["query"] for item in _variables() if item["type"] == "query"]
    shown = [expression for row in dashboard.rows for panel in row.panels for expression, _ in panel.queries]
    return [*shown, *variables, *(expression for *_, expression in _ANNOTATIONS)]


def render(dashboard: Dashboard) -> str:
    """The dashboard as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        width = GRID_WIDTH // len(row.panels)
        for column, panel in enumerate(row.panels):
            position = {"x": column * width, "y": y, "w": width, "h": row.height}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += row.height
    content = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["quire"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_annotation(*one) for one in _ANNOTATIONS]},
        "templating": {"list": _variables()},
        "links": [
            _link("dashboards", "Quire", tags=["quire"], includeVars=True, keepTime=True),
            _link("link", "Live dashboard", url="${quire:raw}/overview", targetBlank=True),
        ],
        "panels": panels,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _annotation(name: str, color: str, what: str, expression: str) -> dict[str, Any]:
    return {
        "name": name, "datasource": DATASOURCE, "enable": True, "iconColor": color, "expr": expression,
        "step": "60s", "titleFormat": f"{name}: {what}",
    }  # fmt: skip


def _link(kind: str, title: str, **fields: Any) -> dict[str, Any]:
    defaults = {
        "icon": "external link", "tooltip": "", "url": "", "tags": [], "asDropdown": False, "targetBlank": False,
        "includeVars": False, "keepTime": False,
    }  # fmt: skip
    return {"type": kind, "title": title, **defaults, **fields}


def _variables() -> list[dict[str, Any]]:
    def query(name: str, label: str, text: str) -> dict[str, Any]:
        # On a change of the time range, as series come and go.
        return {
            "name": name, "label": label, "type": "query", "query": text, "datasource": DATASOURCE, "refresh": 2,
            "includeAll": True, "multi": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"},
        }  # fmt: skip

    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        query("job", "Job", "label_values(quire_engine_up, job)"),
        query("instance", "Instance", 'label_values(quire_engine_up{job=~"$job"}, instance)'),
        query("model", "Model", 'label_values(quire_engine_up{job=~"$job", instance=~"$instance"}, model)'),
        query("slo", "Class", f"label_values(quire_slo_requests_total{{{_OF_MODEL}}}, slo)"),
        {"name": "quire", "label": "Live dashboard", "type": "textbox", "query": "http://localhost:8501",
         "current": {"text": "http://localhost:8501", "value": "http://localhost:8501"}},
    ]  # fmt: skip


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": DATASOURCE,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, (expression, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    content = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": targets,
    }
    if panel.page is not None:
        link = _link("link", f"Live: {panel.page}", url=f"${{quire:raw}}/{panel.page}", targetBlank=True)
        content["links"] = [link]
    return content


def _field_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    has_limit = panel.red_below is not None or panel.red_above is not None
    if has_limit:
        colors = ("red", "green") if panel.red_below is not None else ("green", "red")
        limit = panel.red_below if panel.red_below is not None else panel.red_above
        steps = [{"color": colors[0], "value": None}, {"color": colors[1], "value": limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.is_stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none"},
            "thresholdsStyle": {"mode": "dashed" if has_limit else "off"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {"tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "heatmap":  # its series are the buckets of a histogram already
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "cellGap": 1}
    return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
