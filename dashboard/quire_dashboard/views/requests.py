"""The requests page: the state and the timeline of every live request, and a button that cancels it."""

import time
from typing import Any

import streamlit as st

from quire_dashboard import words
from quire_dashboard.charts import timeline_spec, timeline_table
from quire_dashboard.frame import (
    draw,
    live,
    monitor,
    request_names,
    selection,
    server_away,
    snapshot_or_reason,
    table,
)
from quire_dashboard.snapshot_answer import RequestState
from quire_dashboard.triton_client import TritonError

__all__ = ["show"]

_MOST_BARS = 40
_TOLD_S = 10.0
"""How long the page shows the result of a cancellation."""


def show() -> None:
    """Draw the page."""
    st.title("Requests")
    live(_now)


def _now() -> None:
    if server_away():
        return
    model = selection().model
    snapshot = snapshot_or_reason(model)
    if snapshot is None:
        return
    _tell_what_was_cancelled()
    requests = sorted(snapshot.requests, key=lambda request: -request.age_seconds)
    names = dict(zip((request.id for request in requests), request_names(requests), strict=True))
    running = sum(request.phase in ("prefill", "decode") for request in requests)
    st.markdown(f"**{len(requests)} requests**, {running} running, {len(requests) - running} not")
    if not requests:
        st.caption("No request is being served at the moment.")
        return
    table([_row(request, names[request.id]) for request in requests], key="requests", columns=_COLUMNS)
    left, right = st.columns([2, 1])
    with left:
        shown = requests[:_MOST_BARS]
        oldest = f", the oldest {_MOST_BARS}" if len(requests) > _MOST_BARS else ""
        st.markdown(f"**Timeline**{oldest}")
        draw(timeline_table(shown, names), timeline_spec(), key="timeline", height=140 + 24 * len(shown),
             alt="Timeline of the requests")  # fmt: skip
    with right:
        _one(model, requests, names)


def _row(request: RequestState, name: str) -> dict[str, Any]:
    return {
        "request": name,
        "phase": words.phase_name(request.phase),
        "age": words.seconds(request.age_seconds),
        "queue": words.seconds_or_dash(request.queue_seconds),
        "SLO": request.slo_class,
        "slack": words.seconds_or_dash(request.slo_slack_seconds),
        "prompt": request.num_prompt_tokens,
        "computed": request.num_computed_tokens,
        "cached": request.num_cached_tokens,
        "output": request.num_output_tokens / request.max_tokens if request.max_tokens else None,
        "tokens": f"{request.num_output_tokens} of {request.max_tokens}"
        if request.max_tokens
        else str(request.num_output_tokens),
        "blocks": request.num_blocks,
        "preempted": request.num_preemptions,
        "priority": request.priority,
    }


_COLUMNS: dict[str, Any] = {
    "request": st.column_config.TextColumn(pinned=True),
    "output": st.column_config.ProgressColumn(min_value=0.0, max_value=1.0, format="percent"),
    "computed": st.column_config.NumberColumn(help="Tokens whose keys and values are in the KV cache."),
    "slack": st.column_config.TextColumn(help="Time until the request misses its next target."),
}


def _one(model: str, requests: list[RequestState], names: dict[str, str]) -> None:
    by_id = {request.id: request for request in requests}
    chosen = st.selectbox("Request", list(by_id), format_func=lambda id_: names.get(id_, id_[:12]), key="chosen")
    request = by_id.get(chosen)
    if request is None:
        return
    if request.slo_slack_seconds is not None and request.slo_slack_seconds < 0:
        st.markdown(f":red[Missed its target {words.seconds(-request.slo_slack_seconds)} ago.]")
    happened = [
        f"- {words.seconds(request.age_seconds - event.age_seconds)}: {event.kind.replace('_', ' ')}"
        + (f", {event.num_tokens} tokens" if event.num_tokens else "")
        for event in sorted(request.events, key=lambda event: -event.age_seconds)
    ]
    st.markdown("\n".join(happened[-12:]) or "Nothing has happened to it yet.")
    # The button's label and callback hold this request, so it cancels what it names even if the list has changed.
    name = words.as_code(names[request.id])
    st.button(f"Cancel {name}", key=f"cancel-{request.id}", type="primary", on_click=_cancel,
              args=(model, request.id, name))  # fmt: skip


def _cancel(model: str, request_id: str, name: str) -> None:
    try:
        done = monitor().triton.cancel(model, request_id)
        text = f"Request {name} was cancelled." if done else f"Request {name} had already ended."
        st.session_state["cancelled"] = (time.monotonic(), True, text)
    except TritonError as error:
        text = f"Request {name} was not cancelled: {words.as_text(str(error))}"
        st.session_state["cancelled"] = (time.monotonic(), False, text)
    monitor().forget_snapshot(model)


def _tell_what_was_cancelled() -> None:
    if "cancelled" not in st.session_state:
        return
    since, done, text = st.session_state["cancelled"]
    if time.monotonic() - since > _TOLD_S:
        del st.session_state["cancelled"]
        return
    (st.success if done else st.error)(text)
