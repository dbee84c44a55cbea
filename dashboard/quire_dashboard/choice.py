"""What the visitor has picked, in the sidebar or by the address: server, model, time range, refresh."""

import time
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from zoneinfo import ZoneInfo

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from quire_dashboard.watchers import SERVER, monitor, monitors
from quire_dashboard.words import as_text

_RANGES = {"5 minutes": 300.0, "15 minutes": 900.0, "1 hour": 3600.0}
_RANGES_OF_PROMETHEUS = {**_RANGES, "6 hours": 21600.0, "24 hours": 86400.0}
_REFRESHES = {
    "every second": 1.0,
    "every 2 seconds": 2.0,
    "every 5 seconds": 5.0,
    "every 30 seconds": 30.0,
    "off": None,
}
_NONE = "—"
"""Stands for the model where there is none."""
_DEFAULT = "The model's default"
_WANTED = "wanted"
"""In the visitor's session: the server and the model that were chosen elsewhere than in the pickers, until these show
them. In the pickers' own places the browser's next refresh would put back what it still shows."""
UNSEEN = "unseen"
"""Containers whose keys begin so are not shown."""
_CSS = """
<style>
[class*="st-key-unseen-"] { display: none; }
/* A fragment that is being refreshed keeps its looks; the running man of every refresh would be the only flicker. */
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
[data-testid="stStatusWidget"] { display: none; }
.block-container, [data-testid="stMainBlockContainer"] { padding-top: 4.2rem; padding-bottom: 2rem; max-width: 1500px;
  padding-left: 2rem; padding-right: 2rem; }
@media (max-width: 640px) {
  .block-container, [data-testid="stMainBlockContainer"] { padding-left: 0.8rem; padding-right: 0.8rem; }
  /* What is said of the chosen request, and its button, come before forty bars. */
  .st-key-timeline-and-chosen [data-testid="stColumn"]:last-child { order: -1; }
}
[data-testid="stMetricValue"] { font-size: 1.6rem; }
/* The verdict is what is read first; which page this is, the list at the left says, too. */
[data-testid="stMain"] [data-testid="stHeading"] h1 { font-size: 1.25rem; padding: 0 0 0.4rem; }
[data-testid="stMain"] [data-testid="stHeading"] h3 { font-size: 1.1rem; padding: 0.4rem 0; }
.st-key-verdict [data-testid="stMarkdownContainer"] p:first-child { font-size: 1.3rem; line-height: 1.35; }
/* Captions and the words in charts are paler than the text, but can be read (WCAG 2.2, 1.4.3). */
[data-testid="stCaptionContainer"] { opacity: 0.8; }
[data-testid="stVegaLiteChart"] svg text { fill: currentColor; fill-opacity: 0.75; }
/* White on the paler blue of the dark theme could not. */
@media (prefers-color-scheme: dark) { [data-testid="stMain"] button[kind^="primary"] { color: #0e1117; } }
/* What cannot be taken back is red. */
.st-key-danger button { color: #b3261e; border-color: #b3261e; }
.st-key-danger button[kind="primary"] { color: #fff; background-color: #b3261e; }
@media (prefers-color-scheme: dark) { .st-key-danger button:not([kind="primary"]) { color: #f2857d; } }
.quire-block-map p { line-height: 1.9; font-size: 0.85rem; margin-top: 0.5rem; }
</style>
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the visitor has picked."""

    server: str
    """Its URL."""
    model: str
    """Empty: there is none."""
    range_s: float
    refresh_s: float | None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the model's series."""
        return {"model": self.model} if self.model else {}


def pickers() -> None:
    """The pickers of the sidebar: server if there are several, model, time range, refresh."""
    st.html(_CSS)
    servers = monitors()
    if _WANTED in st.session_state:
        server, model = st.session_state[_WANTED]
        if server in servers and len(servers) > 1:
            st.session_state[SERVER] = server
        if model:
            st.session_state["model"] = model
    # In the address as well, so that what one sees can be sent to another.
    with st.sidebar:
        if len(servers) > 1:
            st.selectbox("Server", list(servers), key=SERVER, bind="query-params")
        watcher = monitor()
        prometheus = watcher.settings.prometheus
        chosen = st.session_state.get("model", _NONE)
        models = watcher.models() or [chosen if watcher.error else _NONE]
        if chosen not in (_NONE, *models):  # of another server
            st.session_state["model"] = models[0]
        st.selectbox("Model", models, key="model", bind="query-params")
        st.session_state.pop(_WANTED, None)
        st.selectbox("Time range", list(_RANGES_OF_PROMETHEUS if prometheus else _RANGES), key="range",
                     bind="query-params")  # fmt: skip
        st.selectbox("Refresh", list(_REFRESHES), index=1, key="refresh")
        st.caption(f"History: {f'Prometheus at {prometheus}' if prometheus else 'this dashboard'}")
    # In the page itself: a phone hides the sidebar.
    model = selection().model
    what = f"**{as_text(model)}**" if model else "No model"
    st.caption(f"{what} at **{as_text(watcher.settings.url)}**; times are {clock(time.time(), '%Z')}")


def zone() -> tzinfo:
    """The visitor's time zone, as the browser names it; UTC if the name is missing or unknown here."""
    try:
        return ZoneInfo(st.context.timezone) if st.context.timezone else timezone.utc
    except (KeyError, ValueError, OSError):
        return timezone.utc


def clock(seconds: float, format_: str) -> str:
    """A moment in the visitor's time zone.

    Args:
        seconds: since the epoch.
        format_: of `strftime`.
    """
    return datetime.fromtimestamp(seconds, zone()).strftime(format_)


def choose(server: str, model: str) -> None:
    """Have the visitor see another server or model; to be called back by a widget of a part that calls
    `show_what_was_chosen`.

    Args:
        server: its URL.
        model: empty: any.
    """
    st.session_state[_WANTED] = (server, model)


def show_what_was_chosen() -> None:
    """Draw the whole page anew if `choose` was called: a part alone would leave the pickers and the address as they
    were. A refresh may cut the part's run short that was to do so; the next one comes here again."""
    if _WANTED in st.session_state:
        st.rerun()


def selection() -> Selection:
    """The present selection."""
    model = st.session_state.get("model") or _NONE
    if model == _NONE:  # none was there when the page was opened
        model = next(iter(monitor().models()), "")
    return Selection(
        server=monitor().settings.url,
        model=model,
        range_s=_RANGES_OF_PROMETHEUS[st.session_state.get("range", "5 minutes")],
        refresh_s=_REFRESHES[st.session_state.get("refresh", "every 2 seconds")],
    )


def slo_classes() -> list[str]:
    """Those of the selected model, as far as its metrics are known."""
    columns = monitor().view().columns("quire_slo_requests_total", selection().labels)
    return sorted({labels.get("slo", "") for labels, _ in columns} - {""})


def slo_class_picker(where: DeltaGenerator, key: str) -> str:
    """A list of the selected model's classes, for a request that is sent from here.

    Returns:
        Empty: none is named.
    """
    options = [_DEFAULT, *slo_classes()]
    if st.session_state.get(key, _DEFAULT) not in options:  # of another model
        st.session_state[key] = _DEFAULT
    picked = where.selectbox("SLO class", options, key=key)
    return "" if picked in (None, _DEFAULT) else picked
