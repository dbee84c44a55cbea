"""The requests page: the state and the timeline of every live request, and a button that cancels it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st
from quire_client import ClientError
from quire_client.snapshot import RequestState

from quire_dashboard import choice, frame, watchers, words
from quire_dashboard.charts import timeline_spec, timeline_table

_MOST_BARS = 40
_TABLE, _CHOSEN, _CONFIRMING = "requests", "chosen", "confirming"
"""In the visitor's session: the table's own state, what is chosen in it, and the id whose cancellation waits for a
second press."""
_TOLD_S = 10.0
"""How long the page shows the result of a cancellation."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    model: str
    id: str
    name: str
    """What it is shown by, once it has ended, too."""
    server: str
    """Its URL: another one may have a model of that name, and even a request of that id."""


def show() -> None:
    """Draw the page."""
    st.title("Requests")
    frame.live(_now)


def _now() -> None:
    if frame.server_away():
        return
    picked = choice.selection()
    snapshot = frame.snapshot_or_reason(picked.model)
    if snapshot is None:
        return
    _tell_what_was_cancelled()
    requests = sorted(snapshot.requests, key=lambda request: -request.age_seconds)
    names = dict(zip((request.id for request in requests), frame.request_names(requests), strict=True))
    running = sum(request.phase in ("prefill", "decode") for request in requests)
    st.markdown(f"**{len(requests)} requests**, {running} running, {len(requests) - running} not")
    if requests:
        _table(picked, requests, names)
    else:
        st.caption("No request is being served at the moment.")
    with st.container(key="timeline-and-chosen"):
        left, right = st.columns([2, 1])
    with left:
        if requests:
            _timeline(requests, names, _chosen(picked))
    with right:
        _one(picked, {request.id: request for request in requests})


def _table(picked: choice.Selection, requests: Sequence[RequestState], names: Mapping[str, str]) -> None:
    """The table, in which a request is chosen; it stays so when it has ended."""

    def note(id_: str | None) -> None:
        st.session_state[_CHOSEN] = None if id_ is None else _Chosen(picked.model, id_, names[id_], picked.server)
        _ask(None)

    chosen = _chosen(picked)
    rows = [_row(request, names[request.id]) for request in requests]
    ids = [request.id for request in requests]
    frame.choice_table(
        rows, ids, None if chosen is None else chosen.id, key=_TABLE, columns=_COLUMNS, on_choice=note
    )  # fmt: skip


def _chosen(picked: choice.Selection) -> _Chosen | None:
    """The request that is chosen, if it is of what is selected."""
    chosen: _Chosen | None = st.session_state.get(_CHOSEN)
    return chosen if chosen is not None and (chosen.server, chosen.model) == (picked.server, picked.model) else None


def _row(request: RequestState, name: str) -> dict[str, Any]:
    return {
        "request": name,
        "phase": words.phase_name(request.phase),
        "age": request.age_seconds,
        "queue": request.queue_seconds,
        "SLO": request.slo_class,
        "slack": request.slo_slack_seconds,
        "starts in": request.predicted_start_seconds,
        "prompt": request.num_prompt_tokens,
        "computed": request.num_computed_tokens,
        "tokens": request.task
        or f"{request.num_output_tokens}" + (f" of {request.max_tokens}" if request.max_tokens else ""),
        "blocks": request.num_blocks,
        "preempted": request.num_preemptions,
    }


_COLUMNS: dict[str, Any] = {
    "request": st.column_config.TextColumn(pinned=True, width=130),
    "phase": st.column_config.TextColumn(width=80),
    # Numbers, so that the table sorts them as such.
    "age": st.column_config.NumberColumn(format="%.1f s", width=64),
    "queue": st.column_config.NumberColumn(format="%.2f s", width=64),
    "SLO": st.column_config.TextColumn(width=68),
    "slack": st.column_config.NumberColumn(format="%.1f s", help="Time until the request misses its next target.",
                                           width=68),
    "starts in": st.column_config.NumberColumn(
        format="%.1f s", help="Predicted time until its first turn, with scheduling_policy slo.", width=64
    ),
    "prompt": st.column_config.NumberColumn(format=frame.TOKENS, width=66),
    "computed": st.column_config.NumberColumn(
        format=frame.TOKENS, help="Tokens whose keys and values are in the KV cache.", width=72
    ),
    "tokens": st.column_config.TextColumn(help="Generated, of those that it may; or the task.", width=72),
    "blocks": st.column_config.NumberColumn(width=54),
    "preempted": st.column_config.NumberColumn(format="%d times", width=76),
}  # fmt: skip
"""Together as wide as the page on a screen of 1,280 pixels."""


