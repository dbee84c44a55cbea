"""The files for Prometheus, Alertmanager and Grafana: valid, tested, and of metrics that exist."""

import json
import re
import shlex
import shutil
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from quire_cli.errors import CommandError
from quire_cli.main import app
from quire_cli.ports import is_loopback
from quire_cli.server.supervisor import delay_after_death
from quire_engine.replicas.restart_policy import RestartPolicy
from quire_engine.system.crash_loop import CrashLoop
from quire_monitoring import grafana
from quire_monitoring.definitions import MetricKind, MetricsConfig, make_metrics
from support.promql import run_tool, selectors
from support.serving import ROOT
from support.source import all_modules

PROMETHEUS = ROOT / "monitoring" / "prometheus"
RUNBOOKS_PAGE = ROOT / "docs" / "runbooks.md"
RUNBOOKS = "https://git.example.com/quire/blob/main/docs/runbooks.md"
"""The address in the committed alerts: an example, as each site has the documentation at its own."""
RULES_TESTS = ("rules_test.yml", "rules_hours_test.yml")
COMMON_LABELS = {"job", "instance", "model", "version", "engine"}
"""The first two are Prometheus' own."""
OTHERS: dict[str, set[str]] = {"up": {"job", "instance"}}
"""What Prometheus itself makes."""
ALL_METRICS = make_metrics(MetricsConfig(num_ranks=2, expert_shape=(2, 4), expert_metrics=True, takes_images=True))
OF_MODELS = {"slo", "rank", "layer", "expert"}
"""Labels whose values are the operator's, or the model's."""


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / file).read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = rules("recording_rules.yml")
ALERTS = rules("alerts.yml")


def known_series() -> dict[str, dict[str, set[str] | None]]:
    """Every name that a query may use: its labels, and their values where these are known."""
    known: dict[str, dict[str, set[str] | None]] = {name: dict.fromkeys(labels) for name, labels in OTHERS.items()}
    for metric in ALL_METRICS:
        labels: dict[str, set[str] | None] = dict.fromkeys(COMMON_LABELS)
        labels |= {name: None if name in OF_MODELS else set(own) for name, own in metric.labels.items()}
        if metric.kind is MetricKind.HISTOGRAM:
            known |= {metric.name + suffix: labels for suffix in ("_sum", "_count")}
            known[metric.name + "_bucket"] = {**labels, "le": None}
        else:
            known[metric.name] = labels
    for rule in RECORDED:
        known[rule["record"]] = dict.fromkeys({*COMMON_LABELS, "slo"})
    return known


KNOWN = known_series()


def dashboard_queries() -> list[tuple[str, str]]:
    found = []
    for dashboard in grafana.DASHBOARDS:
        for query in grafana.queries(dashboard):
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
            if match:
                ((name, _),) = selectors(match[1])
                assert match[2] in KNOWN[name], query
                query = match[1]
            found.append((dashboard.uid, query))
    return found


EXPRESSIONS = [
    *(pytest.param(rule["expr"], id=rule.get("record") or rule["alert"]) for rule in RECORDED + ALERTS),
    *(pytest.param(query, id=f"{uid}-{index}") for index, (uid, query) in enumerate(dashboard_queries())),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_query_is_of_series_that_exist(expression: str) -> None:
    used = list(selectors(expression))
    assert used or expression in ("vector(0.99)", "vector(1)")
    for name, matchers in used:
        assert name in KNOWN, f"{name}: there is no such metric"
        for label, value in matchers.items():
            assert label in KNOWN[name], f"{name} has no label {label}"
            values = KNOWN[name][label]
            assert values is None or value in values, f"{name}: {label} is never {value}"


def test_a_metrics_name_says_its_kind_and_unit() -> None:
    for metric in ALL_METRICS:
        name = metric.name
        assert name.endswith("_total") == (metric.kind is MetricKind.COUNTER), name
        # Prometheus' own name for the start of a process is the only other one.
        is_time = name.endswith("_timestamp_seconds") or name == "quire_server_start_time_seconds"
        assert is_time == ("since the epoch" in metric.help), name
        assert name.endswith("_ratio") or not metric.help.startswith("Share"), name


def test_the_page_names_the_histograms_that_are_declared_as_counters() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (paragraph,) = (text for text in page.split("\n\n") if "are declared as three counters each" in text)
    frequent = {metric.name for metric in ALL_METRICS if metric.is_frequent}
    assert set(re.findall(r"\bquire_\w+", paragraph)) == frequent


def test_every_metric_that_the_chart_names_exists() -> None:
    templates = (ROOT / "deploy/helm/quire/templates").iterdir()
    text = "".join(path.read_text(encoding="utf-8") for path in templates)
    others = {package for package, *_ in all_modules()}
    others.add("quire_slo_burn")  # made by the rule of Prometheus' adapter in docs/kubernetes.md
    used = set(re.findall(r"\bquire_[a-z_]+[a-z]\b", text))
    assert "quire_slo_objective_ratio" in used
    assert used - others <= KNOWN.keys()


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("a", [("a", {})]),
        ('sum by (x, y) (rate(a_total{b="c", d=~"}"}[5m])) / on (z) group_left () e', [
            ("a_total", {"b": "c", "d": "}"}), ("e", {})]),
        ("histogram_quantile(0.99, sum without (q) (rate(h:x_bucket[1h]))) > 1e3 and b unless c", [
            ("h:x_bucket", {}), ("b", {}), ("c", {})]),
        ("vector(0.99)", []),
    ],
)  # fmt: skip
def test_names_in_an_expression_are_found(expression: str, found: list[Any]) -> None:
    assert list(selectors(expression)) == found


