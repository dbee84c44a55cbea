"""The load page: send a small load, and watch its results."""

import threading
from collections import Counter

import streamlit as st

from quire_dashboard import words
from quire_dashboard.charts import SECONDS
from quire_dashboard.frame import CHARTS_S, Line, chart, figures, live, monitor, selection
from quire_dashboard.load import MOST_STREAMS, LoadJob, LoadPlan, percentile
from quire_dashboard.queries import Gauge, Quantile, Rate

__all__ = ["show", "stop_all"]

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
    model = selection().model
    if not model:
        st.info("No model of Quire is loaded.")
        return
    st.caption(
        "From this dashboard's own process: for a look at how the server behaves. For figures, use quire bench serve."
    )
    with st.form("load_form"):
        first, second, third = st.columns(3)
        num_streams = first.number_input("Streams at the same time", 1, MOST_STREAMS, 4, key="num_streams")
        num_requests = second.number_input("Requests in all", 1, 10_000, 64, key="num_requests")
        max_tokens = third.number_input("Tokens per answer", 1, 4096, 64, key="load_max_tokens")
        prompt_words = first.number_input("Words per prompt", 1, 20_000, 32, key="prompt_words")
        shared_words = second.number_input("Words that all prompts share", 0, 20_000, 0, key="shared_words")
        slo_class = third.text_input("SLO class", "", key="load_slo", help="Empty: the model's default.")
        started = st.form_submit_button("Start", type="primary")
    if started:
        _start(LoadPlan(
            model=model, num_streams=int(num_streams), num_requests=int(num_requests), max_tokens=int(max_tokens),
            prompt_words=int(prompt_words), shared_words=int(shared_words), slo_class=slo_class,
        ))  # fmt: skip
    live(_watch)
    live(_charts, CHARTS_S)


def _start(plan: LoadPlan) -> None:
    watcher = monitor()
    with _lock:
        job = _jobs.get(watcher.settings.url)
        if job is not None and job.is_running:
            st.warning("A load is already running; stop it first.")
            return
        _jobs[watcher.settings.url] = job = LoadJob(watcher.triton, plan)
    job.start()


def _watch() -> None:
    job = _jobs.get(monitor().settings.url)
    if job is None:
        st.caption("No load has been started.")
        return
    _progress(job)


def _charts() -> None:
    if monitor().settings.url not in _jobs:
        return
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
    results = job.results()
    good = [result for result in results if not result.error]
    state = "running" if job.is_running else "stopped" if len(results) < job.plan.num_requests else "done"
    st.progress(len(results) / job.plan.num_requests, f"{len(results)} of {job.plan.num_requests} requests, {state}")
    if job.is_running:
        st.button("Stop", key="stop_load", on_click=job.stop)
    ttft = [result.ttft_seconds for result in good if result.ttft_seconds is not None]
    e2e = [result.e2e_seconds for result in good]
    tokens = sum(result.num_tokens for result in good)
    times = (("TTFT p50", ttft, 0.5), ("TTFT p95", ttft, 0.95), ("E2E p50", e2e, 0.5), ("E2E p95", e2e, 0.95))
    shown = [
        *((label, words.seconds_or_dash(percentile(values, q)), "") for label, values, q in times),
        ("Tokens", words.per_second(tokens / job.seconds if job.seconds else None), "Generated."),
        ("Errors", words.count(len(results) - len(good)), "Requests that failed."),
    ]
    figures(shown)
    for error, number in Counter(result.error for result in results if result.error).most_common(3):
        st.error(f"{number} failed: {words.as_text(error)}")
