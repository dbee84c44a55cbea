"""The verdict on one model: what the overview says first, from what the watcher has seen.

One for all visitors and for the strip: it is computed once per reading, and each begins where the last one ended.
"""

import threading
from typing import Protocol

from quire_client.snapshot import Snapshot

from quire_dashboard.evidence import gather
from quire_dashboard.health import Evidence, Health, assess
from quire_dashboard.history import View
from quire_dashboard.serve_report import ServeReport


class Watcher(Protocol):
    """The part of `Monitor`, which judges by itself for the log of incidents, that is used here."""

    report: ServeReport | None
    verdicts: dict[tuple[str, str], tuple[object, Evidence, Health]]
    verdicts_lock: threading.Lock

    @property
    def error(self) -> str: ...
    @property
    def only_metrics_away(self) -> bool: ...
    def view(self) -> View: ...
    def last_snapshot(self, model: str) -> Snapshot | None: ...


def judge(watcher: Watcher, model: str, *, slo_class: str = "") -> tuple[Evidence, Health]:
    """Judge one model, without asking its server for anything.

    Args:
        watcher: of its server.
        model: which one; empty: there is none, or none was seen yet.
        slo_class: judge only this class; empty: all.
    """
    view, snapshot = watcher.view(), watcher.last_snapshot(model)
    state = (view.last, watcher.error, watcher.only_metrics_away, snapshot is None, watcher.report)
    with watcher.verdicts_lock:
        last = watcher.verdicts.get((model, slo_class))
        if last is None or last[0] != state:
            evidence = gather(
                view, {"model": model} if model else {}, snapshot, server_error=watcher.error,
                only_metrics_away=watcher.only_metrics_away, slo_class=slo_class, report=watcher.report,
            )  # fmt: skip
            last = (state, evidence, assess(evidence, last[2].standing if last is not None else ()))
            watcher.verdicts[model, slo_class] = last
        return last[1:]
