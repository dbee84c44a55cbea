"""The strip above the overview: all servers and models, each with its health; a press chooses one.

It shows what the watchers have read, and asks no server for anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import streamlit as st
from quire_client.symptoms import Level

from quire_dashboard import words
from quire_dashboard.choice import choose, selection, show_what_was_chosen
from quire_dashboard.monitor import Monitor
from quire_dashboard.watchers import monitors

_LIGHTS = {Level.OK: ("green", "well"), Level.WARNING: ("orange", "affected"), Level.CRITICAL: ("red", "in trouble")}
_MOST = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    server: str
    model: str = ""
    """Empty of a server that tells of none."""
    level: Level
    text: str
    """After the light."""
    explained: str


def show_strip() -> None:
    """One entry per model, and one for each server that has none or is away; nothing of a single model."""
    show_what_was_chosen()
    watchers = monitors()
    entries = [entry for watcher in watchers.values() for entry in _entries(watcher, is_alone=len(watchers) == 1)]
    if len(entries) < 2:
        return
    # Where they are too many, those that are well make room.
    kept = sorted(range(len(entries)), key=lambda place: (-entries[place].level, place))[:_MOST]
    picked = selection()
    with st.container(horizontal=True, gap="small"):
        for entry in (entries[place] for place in sorted(kept)):
            is_chosen = entry.server == picked.server and entry.model in ("", picked.model)
            st.button(
                f":{_LIGHTS[entry.level][0]}[●] {entry.text}", key=f"model-{entry.server}-{entry.model}",
                help=words.as_text(entry.explained), on_click=choose, args=(entry.server, entry.model),
                type="primary" if is_chosen else "secondary",
            )  # fmt: skip
    if len(entries) > _MOST:
        left = [entries[place] for place in range(len(entries)) if place not in kept]
        how = "all well, " if all(entry.level is Level.OK for entry in left) else ""
        st.caption(f"{len(left)} more, {how}are in the lists at the left.")


def _entries(watcher: Monitor, *, is_alone: bool) -> Iterator[_Entry]:
    server = watcher.settings.url
    name = words.as_text(server)
    away = watcher.seconds_away
    if not is_alone and away is not None:
        # One whose /metrics alone are away may serve its clients well.
        level, what = (Level.WARNING, "metrics") if watcher.only_metrics_away else (Level.CRITICAL, "answer")
        yield _Entry(server=server, level=level, text=f"{name}: no {what} for {words.seconds(away)}",
                     explained=watcher.error)  # fmt: skip
        return
    models = watcher.models()
    if not is_alone and not models:
        yield _Entry(server=server, level=Level.WARNING, text=f"{name}: no model",
                     explained="The server runs, but serves no model of Quire.")  # fmt: skip
    for model in models:
        evidence, health = watcher.judge(model)
        text = f"{words.as_text(model)}: {_LIGHTS[health.level][1]}, {evidence.running:.0f} running"
        yield _Entry(server=server, model=model, level=health.level, explained=health.headline,
                     text=text if is_alone else f"{name} {text}")  # fmt: skip
