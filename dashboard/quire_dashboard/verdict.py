"""The verdict on one model: what the overview says first, from what the watcher has seen."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from quire_dashboard.evidence import gather
from quire_dashboard.health import Evidence, Health, assess
from quire_dashboard.snapshot_answer import Snapshot

if TYPE_CHECKING:
    from quire_dashboard.monitor import Monitor


def judge(
    watcher: "Monitor", model: str, snapshot: Snapshot | None, standing: Collection[str] = (), *, slo_class: str = ""
) -> tuple[Evidence, Health]:
    """Judge one model.

    Args:
        watcher: of its server.
        model: which one; empty: there is none, or none was seen yet.
        snapshot: the model's own, when it could be had.
        standing: the causes that were found the last time.
        slo_class: judge only this class; empty: all.
    """
    labels = {"model": model} if model else {}
    evidence = gather(
        watcher.view(), labels, snapshot, server_error=watcher.error, only_metrics_away=watcher.only_metrics_away,
        slo_class=slo_class, report=watcher.report,
    )  # fmt: skip
    return evidence, assess(evidence, standing)
