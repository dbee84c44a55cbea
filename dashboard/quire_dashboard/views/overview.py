"""The overview page: whether users are served within their SLO, and if not, why."""

import streamlit as st

from quire_dashboard import words
from quire_dashboard.charts import SECONDS, SHARES
from quire_dashboard.evidence import gather
from quire_dashboard.frame import CHARTS_S, Line, chart, figures, live, monitor, selection, server_away
from quire_dashboard.health import SLO_EXAMPLE, Evidence, Health, Level, assess
from quire_dashboard.queries import Gauge, Quantile, Rate, Ratio, latest
from quire_dashboard.snapshot_answer import Snapshot

__all__ = ["show"]

_ALL = "All classes"
_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


def show() -> None:
    """Draw the page."""
    st.title("Overview")
    columns = monitor().view().columns("quire_slo_requests_total", selection().labels)
    classes = {labels.get("slo", "") for labels, _ in columns}
    options = [_ALL, *sorted(classes - {""})]
    if st.session_state.get("slo_class", _ALL) not in options:  # of another model
        st.session_state["slo_class"] = _ALL
    st.segmented_control(
        "SLO class", options, default=_ALL, key="slo_class", required=True, bind="query-params"
    )  # fmt: skip
    live(_now)
    live(_charts, CHARTS_S)


def _slo_class() -> str:
    picked = st.session_state.get("slo_class") or _ALL
    return "" if picked == _ALL else str(picked)


def _snapshot() -> Snapshot | None:
    picked = selection()
    return monitor().snapshot(picked.model, picked.refresh_s).snapshot if picked.model else None


def _now() -> None:
    watcher, picked = monitor(), selection()
    nothing = server_away()
    snapshot = None if watcher.error else _snapshot()
    view = watcher.view()
    evidence = gather(view, picked.labels, snapshot, server_error=watcher.error, slo_class=_slo_class())
    if not nothing and not watcher.error:
        what = (picked.model, _slo_class())
        standing = st.session_state.setdefault("standing", {})
        health = assess(evidence, standing.get(what, ()))
        standing[what] = [finding.cause for finding in health.findings]
        _say(health)
        if evidence.has_slo is False:
            st.code(SLO_EXAMPLE, language="json")
    if nothing:
        return
    _figures(evidence)


def _say(health: Health) -> None:
    box = {Level.OK: st.success, Level.WARNING: st.warning, Level.CRITICAL: st.error}[health.level]
    icon = {Level.OK: "check_circle", Level.WARNING: "warning", Level.CRITICAL: "error"}[health.level]
    details = "".join(
        f"\n- **{words.as_text(finding.title)}.** {words.as_text(finding.detail)}" for finding in health.findings
    )
    box(f"**{words.as_text(health.headline)}**\n{details}", icon=f":material/{icon}:")


def _figures(evidence: Evidence) -> None:
    view, labels = monitor().view(), selection().labels
    own = (("slo", _slo_class()),) if _slo_class() else ()
    good = latest(_goodput(own), view, labels).get("")
    tokens = latest(Rate(name="quire_generation_tokens_total"), view, labels).get("")
    restarts = latest(Gauge(name="quire_engine_restarts_total"), view, labels).get("")
    rows = (
        (
            (
                "Goodput",
                "no SLO" if evidence.has_slo is False else words.percent(good),
                "Share of the requests of the last minute that met every target.",
            ),
            ("TTFT p95", words.seconds_or_dash(evidence.ttft_p95), "Time to first token, of the last minute."),
            ("Tokens", words.per_second(tokens), "Generated, mean of the last minute."),
            ("KV cache", words.percent(evidence.kv_usage), "Share of the blocks that live requests hold."),
        ),
        (
            ("Running", words.count(evidence.running), "Requests in the batch."),
            ("Waiting", words.count(evidence.waiting + evidence.waiting_for_grammar), "Requests in the queue."),
            ("Preemptions", words.count(evidence.preemptions), "In the last minute."),
            ("Restarts", words.count(restarts), "Of the engine, since the server was started."),
        ),
    )
    for row in rows:
        figures(row)


def _goodput(own: tuple[tuple[str, str], ...], by: str = "") -> Ratio:
    return Ratio(
        part=Rate(name="quire_slo_requests_total", labels=(*own, ("verdict", "good")), by=by),
        whole=Rate(name="quire_slo_requests_total", labels=own, by=by),
    )


def _charts() -> None:
    watcher = monitor()
    if watcher.error and watcher.seconds_since_success is None:
        return
    slo_class = _slo_class()
    own = (("slo", slo_class),) if slo_class else ()
    seen = _snapshot() if not watcher.error else None
    targets = seen.slo_targets(slo_class or "default") if seen else {}
    left, right = st.columns(2)
    with left:
        chart("Goodput", "share of requests", [Line(query=_goodput(own, "slo"), by="slo")], key="goodput",
              rules={"99%": 0.99}, axis=SHARES, top=1.0, say=words.percent)  # fmt: skip
        _latency("Time to first token", "quire_time_to_first_token_seconds", targets.get("ttft"))
        _latency("End-to-end latency", "quire_e2e_request_latency_seconds", targets.get("e2e"))
        chart("KV cache", "share of blocks", [
            Line(query=Gauge(name="quire_kv_cache_usage_ratio", how="max"), name="used"),
        ], key="kv", axis=SHARES, top=1.0, say=words.percent)  # fmt: skip
    missed = (*own, ("verdict", "miss"))
    with right:
        chart("Misses by first cause", "requests per second", [
            Line(query=Rate(name="quire_slo_requests_total", labels=missed, by="cause"), by="cause", hides_zero=True),
        ], key="misses", say=words.per_second)  # fmt: skip
        _latency("Time per output token", "quire_time_per_output_token_seconds", targets.get("tpot"))
        chart("Tokens", "tokens per second", [
            Line(query=Rate(name="quire_generation_tokens_total"), name="generated"),
            Line(query=Rate(name="quire_prompt_tokens_total"), name="prompt"),
        ], key="tokens", say=words.per_second)  # fmt: skip
        chart("Requests and preemptions", "requests", [
            Line(query=Gauge(name="quire_requests_running"), name="running"),
            Line(query=Gauge(name="quire_requests_waiting"), name="waiting"),
            Line(query=Rate(name="quire_preemptions_total"), name="preemptions per s"),
        ], key="requests", say=lambda value: f"{value:.3g}")  # fmt: skip


def _latency(title: str, name: str, target: float | None) -> None:
    lines = [Line(query=Quantile(name=name, q=q), name=label) for label, q in _QUANTILES]
    rules = {f"SLO {words.seconds(target)}": target} if target is not None else None
    if _slo_class():  # the server's histograms are of all requests
        title += ", all classes"
    chart(title, "seconds", lines, key=name, rules=rules, say=words.seconds, axis=SECONDS)
