"""The table of symptoms: findings, alerts, boards and runbooks have its rows, and all have its limits."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml
from quire_cli.server import health as health_address
from quire_client.health_details import Host
from quire_client.symptoms import OBJECTIVE, SYMPTOMS, Level, Limit
from quire_dashboard import findings, monitor, top
from quire_dashboard.events import STORM, find_events
from quire_dashboard.evidence import Evidence, gather
from quire_dashboard.health import assess
from quire_dashboard.history import Point, Ring
from quire_dashboard.incidents import family
from quire_engine.slo import SLOTargets
from quire_load.scrape import parse
from quire_monitoring import grafana
from support.fake_triton import State
from support.serving import ROOT

TEXT = (ROOT / "monitoring" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
RULES = {rule["alert"]: rule for group in yaml.safe_load(TEXT)["groups"] for rule in group["rules"]}
PAGE = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
MARKED = re.findall(r"^(.*)# (\w+): ([\w ]+)$", TEXT, re.M)
"""Lines of the alerts with limits, the symptoms, and the names of the limits."""
IN_RULES = {(symptom, name) for _, symptom, names in MARKED for name in names.split()}
FINE = Evidence(
    engine_up=True, running=3, goodput={"default": 1.0}, kv_usage=0.4, ttft_p95=1.0, max_num_batched_tokens=1000,
    has_slo=True,
)  # fmt: skip
LATE = {"ttft": 3.0}


# -- rows -------------------------------------------------------------------------------------------------------------


def test_each_alert_is_that_of_a_symptom_as_grave() -> None:
    levels: dict[str, Level] = {}
    for symptom in SYMPTOMS.values():
        if symptom.alert:
            levels[symptom.alert] = max(symptom.level, levels.get(symptom.alert, Level.OK))
    severities = {Level.CRITICAL: "page", Level.WARNING: "ticket", Level.OK: "watchdog"}
    assert {name: severities[level] for name, level in levels.items()} == {
        name: rule["labels"]["severity"] for name, rule in RULES.items()
    }


def test_the_page_of_runbooks_has_a_row_for_each_symptom_and_a_section_for_each_row() -> None:
    rows = re.findall(r"^\| (.+) \| \[(.+)\]\(#(.+)\) \|$", PAGE, re.M)
    assert [(title, runbook) for title, runbook, _ in rows] == [(one.title, one.runbook) for one in SYMPTOMS.values()]
    assert {runbook for _, runbook, _ in rows} == set(re.findall(r"^## (.+)$", PAGE, re.M))
    assert [anchor for *_, anchor in rows] == [runbook.lower().replace(" ", "-") for _, runbook, _ in rows]


def test_each_finding_is_a_row() -> None:
    away, no_model = Evidence(server_error="x"), Evidence(has_model=False)
    without = [away, replace(away, only_metrics_away=True), replace(away, server_restarts=(1.0,)), no_model]
    found = {assess(one).findings[0].cause for one in without} | {cause for cause, _ in findings._LOOKS}
    of_prometheus_alone = {"absent", "watchdog", "slo_slow", "slo_slowest"}
    assert found | of_prometheus_alone | {"slo"} == SYMPTOMS.keys(), "`slo` is one whose cause is not known"


def test_an_incident_of_another_version_is_of_no_known_family() -> None:
    assert (family("one_down"), family("rejections"), family("queue")) == ("outage", "overload", "overload")
    assert family("of another version") == "of another version"


# -- limits -----------------------------------------------------------------------------------------------------------


def found_by(cause: str, **values: Callable[[float], Any]) -> Callable[[float], bool]:
    """Whether a cause is found, with its gravest level, when a figure has made these of the evidence."""

    def is_found(figure: float) -> bool:
        evidence = replace(FINE, **{name: make(figure) for name, make in values.items()})
        findings_ = assess(evidence).findings
        return any(one.cause == cause and one.level >= SYMPTOMS[cause].level for one in findings_)

    return is_found


def always(value: Any) -> Callable[[float], Any]:
    return lambda _: value


def level_of_burn(level: Level) -> Callable[[float], bool]:
    return lambda burn: assess(replace(FINE, goodput={"default": 1 - 0.01 * 1.001 * burn})).level >= level


def is_storm(preemptions: float, requests: float) -> bool:
    lines = [[], [], [Point(0.0, "", 0.0), Point(1.0, "", preemptions)], [Point(1.0, "", requests)], []]
    return any(event.what == STORM for event in find_events(lines))


def is_over(counted: str, series: str) -> Callable[[float], bool]:
    """Whether a restart somewhat longer ago than so many seconds is outside the window."""

    def is_found(seconds: float) -> bool:
        state, ring = State(), Ring(10)
        for time, value in ((0.0, 1.0), (10.0, 2.0), (20.0 + seconds, 2.0)):
            state.set(series, value)
            ring.append(parse(state.metrics_text(), time))
        return not getattr(gather(ring.view(), {"model": "tinypy"}, None), counted)

    return is_found


def restarts(number: float) -> tuple[float, ...]:
    return tuple(1.0 + index for index in range(int(number)))


def on_host(cause: str, **figures: float) -> bool:
    return found_by(cause, host=always(Host(**figures)))(0.0)


USES: dict[tuple[str, str], Callable[[float], bool]] = {
    ("server_restarts", "times"): found_by("server_restarts", server_restarts=restarts),
    ("engine_restarts", "times"): found_by("engine_restarts", restarts=restarts),
    ("server_restarts", "window"): is_over("server_restarts", "server_start_time_seconds"),
    ("engine_restarts", "window"): is_over("restarts", "engine_restarts_total"),
    ("host_memory", "pressure"): lambda share: on_host("host_memory", memory_pressure=share),
    ("host_cpu", "pressure"): lambda share: on_host("host_cpu", cpu_pressure=share, cpus=2, cpus_of_others=9),
    ("host_cpu", "others"): lambda share: on_host("host_cpu", cpu_pressure=9, cpus=2, cpus_of_others=2 * share),
    ("kv_cache_full", "usage"): found_by("kv_cache_full", waiting=always(9), kv_usage=float),
    ("kv_cache_full", "waiting"): found_by("kv_cache_full", waiting=float, kv_usage=always(1.0)),
    ("kv_cache_full", "preemptions"): found_by("kv_cache_full", preemptions=float),
    ("kv_cache_full", "per_second"): lambda rate: is_storm(rate, 0.0),
    ("kv_cache_full", "per_request"): lambda share: is_storm(100 * share, 100.0),
    ("slow_rank", "ratio"): found_by("slow_rank", rank_seconds=lambda ratio: {"0": 1.0, "1": ratio}),
    ("long_prompts", "prefill"): found_by(
        "long_prompts", misses=always(LATE), prefill_p95=float, mean_prompt_tokens=always(900)
    ),
    ("long_prompts", "length"): found_by(
        "long_prompts", misses=always(LATE), prefill_p95=always(0.9), mean_prompt_tokens=lambda share: 1000 * share
    ),
    ("queue", "waiting"): found_by("queue", waiting=float, max_num_seqs=always(3)),
    ("queue", "crowded"): found_by("queue", waiting=lambda ratio: 4 * ratio),
    ("queue", "queued"): found_by("queue", waiting=always(1.2), queue_p95=float),
    ("queue", "taken"): found_by("queue", waiting=always(2), max_num_seqs=always(10), running=lambda part: 10 * part),
    ("host_bound", "ratio"): found_by(
        "host_bound", misses=always(LATE), step_seconds=lambda ratio: {"schedule": ratio, "execute": 1.0}
    ),
    ("invalid", "share"): found_by("invalid", ended=always(1000), invalid=lambda share: 1000 * share),
    ("invalid", "requests"): found_by("invalid", ended=always(20), invalid=float),
    ("grammar", "waiting"): found_by("grammar", waiting_for_grammar=float),
    ("slo", "burn"): level_of_burn(Level.CRITICAL),
    ("slo_slowest", "burn"): level_of_burn(Level.WARNING),
}
"""Whether a figure is a symptom to the dashboard, by its limit."""
ELSEWHERE = {("server_restarts", "life"), ("not_served", "stale"), ("host_cpu", "looked_at")}
"""Limits that have a test of their own here, or in that of the host's pressure."""


