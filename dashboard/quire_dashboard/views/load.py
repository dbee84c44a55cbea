"""The load page: send a small load, and watch its results."""

import threading
from collections import Counter

import streamlit as st
from quire_load.report import percentile

from quire_dashboard import frame, watchers, words
from quire_dashboard.charts import SECONDS
from quire_dashboard.choice import slo_class_picker
from quire_dashboard.frame import Line, chart
from quire_dashboard.load import MOST_REQUESTS, MOST_STREAMS, LoadJob, LoadPlan
from quire_dashboard.queries import Gauge, Quantile, Rate

_lock = threading.Lock()
_jobs: dict[str, LoadJob] = {}
"""By server: one load at a time, which every visitor can stop."""


def stop_all() -> None:
    """Stop all loads, and wait until they have ended."""
    with _lock:
        for job in _jobs.values():
            job.stop()
            job.join(10)
        _jobs.clear()


def show() -> None:
    """Draw the page."""
    st.title("Load")
    model = frame.model_or_reason()
    if not model:
        return
    st.caption(
        "The load of quire bench serve, from this dashboard's own process: for a look at how the server behaves. For "
        "figures, use that command, which has a process to itself."
    )
    with st.form("load_form"):
        first, second, third = st.columns(3)
        num_streams = first.number_input("Streams at the same time", 1, MOST_STREAMS, 4, key="num_streams")
        num_requests = second.number_input("Requests in all", 1, MOST_REQUESTS, 64, key="num_requests")
        max_tokens = third.number_input("Tokens per answer", 1, 4096, 64, key="load_max_tokens")
        prompt_tokens = first.number_input("Tokens per prompt", 1, 20_000, 48, key="prompt_tokens")
        shared_tokens = second.number_input("Tokens that all prompts share", 0, 20_000, 0, key="shared_tokens")
        request_rate = third.number_input(
            "Requests per second", 0.0, 1000.0, 0.0, key="request_rate",
            help="They come at random (Poisson), whatever the server does; times run from when they were due. 0: each "
            "stream sends its next request when the last one has ended.",
        )  # fmt: skip
        slo_class = slo_class_picker(first, "load_slo")
        started = st.form_submit_button("Start", type="primary")
    if started:
        _start(LoadPlan(
            model=model, num_streams=int(num_streams), num_requests=int(num_requests), max_tokens=int(max_tokens),
            prompt_tokens=int(prompt_tokens), shared_tokens=int(shared_tokens), slo_class=slo_class,
            request_rate=float(request_rate),
        ))  # fmt: skip
    frame.live(_watch)
    frame.live(_charts, frame.CHARTS_S)


def _start(plan: LoadPlan) -> None:
    watcher = watchers.monitor()
    with _lock:
        job = _jobs.get(watcher.settings.url)
        if job is not None and job.is_running:
            st.warning("A load is already running; stop it first.")
            return
        _jobs[watcher.settings.url] = job = LoadJob(watcher.settings.url, plan)
    job.start()


def _watch() -> None:
    job = _jobs.get(watchers.monitor().settings.url)
    if job is None:
        st.caption("No load has been started.")
        return
    _progress(job)


def _charts() -> None:
    if watchers.monitor().settings.url not in _jobs:
        return
    frame.say_events()
    left, right = st.columns(2)
    with left:
        chart("Time to first token, at the server", "seconds", [
            Line(query=Quantile(name="quire_time_to_first_token_seconds", q=0.5), name="p50"),
            Line(query=Quantile(name="quire_time_to_first_token_seconds", q=0.95), name="p95"),
        ], key="load_ttft", say=words.seconds, axis=SECONDS)  # fmt: skip
    with right:
        chart("Requests at the server", "requests", [
            Line(query=Gauge(name="quire_requests_running"), name="running"),
            Line(query=Gauge(name="quire_requests_waiting"), name="waiting"),
        ], key="load_requests", say=words.count)  # fmt: skip
    chart("Tokens generated", "tokens per second", [
        Line(query=Rate(name="quire_generation_tokens_total"), name="tokens"),
    ], key="load_tokens", say=words.per_second)  # fmt: skip


def _progress(job: LoadJob) -> None:
    records = job.records()
    good = [record for record in records if not record.error_kind]
    state = "running" if job.is_running else "stopped" if len(records) < job.plan.num_requests else "done"
    st.progress(len(records) / job.plan.num_requests, f"{len(records)} of {job.plan.num_requests} requests, {state}")
    if job.is_running:
        st.button("Stop", key="stop_load", on_click=job.stop)
    ttft = [record.ttft_s for record in good if record.ttft_s is not None]
    e2e = [record.e2el_s for record in good]
    tokens = sum(record.num_output_tokens for record in good)
    times = (("TTFT p50", ttft, 0.5), ("TTFT p95", ttft, 0.95), ("E2E p50", e2e, 0.5), ("E2E p95", e2e, 0.95))
    shown = [
        *((label, words.seconds_or_dash(percentile(values, q)), "") for label, values, q in times),
        ("Tokens", words.per_second(tokens / job.seconds if job.seconds else None), "Generated."),
        ("Errors", words.count(len(records) - len(good)), "Requests that failed."),
    ]
    frame.figures(shown)
    for error, number in Counter(record.error for record in records if record.error_kind).most_common(3):
        st.error(f"{number} failed: {words.as_text(error)}")
