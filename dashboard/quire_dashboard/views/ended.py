"""The page of ended requests: which were slow or failed, and why each was, from what was measured of it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import streamlit as st
from quire_client.ended import LOST, EndedRequest

from quire_dashboard import choice, frame, watchers, words
from quire_dashboard.charts import phases_table, timeline_spec
from quire_dashboard.ended_requests import EndedSeen, Why, why
from quire_dashboard.settings import TRACE_ID
from quire_dashboard.snippets import curl

_MOST_ROWS = 300
_MOST_OF_A_NAME = 64
_TABLE, _CHOSEN = "ended", "ended_chosen"
_SLOW_OR_FAILED, _SLOW, _FAILED, _ALL = "Slow or failed", "Slow", "Failed", "All that ended"
_SHOWN: Mapping[str, Callable[[EndedRequest], bool]] = {
    _SLOW_OR_FAILED: lambda request: request.is_slow or request.has_failed,
    _SLOW: lambda request: request.is_slow,
    _FAILED: lambda request: request.has_failed,
    _ALL: lambda request: True,
}
_ANY = "Any"


def show() -> None:
    """Draw the page."""
    st.title("Slow & failed")
    frame.live(_now)


def _now() -> None:
    model = frame.model_or_reason()
    if not model:
        return
    seen = watchers.monitor().ended(model)
    _say_what_is_known(model, seen)
    if not seen.requests:
        return
    causes = {key: why(request) for key, request in seen.requests.items()}
    found = _filtered(seen, causes)
    reasons = Counter(causes[key].kind for key, one in found.items() if one.is_slow or one.has_failed)
    said = " · ".join(f"{number} {words.as_text(kind)}" for kind, number in reasons.most_common())
    st.markdown(f"**{words.count(len(found))} requests**" + (f" &nbsp; :gray[{said}]" if said else ""))
    if not found:
        st.caption("None that ended is like that.")
        return
    shown = dict(list(found.items())[:_MOST_ROWS])
    rows = [_row(request, causes[key]) for key, request in shown.items()]
    chosen: str | None = st.session_state.get(_CHOSEN)
    frame.choice_table(
        rows,
        list(shown),
        chosen,
        key=_TABLE,
        columns=_columns(),
        on_choice=partial(st.session_state.__setitem__, _CHOSEN),
    )
    if len(found) > _MOST_ROWS:
        st.caption(f"The latest {_MOST_ROWS} of them; search or filter for others.")
    request = None if chosen is None else seen.requests.get(chosen)
    if request is not None:
        _one(model, request)
    elif chosen is not None:
        st.info("So much has ended since that the chosen request is no longer kept.")
    else:
        st.caption("Choose a request in the table to see where its time went, and to send it again.")


def _say_what_is_known(model: str, seen: EndedSeen) -> None:
    answer = seen.answer
    if seen.error:
        age = f" What is shown is {words.seconds(seen.age_s)} old." if seen.requests else ""
        st.warning(
            f"**{words.as_text(model)} does not say which requests have ended.** {words.as_text(seen.error)}"
            f"{frame.what_to_do(seen.error)}.{age}",
            icon=":material/visibility_off:",
        )  # fmt: skip
    if answer is None:
        return
    since = choice.clock(answer.since_unix, "%Y-%m-%d %H:%M %Z")
    if not answer.capacity:
        st.info("The model keeps no ended requests: its setting `ended_requests` is 0.")
    elif not seen.requests:
        st.info(f"No request has ended since the model was loaded, at {since}.")
    elif answer.num_ended > answer.capacity:
        st.caption(f"The last {answer.capacity:,} of {answer.num_ended:,} requests that have ended since {since}.")
    else:
        st.caption(f"{len(seen.requests):,} requests; the model was loaded at {since}.")
    if not answer.has_slo and seen.requests:
        st.info("No SLO is set, so none of them counts as slow, and only failures are found here; see Overview.")


def _filtered(seen: EndedSeen, causes: Mapping[str, Why]) -> Mapping[str, EndedRequest]:
    """By the filters above the table, which are in the address as well."""
    requests = seen.requests.values()
    search, which, of_class, reason = st.columns([2, 1, 1, 1])
    text = search.text_input("Search", key="ended_search", placeholder="label, id or error", bind="query-params")
    kind = which.selectbox("Show", list(_SHOWN), key="ended_show", bind="query-params")
    classes = sorted({request.slo_class for request in requests if request.slo_class})
    slo_class = of_class.selectbox("SLO class", [_ANY, *classes], key="ended_class")
    reasons = sorted({cause.kind for cause in causes.values()})
    because = reason.selectbox("Why", [_ANY, *reasons], key="ended_why")
    wanted = (text or "").strip().lower()
    return {
        key: request
        for key, request in seen.requests.items()
        if _SHOWN[kind or _SLOW_OR_FAILED](request)
        and slo_class in (_ANY, None, request.slo_class)
        and because in (_ANY, None, causes[key].kind)
        and wanted in f"{request.label}\n{request.id}\n{request.error}\n{request.trace_id}".lower()
    }


def _name(request: EndedRequest) -> str:
    return words.printable(request.label, _MOST_OF_A_NAME) or request.id[:12] or f"no. {request.number}"


def _row(request: EndedRequest, cause: Why) -> dict[str, Any]:
    verdict = f"missed {request.slo_cause}" if request.slo_verdict == "miss" else request.slo_verdict or "not judged"
    return {
        "ended": datetime.fromtimestamp(request.time_unix, choice.zone()),
        "request": _name(request),
        "why": words.printable(cause.sentence, 300),
        "total": request.e2e_seconds,
        "TTFT": request.time_to_first_token_seconds,
        "queue": request.queue_seconds,
        "per token": request.time_per_output_token_seconds,
        "SLO": f"{request.slo_class}: {verdict}" if request.slo_class else verdict,
        "prompt": request.num_prompt_tokens,
        "output": None if request.task else request.num_output_tokens,
    }


def _columns() -> dict[str, Any]:
    """Together as wide as the page on a screen of 1,280 pixels."""
    column = st.column_config
    return {
        "ended": column.DatetimeColumn(f"ended, {choice.clock(time.time(), '%Z')}", format="HH:mm:ss", width=86),
        "request": column.TextColumn(width=96),
        "why": column.TextColumn(width=168),
        "total": column.NumberColumn(format="%.2f s", width=62),
        "TTFT": column.NumberColumn(format="%.3f s", width=72),
        "queue": column.NumberColumn(format="%.3f s", width=72),
        "per token": column.NumberColumn(format="%.4f s", width=70),
        "SLO": column.TextColumn(width=110),
        "prompt": column.NumberColumn(format=frame.TOKENS, width=70),
        "output": column.NumberColumn(format=frame.TOKENS, width=70),
    }


def _one(model: str, request: EndedRequest) -> None:
    name = words.as_code(_name(request))
    st.markdown(f"**Request** {name}: {words.as_text(why(request).sentence)}")
    if request.phases:
        frame.draw(phases_table("request", request.phases), timeline_spec("its end"), key="phases", height=180,
             alt="Where the request's time went")  # fmt: skip
    facts = [
        f"{words.count(request.num_prompt_tokens)} prompt tokens, {words.count(request.num_cached_tokens)} of them "
        f"cached; {words.as_text(request.task) or f'{words.count(request.num_output_tokens)} generated'}"
        + (f" in {request.num_sequences} sequences" if request.num_sequences > 1 else "")
        + f"; it ended by {request.finish_reason}, and was preempted {request.num_preemptions} times",
        f"when it arrived, {request.num_running_before} ran and {request.num_waiting_before} waited",
        *([f"adapter {words.as_code(request.adapter)}"] if request.adapter else []),
        f"id {words.as_code(request.id)}" if request.id else "it never reached the engine",
    ]
    if request.error_code == LOST:
        facts = ["how far it had come is not known: that was lost with the server", facts[-1]]
    st.markdown("\n".join(f"- {fact}" for fact in facts))
    if request.trace_id:
        _trace(request.trace_id)
    if request.finish_reason != "rejected":
        st.caption("Send it again" + (":" if request.prompt is not None else ", with a prompt of your own: the model "
                   "keeps no text unless its setting `ended_requests_text` is true."))  # fmt: skip
        st.code(_curl(model, request), language="bash", wrap_lines=True)


def _trace(trace_id: str) -> None:
    viewer = watchers.monitor().settings.traces
    if viewer and trace_id.isalnum():
        st.link_button("Trace", viewer.replace(TRACE_ID, trace_id), icon=":material/timeline:")
    else:
        st.markdown(f"- trace {words.as_code(trace_id)}")


def _curl(model: str, request: EndedRequest) -> str:
    """A command that sends it again; a prompt that was not kept has a placeholder."""
    prompt = request.prompt if request.prompt is not None else f"(a prompt of {request.num_prompt_tokens} tokens)"
    said = {"slo_class": request.slo_class, "lora_name": request.adapter}
    parameters = {name: value for name, value in said.items() if value}
    http = watchers.monitor().settings.http
    if request.task:
        sampling = {**request.parameters, "task": request.task}
        return curl(http, model, prompt, sampling, parameters, parameters_input="pooling_parameters")
    return curl(http, model, prompt, request.parameters, parameters)
