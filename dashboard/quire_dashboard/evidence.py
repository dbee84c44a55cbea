"""From the own history and a snapshot to the evidence that `health.assess` judges."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from quire_dashboard.health import Evidence
from quire_dashboard.history import View
from quire_dashboard.queries import Gauge, Quantile, Rate, latest
from quire_dashboard.snapshot_answer import Snapshot

__all__ = ["gather"]

WINDOW_S = 60.0
RESTART_WINDOW_S = 300.0
"""Restarts are rare: within a minute there would hardly ever be several."""
SERVER_RESTART_WINDOW_S = 600.0
SUSTAINED_S = 10.0
"""A queue is one that lasts: a request that waits for a single step is none."""


def gather(
    view: View, labels: Mapping[str, str], snapshot: Snapshot | None, *, server_error: str = "", slo_class: str = ""
) -> Evidence:
    """Collect the evidence on one model.

    Args:
        view: readings of /metrics.
        labels: of the model's series.
        snapshot: the model's own, when it could be had.
        server_error: why the last reading failed.
        slo_class: judge only this class; empty: all.
    """

    def now(query: Gauge) -> float | None:
        return latest(query, view, labels).get("")

    def grown(
        name: str, by: str = "", own: tuple[tuple[str, str], ...] = (), window_s: float = WINDOW_S
    ) -> dict[str, float]:
        if not view.times:
            return {}
        last = len(view.times) - 1
        query = Rate(name=name, by=by, labels=own)
        return query.increases(view, labels, view.row_at(view.times[last] - window_s), last)

    def over(query: Gauge, seconds: float) -> list[float]:
        """Its values in the last seconds."""
        rows = [row for row, time in enumerate(view.times) if time >= view.times[-1] - seconds]
        return [value for row in rows for value in query.values(view, labels, row, row).values()]

    def p95(name: str) -> float | None:
        return latest(Quantile(name=name, q=0.95), view, labels).get("")

    picked = (("slo", slo_class),) if slo_class else ()
    good = grown("quire_slo_requests_total", "slo", (*picked, ("verdict", "good")))
    missed = grown("quire_slo_requests_total", "slo", (*picked, ("verdict", "miss")))
    causes = grown("quire_slo_requests_total", "cause", (*picked, ("verdict", "miss")))
    prompts = grown("quire_request_prompt_tokens_count").get("", 0.0)
    prompt_tokens = grown("quire_request_prompt_tokens_sum").get("", 0.0)
    usage = Gauge(name="quire_kv_cache_usage_ratio", how="max")
    waiting = over(Gauge(name="quire_requests_waiting", labels=(("reason", "capacity"),)), SUSTAINED_S)
    starts = Gauge(name="quire_server_start_time_seconds", how="max")
    up, all_up = (now(Gauge(name="quire_engine_up", how=how)) for how in ("max", "min"))
    workers = latest(Gauge(name="quire_worker_up", by="rank", how="min"), view, labels)
    engine = snapshot.engine if snapshot is not None else None
    return Evidence(
        server_error=server_error,
        has_model=up is not None,
        engine_up=None if up is None else up >= 1,
        one_down=all_up is not None and all_up < 1,
        server_restarts=_changes(over(starts, SERVER_RESTART_WINDOW_S)),
        recent_server_restarts=_changes(over(starts, WINDOW_S)),
        recent_restarts=grown("quire_engine_restarts_total").get("", 0.0),
        restarts=grown("quire_engine_restarts_total", window_s=RESTART_WINDOW_S).get("", 0.0),
        running=now(Gauge(name="quire_requests_running")) or 0.0,
        waiting=sum(waiting) / len(waiting) if waiting else 0.0,
        waiting_for_grammar=now(Gauge(name="quire_requests_waiting", labels=(("reason", "grammar"),))) or 0.0,
        max_num_seqs=engine.max_num_seqs or None if engine else None,
        max_num_batched_tokens=engine.max_num_batched_tokens or None if engine else None,
        has_slo=snapshot.has_slo() if snapshot is not None else None,
        kv_usage=now(usage),
        kv_usage_peak=max(over(usage, WINDOW_S), default=None),
        preemptions=grown("quire_preemptions_total").get("", 0.0),
        goodput={
            slo: count / total
            for slo, count in good.items()
            if (total := count + missed.get(slo, 0.0)) > 0
        },
        misses={cause: count for cause, count in causes.items() if count > 0},
        ttft_p95=p95("quire_time_to_first_token_seconds"),
        queue_p95=p95("quire_request_queue_time_seconds"),
        prefill_p95=p95("quire_request_prefill_time_seconds"),
        mean_prompt_tokens=prompt_tokens / prompts if prompts else None,
        # While the engine is down, its ranks are down, too.
        workers_down=tuple(sorted(rank for rank, value in workers.items() if value < 1)) if all_up else (),
        rank_seconds={
            str(rank.rank): rank.step_seconds_p50 for rank in engine.ranks if rank.step_seconds_p50 is not None
        } if engine else {},
        step_seconds=latest(Quantile(name="quire_step_seconds", q=0.5, by="phase"), view, labels),
    )  # fmt: skip


def _changes(values: Sequence[float]) -> int:
    return sum(before != after for before, after in pairwise(values))