def _timeline(requests: Sequence[RequestState], names: Mapping[str, str], chosen: _Chosen | None) -> None:
    """A bar for each of the oldest requests, and for the chosen one."""
    shown = list(requests[:_MOST_BARS])
    others = [request for request in requests[_MOST_BARS:] if chosen is not None and request.id == chosen.id]
    oldest = f", the oldest {_MOST_BARS}" if len(requests) > _MOST_BARS else ""
    st.markdown(f"**Timeline**{oldest}{' and the chosen one' if others else ''}")
    shown += others
    frame.draw(timeline_table(shown, names), timeline_spec(), key="timeline", height=140 + 24 * len(shown),
         alt="Timeline of the requests")  # fmt: skip


def _one(picked: choice.Selection, by_id: Mapping[str, RequestState]) -> None:
    chosen = _chosen(picked)
    if chosen is None:
        if by_id:
            st.caption("Choose a request in the table to see what has happened to it, or to cancel it.")
        return
    name = words.as_code(chosen.name)
    request = by_id.get(chosen.id)
    if request is None:
        st.info(f"Request {name} has ended.")
        return
    st.markdown(
        f"**Request** {name}: {words.count(request.num_cached_tokens)} of {words.count(request.num_prompt_tokens)} "
        f"prompt tokens cached, priority {request.priority}"
        + (f", adapter {words.as_code(request.adapter)}" if request.adapter else "")
    )
    if request.slo_slack_seconds is not None and request.slo_slack_seconds < 0:
        st.markdown(f":red[Missed its target {words.seconds(-request.slo_slack_seconds)} ago.]")
    if request.start_slack_seconds is not None:
        late = request.start_slack_seconds < 0
        st.markdown(
            "Its first token will be late: it runs when others leave room."
            if late
            else f"To be in time it has to start within {words.seconds(request.start_slack_seconds)}."
        )
    happened = [
        f"- {words.seconds(request.age_seconds - event.age_seconds)}: {event.kind.replace('_', ' ')}"
        + (f", {event.num_tokens} token{'s' * (event.num_tokens != 1)}" if event.num_tokens else "")
        for event in sorted(request.events, key=lambda event: -event.age_seconds)
    ]
    st.markdown("\n".join(happened[-12:]) or "Nothing has happened to it yet.")
    _cancelling(picked, request.id, name)


def _cancelling(picked: choice.Selection, request_id: str, name: str) -> None:
    """The button, and once it was pressed the question whether that is meant.

    Labels and callbacks hold this request, so that what is cancelled is what they name even if the list has changed.
    """
    with st.container(key="danger"):
        if st.session_state.get(_CONFIRMING) != request_id:
            st.button(f"Cancel {name}…", key=f"cancel-{request_id}", on_click=_ask, args=(request_id,))
            return
        at = f" at {words.as_code(picked.server)}" if len(watchers.monitors()) > 1 else ""
        st.markdown(f"Cancel {name}{at}? Its client gets nothing more than what it has, and it cannot be taken back.")
        st.button(f"Cancel {name} now", key=f"confirm-{request_id}", type="primary", on_click=_cancel,
                  args=(picked.server, picked.model, request_id, name))  # fmt: skip
    st.button("Let it run", key=f"keep-{request_id}", on_click=_ask, args=(None,))


def _ask(request_id: str | None) -> None:
    st.session_state[_CONFIRMING] = request_id


def _cancel(server: str, model: str, request_id: str, name: str) -> None:
    _ask(None)
    watcher = watchers.monitors()[server]
    try:
        done = watcher.client.cancel(model, request_id)
        text = f"Request {name} was cancelled." if done else f"Request {name} had already ended."
        st.session_state["cancelled"] = (time.monotonic(), True, text)
    except ClientError as error:
        text = f"Request {name} was not cancelled: {words.as_text(str(error))}"
        st.session_state["cancelled"] = (time.monotonic(), False, text)
    watcher.forget_snapshot(model)


def _tell_what_was_cancelled() -> None:
    if "cancelled" not in st.session_state:
        return
    since, done, text = st.session_state["cancelled"]
    if time.monotonic() - since > _TOLD_S:
        del st.session_state["cancelled"]
        return
    (st.success if done else st.error)(text)
