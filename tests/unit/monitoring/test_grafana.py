"""Grafana's dashboards against Grafana's own schema, and against what its dashboard linter demands."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from quire_monitoring import grafana
from support.promql import selectors
from support.serving import ROOT

BOARDS = [pytest.param(json.loads(grafana.render(dashboard)), id=dashboard.uid) for dashboard in grafana.DASHBOARDS]
UNITS = {"short", "none", "s", "percentunit", "reqps", "ops", "Bps", "count:tok/s"}
"""Those of Grafana that are used; `count:` is its prefix for a unit of one's own."""
COUNTER = re.compile(r"_(total|sum|count|bucket)$")


def targets(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def missing(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of a JSON document is not in another one."""
    if isinstance(given, dict):
        absent = [f"{path}.{name}" for name in given if given[name] is not None and name not in kept]
        return absent + [
            one for name in given if name in kept for one in missing(given[name], kept[name], f"{path}.{name}")
        ]
    if isinstance(given, list):
        return [f"{path}[]"] * (len(given) != len(kept)) + [
            one
            for index, pair in enumerate(zip(given, kept, strict=False))
            for one in missing(*pair, f"{path}[{index}]")
        ]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


@pytest.mark.parametrize("board", BOARDS)
def test_grafanas_schema_knows_every_field(board: dict[str, Any]) -> None:
    """The models are generated from the schema; what it does not know is lost between reading and writing."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()
    board = json.loads(json.dumps(board))
    for annotation in board["annotations"]["list"]:  # these are of the Prometheus data source, not of the dashboard
        assert annotation.pop("step") == "60s"
        assert annotation.pop("titleFormat")
    kept = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(board)))
    assert missing(board, kept) == []
    board["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    assert missing(board, json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(board))))


@pytest.mark.parametrize("board", BOARDS)
def test_pickers_are_those_of_the_linter(board: dict[str, Any]) -> None:
    """template-datasource, -job, -instance, -label-promql and -on-time-change-reload, and uneditable-dashboard."""
    pickers = {one["name"]: one for one in board["templating"]["list"]}
    assert list(pickers) == ["datasource", "job", "instance", "model", "slo", "quire"]
    assert (pickers["datasource"]["type"], pickers["datasource"]["query"]) == ("datasource", "prometheus")
    assert pickers["datasource"]["label"] == "Data source"
    for name in ("job", "instance", "model", "slo"):
        picker = pickers[name]
        assert (picker["type"], picker["multi"], picker["allValue"], picker["refresh"]) == ("query", True, ".+", 2)
        assert picker["datasource"]["uid"] == "${datasource}"
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", picker["query"])
        assert match is not None
        assert len(list(selectors(match[1]))) == 1
    assert (pickers["job"]["label"], pickers["instance"]["label"]) == ("Job", "Instance")
    assert board["editable"] is False


@pytest.mark.parametrize("board", BOARDS)
def test_panels_are_as_the_linter_wants_them(board: dict[str, Any]) -> None:
    """panel-datasource, -title-description, -units and -no-targets."""
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert all(link["url"].startswith("${quire:raw}/") for link in panel.get("links", []))


@pytest.mark.parametrize("board", BOARDS)
def test_queries_are_as_the_linter_wants_them(board: dict[str, Any]) -> None:
    """target-job, -instance, -rate-interval and -counter-agg; series of recording rules have fewer labels."""
    for title, expression in targets(board):
        assert re.findall(r"rate\([^[]*\[(?!\$__rate_interval\])", expression) == [], title
        for name, matchers in selectors(expression):
            if ":" not in name:
                assert {"job", "instance", "model"} <= matchers.keys(), f"{title}: {expression}"
            elif not name.startswith(("quire:slo", "quire:goodput")):
                assert {"instance", "model"} <= matchers.keys(), f"{title}: {expression}"
            if COUNTER.search(name):
                assert re.search(rf"(rate|increase|changes)\({name}\{{", expression), f"{title}: {expression}"


@pytest.mark.parametrize("board", BOARDS)
def test_restarts_and_limits_are_on_the_charts(board: dict[str, Any]) -> None:
    changing = {name for one in board["annotations"]["list"] for name, _ in selectors(one["expr"])}
    assert changing == {
        "quire_engine_restarts_total", "quire_server_start_time_seconds", "quire_model_load_timestamp_seconds",
    }  # fmt: skip
    for panel in board["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "timeseries":
            assert (defaults["custom"]["thresholdsStyle"]["mode"] == "dashed") == ("thresholds" in defaults)
        for target in panel["targets"]:
            assert (target["format"] == "heatmap") == (panel["type"] == "heatmap")
            assert panel["type"] != "heatmap" or "_bucket{" in target["expr"]


def test_links_lead_to_pages_that_the_live_dashboard_has() -> None:
    pages = set(re.findall(r'url_path="([\w-]+)"', (ROOT / "dashboard/quire_dashboard/app.py").read_text()))
    named = {panel.page for dashboard in grafana.DASHBOARDS for row in dashboard.rows for panel in row.panels}
    assert {"overview", *(page for page in named if page)} <= pages