def test_every_metric_is_used_somewhere() -> None:
    used = {name for parameter in EXPRESSIONS for name, _ in selectors(str(parameter.values[0]))}
    unused = {
        metric.name
        for metric in ALL_METRICS
        if not {metric.name + suffix for suffix in ("", "_bucket", "_sum")} & used and metric.name not in NOT_SHOWN
    }
    assert not unused


NOT_SHOWN = {
    "quire_request_inference_time_seconds", "quire_request_computed_prompt_tokens",
    "quire_request_longest_generation_tokens", "quire_request_params_max_tokens",
}  # fmt: skip
"""Metrics that no rule and no dashboard of ours uses: vLLM's boards ask for them, ours show their parts."""


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    assert "SUCCESS" in run_tool("promtool", "check", "config", "prometheus.yml", cwd=PROMETHEUS)


@pytest.mark.parametrize("file", RULES_TESTS)
def test_rules_do_what_they_say(file: str) -> None:
    assert "SUCCESS" in run_tool("promtool", "test", "rules", file, cwd=PROMETHEUS)


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    tests = "".join((PROMETHEUS / file).read_text(encoding="utf-8") for file in RULES_TESTS)
    for alert in ALERTS:
        assert f'alertname="{alert["alert"]}"' in tests, f"{alert['alert']} fires in no test"
        assert alert["labels"]["severity"] in ("page", "ticket", "watchdog")
        assert set(alert["annotations"]) == {"summary", "description", "runbook", "runbook_url"}
        assert len(alert["annotations"]["runbook"]) > 80
        page, _, place = alert["annotations"]["runbook_url"].partition("#")
        assert page == RUNBOOKS
        (section,) = re.findall(rf"^## {alert['alert']}$(.*?)(?=^## |\Z)", RUNBOOKS_PAGE.read_text(), re.M | re.S)
        assert place == alert["alert"].lower()
        assert words_of(alert["annotations"]["runbook"]) == words_of(section.split("\n\n", 2)[2])


def test_runbooks_are_at_the_address_that_is_set(tmp_path: Path) -> None:
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    (command,) = re.findall(r"^sed .*$", RUNBOOKS_PAGE.read_text(encoding="utf-8"), re.M)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    content = yaml.safe_load((tmp_path / "alerts.yml").read_text(encoding="utf-8"))
    found = [rule for group in content["groups"] for rule in group["rules"]]
    assert [one["annotations"]["runbook_url"] for one in found] == [
        f"https://docs.example.com/runbooks.md#{one['alert'].lower()}" for one in ALERTS
    ]


def test_what_a_runbook_quotes_is_said_by_the_product() -> None:
    source = "".join(path.read_text(encoding="utf-8") for _, _, path in all_modules())
    quoted = [text for alert in ALERTS for text in re.findall(r'"([^"]+)"', alert["annotations"]["runbook"])]
    assert quoted
    assert [text for text in quoted if text not in source] == []


def test_the_page_about_an_engine_that_is_down_says_what_becomes_of_it() -> None:
    """It is never given up, so nothing has to be reloaded for it to come back."""
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "QuireEngineDown")
    said = " ".join((alert["annotations"]["description"] + alert["annotations"]["runbook"]).split())
    policy, delays, holds = RestartPolicy(clock=lambda: 0.0), [], []
    for _ in range(1000):
        policy.engine_started()
        delays.append(policy.delay_after_death())
        holds.append(not policy.is_tripped)
    assert holds.index(False) == 4
    assert said.count("five times in a row without an output") == 1
    assert "after five deaths in a row without an output, requests are rejected (UNAVAILABLE)" in said
    assert f"tried again for ever, at most {max(delays):.0f} s after the last death" in said
    policy.note_progress()
    assert policy.delay_after_death() == 0
    assert not policy.is_tripped, "it serves again by itself"
    assert "given up" not in "".join(str(alert["annotations"]) for alert in ALERTS)


def test_the_page_about_a_server_that_is_down_says_when_it_is_not_started_again() -> None:
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "QuireServerDown")
    crash_loop = CrashLoop()
    for _ in range(4):
        delay_after_death(crash_loop, 0.0, "it died")
    with pytest.raises(CommandError) as ended:
        delay_after_death(crash_loop, 0.0, "it died")
    within = re.search(r"each within \d+ s of the server's being ready", str(ended.value))
    assert within is not None
    assert ended.value.exit_code == 1
    assert f"the fifth death in a row, {within[0]}, ends it with exit code 1;" in alert["annotations"]["runbook"]


