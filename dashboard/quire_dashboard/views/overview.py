"""The overview page: whether users are served within their SLO, and if not, why."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import streamlit as st
from quire_client.symptoms import Level

from quire_dashboard import choice, figures, frame, watchers, words
from quire_dashboard.charts import SECONDS, SHARES
from quire_dashboard.choice import slo_classes
from quire_dashboard.evidence import Evidence, slo_targets
from quire_dashboard.findings import SLO_EXAMPLE
from quire_dashboard.frame import Line, chart
from quire_dashboard.health import Health
from quire_dashboard.queries import Gauge, Quantile, Query, Rate
from quire_dashboard.strip import show_strip

_ALL = "All classes"
DEFAULT_CLASS = "default"
"""Of requests that name none; its targets are drawn where all classes are."""
_DRAWN = "overview_drawn"
"""In the visitor's session once it has seen the page."""
_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
_SPARKS: Mapping[str, Query] = {
    "Requests": figures.ENDED, "Failed": figures.FAILED, "TTFT p95": figures.TTFT, "Queue p95": figures.QUEUE,
    "Prefill p95": figures.PREFILL, "Between tokens": figures.BETWEEN, "Tokens": figures.TOKENS,
    "KV cache": figures.USAGE, "Preemptions": Rate(name="quire_preemptions_total"), "E2E p95": figures.E2E,
    "Prompt tokens": figures.PROMPT_TOKENS,
}  # fmt: skip


def show() -> None:
    """Draw the page."""
    st.title("Overview")
    frame.live(show_strip, frame.CHARTS_S)
    options = [_ALL, *slo_classes()]
    if st.session_state.get("slo_class", _ALL) not in options:  # of another model
        st.session_state["slo_class"] = _ALL
    st.segmented_control(
        "SLO class", options, default=_ALL, key="slo_class", required=True, bind="query-params"
    )  # fmt: skip
    frame.live(_now)
    frame.live(_charts, frame.CHARTS_S)


def _slo_class() -> str:
    picked = st.session_state.get("slo_class") or _ALL
    return "" if picked == _ALL else str(picked)


def _own() -> tuple[tuple[str, str], ...]:
    """Labels of the chosen class."""
    return (("slo", _slo_class()),) if _slo_class() else ()


def _now() -> None:
    nothing = frame.server_away()
    evidence, health = watchers.monitor().judge(choice.selection().model, slo_class=_slo_class())
    if not evidence.server_error:
        _say(health)
        if evidence.has_slo is False:
            st.code(SLO_EXAMPLE, language="json")
    if nothing:
        return
    # The small lines are computed from the whole time range: the first figures do not wait for them.
    has_sparks = _DRAWN in st.session_state or choice.selection().refresh_s is None
    st.session_state[_DRAWN] = True
    _figures(evidence, has_sparks=has_sparks)


def _say(health: Health) -> None:
    box = {Level.OK: st.success, Level.WARNING: st.warning, Level.CRITICAL: st.error}[health.level]
    icon = {Level.OK: "check_circle", Level.WARNING: "warning", Level.CRITICAL: "error"}[health.level]
    details = "".join(
        f"\n- **{words.as_text(finding.title)}.** {words.as_text(finding.detail)}" for finding in health.findings
    )
    with st.container(key="verdict"):
        box(f"**{words.as_text(health.headline)}**\n{details}", icon=f":material/{icon}:")


def _figures(evidence: Evidence, *, has_sparks: bool) -> None:
    own, now = _own(), frame.value
    no_slo = evidence.has_slo is False
    tokens = [("Tokens", words.per_second(now(figures.TOKENS)), "Generated, mean of the last minute.")]
    first = [("TTFT p95", words.seconds_or_dash(evidence.ttft_p95), "Time to first token, of the last minute.")]
    between = [("Between tokens", words.seconds_or_dash(now(figures.BETWEEN)), "p95 of the last minute.")]
    if figures.gives_vectors(now):
        tokens = [
            (
                "Prompt tokens",
                words.per_second(now(figures.PROMPT_TOKENS)),
                "Computed or cached, mean of the last minute.",
            )
        ]
        first = [
            (
                "E2E p95",
                words.seconds_or_dash(now(replace(figures.E2E, labels=own))),
                "From a request's arrival to its end.",
            )
        ]
        between = []
    rows = (
        (
            ("Goodput", "no SLO" if no_slo else words.percent(now(figures.goodput(own))),
             "Share of the requests of the last minute that met every target."),
            ("Requests", words.per_second(now(figures.ENDED)), "That ended, mean of the last minute."),
            ("Failed", words.percent(now(figures.FAILED)),
             "Share of the last minute: rejected, or ended with an error."),
            *tokens,
            ("KV cache", words.percent(evidence.kv_usage), "Share of the blocks that live requests hold."),
        ),
        (
            *first,
            ("Queue p95", words.seconds_or_dash(evidence.queue_p95), "The part of it before a request's first step."),
            ("Prefill p95", words.seconds_or_dash(evidence.prefill_p95), "The part of it that computes the prompt."),
            *between,
            ("Preemptions", words.count(evidence.preemptions), "In the last minute."),
        ),
        (
            ("Running", words.count(evidence.running), "Requests in the batch."),
            ("Waiting", words.count(evidence.waiting + evidence.waiting_for_grammar + evidence.held),
             "Requests in the queue, and those that wait for an engine."),
            ("Restarts", words.count(now(figures.RESTARTS)), "Of the engine, since the server was started."),
            *(() if own or no_slo else _goodput_by_class()),
        ),
    )  # fmt: skip
    classes = {f"Goodput {name}": figures.goodput((("slo", name),)) for name in evidence.goodput}
    of_class = {"TTFT p95": replace(figures.TTFT, labels=own), "E2E p95": replace(figures.E2E, labels=own)}
    sparks: dict[str, Query] = {**_SPARKS, **classes, "Goodput": figures.goodput(own), **of_class}
    for row in rows:
        frame.figures(row, sparks if has_sparks else None)


