"""The page of incidents: when users were affected, by what, and which requests were hurt."""

import time
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

import streamlit as st
from quire_client.symptoms import SYMPTOMS

from quire_dashboard import choice, frame, watchers, words
from quire_dashboard.incidents import MOST_HURT, MOST_ROWS, Hurt, Incident
from quire_dashboard.settings import TRACE_ID

_TABLE, _CHOSEN = "incidents", "incidents_chosen"
_HURT_COLUMNS: dict[str, Any] = {
    "why": st.column_config.TextColumn(width="large"),
    "more": st.column_config.LinkColumn(display_text="Slow & failed"),
    "trace": st.column_config.LinkColumn(display_text="trace"),
}


def _columns() -> dict[str, Any]:
    column, name = st.column_config, choice.clock(time.time(), "%Z")
    return {
        "began": column.DatetimeColumn(f"began, {name}", format="MM-DD HH:mm:ss", width=130),
        "over": column.DatetimeColumn(f"over, {name}", format="MM-DD HH:mm:ss", width=130, help="Empty: it goes on."),
        "cause": column.TextColumn(width=330),
        "alert": column.TextColumn(help="Fires if it goes on."),
    }


def show() -> None:
    """Draw the page."""
    st.title("Incidents")
    frame.live(_now)


def _now() -> None:
    log = watchers.monitor().incidents
    rows = log.rows()
    if log.error:
        st.warning(f"Incidents are kept in the memory of this dashboard alone: {words.as_text(log.error)}.")
    if not rows:
        st.info("There has been no incident yet.")
        return
    num_going = sum(row.over is None for row in rows)
    st.markdown(
        f"**{len(rows)} incident{'s' * (len(rows) > 1)}**" + (f", {num_going} of them now" if num_going else "")
    )
    chosen: str | None = st.session_state.get(_CHOSEN)
    frame.choice_table(
        [_row(row) for row in rows],
        [row.id for row in rows],
        chosen,
        key=_TABLE,
        columns=_columns(),
        on_choice=partial(st.session_state.__setitem__, _CHOSEN),
    )
    if len(rows) == MOST_ROWS:
        st.caption(f"The latest {MOST_ROWS}.")
    found = next((row for row in rows if row.id == chosen), None)
    if found is None:
        st.caption("Choose an incident in the table to see which requests were hurt.")
    else:
        _one(found)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, choice.zone())


def _row(row: Incident) -> dict[str, Any]:
    return {
        "began": _moment(row.began),
        "over": _moment(row.over),
        "model": row.model or "(all)",
        "cause": row.title,
        "requests hurt": row.num_hurt,
        "alert": row.alert,
    }


def _one(row: Incident) -> None:
    lasted = "it goes on" if row.over is None else f"it lasted {words.seconds(row.over - row.began)}"
    symptom = SYMPTOMS.get(row.cause)  # None of a row that another version has written
    runbook = f" Runbook: {words.as_text(symptom.runbook)}." if symptom else ""
    st.markdown(f"**{words.as_text(row.title)}**, {lasted}. {words.as_text(row.detail)}{runbook}")
    if not row.hurt:
        st.caption("No request that was hurt is known: the model lists none.")
        return
    frame.table([_hurt(one) for one in row.hurt], key="hurt", columns=_HURT_COLUMNS)
    if row.num_hurt > MOST_HURT:
        st.caption(f"The first {MOST_HURT} of {words.count(row.num_hurt)}.")


def _hurt(one: Hurt) -> dict[str, Any]:
    viewer = watchers.monitor().settings.traces
    address = urlencode({"ended_search": one.id, "ended_show": "All that ended"})
    has_trace = viewer and one.trace_id.isalnum()
    return {
        "request": one.label or one.id[:12] or "(without a name)",
        "why": one.why,
        "more": f"ended?{address}" if one.id else None,
        "trace": viewer.replace(TRACE_ID, one.trace_id) if has_trace else one.trace_id or None,
    }