def words_of(text: str) -> list[str]:
    return text.split()


def test_alertmanager_takes_the_example() -> None:
    assert "SUCCESS" in run_tool("amtool", "check-config", "alertmanager.yml", cwd=PROMETHEUS)


def test_prometheus_parses_every_query_of_the_dashboards(tmp_path: Path) -> None:
    recorded = [
        {"record": f"query:{index}", "expr": query.replace("$__rate_interval", "1m")}
        for index, (_, query) in enumerate(dashboard_queries())
    ]
    content = {"groups": [{"name": "dashboards", "rules": recorded}]}
    (tmp_path / "queries.yml").write_text(json.dumps(content))  # JSON is YAML
    run_tool("promtool", "check", "rules", "--lint=none", "queries.yml", cwd=tmp_path)


# -- Grafana -----------------------------------------------------------------------------------------------------------


def test_committed_dashboards_are_what_is_made() -> None:
    committed = {file.name: file.read_text(encoding="utf-8") for file in grafana.OUTPUT.iterdir()}
    made = {f"{dashboard.uid}.json": grafana.render(dashboard) for dashboard in grafana.DASHBOARDS}
    assert committed == made, "run: python -m quire_monitoring.grafana"


@pytest.mark.parametrize("dashboard", grafana.DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_panels_have_a_place_each_and_explain_themselves(dashboard: grafana.Dashboard) -> None:
    content = json.loads(grafana.render(dashboard))
    cells: set[tuple[int, int]] = set()
    for panel in content["panels"]:
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"])
               for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert max(x for x, _ in own) < grafana.GRID_WIDTH
        assert not own & cells, f"{panel['title']} lies over another panel"
        cells |= own
        assert panel["description"]
        assert panel["targets"]
        for target in panel["targets"]:
            assert "$model" in target["expr"], "every query follows the model picker"
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= COMMON_LABELS | {label for metric in ALL_METRICS for label in metric.labels} | {"le"}
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])


# -- compose -----------------------------------------------------------------------------------------------------------


def test_compose_starts_everything_on_the_loopback_with_files_that_exist() -> None:
    folder = ROOT / "deploy" / "compose"
    content = yaml.safe_load((folder / "docker-compose.yml").read_text(encoding="utf-8"))
    services = content["services"]
    assert set(services) == {"tritonserver", "prometheus", "alertmanager", "grafana", "otel-collector", "dashboard"}
    for name, service in services.items():
        assert ":" in service["image"], f"{name}: an image without a version"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network"
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert source in content["volumes"] or (folder / source).exists(), f"{name}: {source} does not exist"
        for other in service.get("depends_on", []):
            assert other in services
    for file in (*(ROOT / "monitoring").rglob("*.yml"), folder / "targets.yml"):
        assert yaml.safe_load(file.read_text(encoding="utf-8")), file
    for file_name, service in (("targets.yml", "tritonserver"), ("alertmanagers.yml", "alertmanager")):
        targets = yaml.safe_load((folder / file_name).read_text(encoding="utf-8"))
        assert [target.split(":")[0] for one in targets for target in one["targets"]] == [service]
        # It takes the place of one that the configuration names.
        assert file_name in (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
        assert f"./{file_name}:/etc/prometheus/{file_name}:ro" in services["prometheus"]["volumes"]
    collector = urllib.parse.urlsplit(services["tritonserver"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert collector.hostname in services
    receivers = yaml.safe_load((ROOT / "monitoring/otel/collector.yml").read_text(encoding="utf-8"))["receivers"]
    assert receivers["otlp"]["protocols"]["grpc"]["endpoint"] == f"0.0.0.0:{collector.port}"
    provisioned = yaml.safe_load((ROOT / "monitoring/grafana/provisioning/dashboards/quire.yml").read_text())
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provisioned["providers"][0]["options"]["path"] in mounts


def test_the_dashboard_of_compose_reaches_the_others_and_is_reached() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "compose" / "docker-compose.yml").read_text(encoding="utf-8"))
    services = content["services"]
    program, command, *arguments = services["dashboard"]["command"]
    assert (program, command) == ("quire", "dashboard")
    group: Any = typer.main.get_command(app)
    options = group.commands[command].make_context(command, arguments).params
    for address in (*options["url"], *options["metrics"], options["prometheus"]):
        found = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
        assert found.hostname in services, f"{address} is in no other container"
    assert len(options["url"]) == len(options["metrics"]) == 1
    # A port is published from the container's own address, never from its loopback.
    assert not is_loopback(options["host"])
    assert options["host"] == "0.0.0.0"
    assert [port.rpartition(":")[2] for port in services["dashboard"]["ports"]] == [str(options["port"])]
    environment = services["dashboard"]["environment"]
    assert options["token"] == "", "it would stand in ps"
    assert environment["QUIRE_DASHBOARD_TOKEN"].startswith("${QUIRE_DASHBOARD_TOKEN:?"), "without one it does not start"
    assert not [name for name in environment if name.startswith("STREAMLIT_")], "the dashboard's own flags win"