def test_each_limit_is_used() -> None:
    limits = {(key, name) for key, symptom in SYMPTOMS.items() for name in symptom.limits}
    assert limits == USES.keys() | IN_RULES | ELSEWHERE
    for limit in limits:
        ends = SYMPTOMS[limit[0]].limits[limit[1]].ends
        assert ends is None or 0 < ends < SYMPTOMS[limit[0]].limits[limit[1]].begins


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, float], None]:
    def change(key: str, name: str, value: float) -> None:
        changed = replace(SYMPTOMS[key], limits={**SYMPTOMS[key].limits, name: Limit(value)})
        monkeypatch.setitem(SYMPTOMS, key, changed)

    return change


@pytest.mark.parametrize(("key", "name"), USES)
def test_a_finding_follows_the_limit(key: str, name: str, change: Callable[[str, str, float], None]) -> None:
    is_found, limit = USES[key, name], SYMPTOMS[key].limits[name].begins
    assert is_found(limit)
    assert not is_found(limit / 2)
    change(key, name, 2 * limit)
    assert not is_found(limit)
    assert is_found(2 * limit)


@pytest.mark.parametrize(("rule", "symptom", "names"), MARKED)
def test_an_alert_has_the_limits(rule: str, symptom: str, names: str) -> None:
    for name in names.split():
        limit = SYMPTOMS[symptom].limits[name].begins
        number = rf"\[{limit / 60:g}m\]" if name == "window" else rf"[<>]=? {re.escape(f'{limit:g}')}(?![\d.])"
        assert re.search(number, rule), f"{rule}: {symptom}.{name} is {limit:g}"


def test_crash_loops_are_those_of_ten_minutes() -> None:
    for name in ("QuireServerCrashLoop", "QuireEngineCrashLoop"):
        assert "in ten minutes" in RULES[name]["annotations"]["description"]
    assert {SYMPTOMS[key].limits["window"] for key in ("server_restarts", "engine_restarts")} == {Limit(600)}


def test_the_life_of_a_server_in_a_crash_loop(change: Callable[[str, str, float], None]) -> None:
    for life in (60.0, 90.0):
        change("server_restarts", "life", life)
        for age, cause in ((life - 1, "server_restarts"), (life, "server_away")):
            away = Evidence(server_error="nothing listens there", server_restarts=(age,))
            assert assess(away).findings[0].cause == cause


def test_boards_the_health_address_and_histories_have_the_limits() -> None:
    panels = [panel for board in grafana.DASHBOARDS for row in board.rows for panel in row.panels]
    assert {one.red_above for one in panels} == {None, SYMPTOMS["slo"].limits["burn"].begins}
    assert {one.red_below for one in panels} == {None, 1, OBJECTIVE}
    assert SLOTargets().objective == OBJECTIVE
    assert SYMPTOMS["not_served"].limits["stale"].begins == health_address.STALE_S
    longest = max(one.limits["window"].begins for one in SYMPTOMS.values() if "window" in one.limits)
    assert longest <= monitor.SEED_S
    assert longest < top.HISTORY_S