def _goodput_by_class() -> tuple[tuple[str, str, str], ...]:
    """A figure per class, when there are several that requests of the last minute were of."""
    found = frame.values(figures.goodput((), "slo"))
    if len(found) < 2:
        return ()
    return tuple(
        (f"Goodput {name}", words.percent(value), "Of this class, in the last minute.")
        for name, value in sorted(found.items())
    )


def _charts() -> None:
    watcher = watchers.monitor()
    if watcher.error and watcher.seconds_since_success is None:
        return
    frame.say_events()
    own = _own()
    targets = slo_targets(watcher.view(), choice.selection().labels).get(_slo_class() or DEFAULT_CLASS, {})
    objectives = frame.values(Gauge(name="quire_slo_objective_ratio", labels=own, by="slo", how="max"))
    missed = (*own, ("verdict", "miss"))
    _pair(
        lambda: chart("Goodput", "share of requests", [Line(query=figures.goodput(own, "slo"), by="slo")],
                      rules={f"{100 * one:g}%": one for one in sorted(set(objectives.values()))}, axis=SHARES,
                      key="goodput", top=1.0, say=words.percent),
        lambda: chart("Misses by first cause", "requests per second", [
            Line(query=Rate(name="quire_slo_requests_total", labels=missed, by="cause"), by="cause", hides_zero=True),
        ], key="misses", say=words.per_second),
    )  # fmt: skip
    _pair(
        lambda: _latency("Time to first token", "quire_time_to_first_token_seconds", targets.get("ttft")),
        lambda: chart("Its parts, p95" + (", all classes" if own else ""), "seconds", [
            Line(query=figures.QUEUE, name="queue"), Line(query=figures.PREFILL, name="prefill"),
        ], key="ttft_parts", axis=SECONDS, say=words.seconds),
    )  # fmt: skip
    _pair(
        lambda: _latency("Time per output token", "quire_time_per_output_token_seconds", targets.get("tpot")),
        lambda: _latency("End-to-end latency", "quire_e2e_request_latency_seconds", targets.get("e2e")),
    )
    _pair(
        lambda: chart("Requests by outcome", "requests per second", [
            Line(query=Rate(name="quire_requests_total", by="outcome"), by="outcome", hides_zero=True),
        ], key="outcomes", say=words.per_second),
        lambda: chart("Tokens", "tokens per second", [
            Line(query=figures.TOKENS, name="generated"), Line(query=figures.PROMPT_TOKENS, name="prompt"),
        ], key="tokens", say=words.per_second),
    )  # fmt: skip
    _pair(
        lambda: chart("KV cache", "share of blocks", [Line(query=figures.USAGE, name="used")], key="kv", axis=SHARES,
                      top=1.0, say=words.percent),
        lambda: chart("Requests and preemptions", "requests", [
            Line(query=figures.RUNNING, name="running"), Line(query=figures.WAITING, name="waiting"),
            Line(query=Rate(name="quire_preemptions_total"), name="preemptions per s"),
        ], key="requests", say="{:.3g}".format),
    )  # fmt: skip


def _pair(left: Callable[[], None], right: Callable[[], None]) -> None:
    """Two charts side by side; on a phone, which has one column, one below the other."""
    columns = st.columns(2)
    for column, draw_chart in zip(columns, (left, right), strict=True):
        with column:
            draw_chart()


def _latency(title: str, name: str, target: float | None) -> None:
    own = _own()
    lines = [Line(query=Quantile(name=name, q=q, labels=own), name=label) for label, q in _QUANTILES]
    rules = {f"SLO {words.seconds(target)}": target} if target is not None else None
    chart(title, "seconds", lines, key=name, rules=rules, say=words.seconds, axis=SECONDS)
