"""What is known of one model: from the own history, a snapshot and what `quire serve` reports to the evidence that
`health.assess` judges."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import msgspec
from quire_client import Snapshot
from quire_client.health_details import HealthDetails, Host
from quire_client.symptoms import SYMPTOMS
from quire_load.scrape import ScrapeError, fetch

from quire_dashboard.history import View
from quire_dashboard.queries import Gauge, Quantile, Rate, latest
from quire_dashboard.settings import Settings, is_loopback

WINDOW_S = 60.0
RECENT_S = 30.0
"""What has not happened for so long is over, though the figures of the last minute still show it."""
NOW_S = 6.0
"""The same of what happens often, and of what happens once: three readings."""
OFTEN = 30
"""Events in a minute, of which one expects three within `NOW_S`: with none, they are over."""
UNTIL_OVER = 1.5
"""What happened again and again is over once it has stayed away for so many times its longest gap."""
SUSTAINED_S = 10.0
"""A queue is one that lasts: a request that waits for a single step is none. Likewise a rank that is slow."""
FEW_STEPS = 10.0
"""In that time; of fewer, the mean says little."""
FEW_EVENTS = 3
"""The gaps between fewer say little."""
MISSES = Rate(name="quire_slo_requests_total", labels=(("verdict", "miss"),))
_PREEMPTIONS = Rate(name="quire_preemptions_total")
_REJECTED = Rate(name="quire_requests_total", labels=(("outcome", "rejected"),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What was counted in a window of time. None or empty: unknown."""

    seconds: float = WINDOW_S
    """Its length; less while the history is shorter."""
    preemptions: float = 0.0
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Share of good requests by SLO class, of those that were judged."""
    missed: Mapping[str, float] = field(default_factory=dict)
    """Requests that were not good, by SLO class; at least as many as are late now."""
    misses: Mapping[str, float] = field(default_factory=dict)
    """The same by cause."""
    ended: float = 0.0
    """Requests that ended in any way."""
    invalid: float = 0.0
    """Requests among them that were rejected as invalid."""
    ttft_p95: float | None = None
    queue_p95: float | None = None
    prefill_p95: float | None = None
    mean_prompt_tokens: float | None = None

    @property
    def within(self) -> str:
        """The window in words."""
        return "the last minute" if self.seconds >= WINDOW_S - 1 else f"the last {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence(Window):
    """Evidence on one model; what is counted, in the last minute. None or empty: unknown."""

    recent: Window | None = None
    """The same until misses and preemptions are over, or since the last restart. What the minute has and this has not
    is over. None: nothing is known of it."""
    recent_invalid: Window | None = None
    """The same until invalid requests are over."""
    server_error: str = ""
    """Why /metrics could not be read; empty if it could."""
    only_metrics_away: bool = False
    """Whether the server answers all the same."""
    has_model: bool = True
    engine_up: bool | None = None
    """False when all of the model's engines are down."""
    is_sleeping: bool = False
    """Whether an operator has put it to sleep."""
    one_down: bool = False
    """Whether any of them is."""
    engines_down: tuple[str, ...] = ()
    """Which, if there are several."""
    engines_restarted: tuple[str, ...] = ()
    """Likewise, of those that were started again in the last `NOW_S`."""
    engine_death: str = ""
    """What ended an engine the last time, as `quire serve` has seen it."""
    server_death: str = ""
    """What ended the server the last time."""
    problems: tuple[str, ...] = ()
    """Why requests are not served now, as `quire serve` sees it."""
    host: Host = field(default_factory=Host)
    server_restarts: Sequence[float] = ()
    """Starts of the server itself, in the window of a crash loop: how many seconds ago, the latest first."""
    restarts: Sequence[float] = ()
    """Likewise of the engine."""
    running: float = 0.0
    waiting: float = 0.0
    """For capacity, in the mean of some seconds."""
    waiting_for_grammar: float = 0.0
    """Likewise."""
    held: float = 0.0
    """Requests that wait for an engine."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    has_slo: bool | None = None
    """Whether any class has a target."""
    kv_usage: float | None = None
    kv_usage_peak: float | None = None
    """The highest in the window."""
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Share of good requests that is promised, by SLO class."""
    workers_down: tuple[str, ...] = ()
    rank_seconds: Mapping[str, float] = field(default_factory=dict)
    """What a step takes of each rank, without waits for others, in the mean of some seconds."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Median by phase."""

    @property
    def lately(self) -> Window:
        """What still goes on."""
        return self.recent or self


def ask_serve(health: str, metrics: str) -> HealthDetails | None:
    """The report of `quire serve`; None if there is none.

    Args:
        health: HOST:PORT of the health address. Empty: the usual port of this machine, if the server is here, too.
        metrics: HOST:PORT; what answers at the usual port must be about this one.
    """
    host, _, port = metrics.rpartition(":")
    if not health and not is_loopback(host):  # others get no report
        return None
    try:
        text = fetch(health or Settings.default("health"), "/health/details")
        report = msgspec.json.decode(text, type=HealthDetails)
    except (ScrapeError, ValueError, RecursionError):
        return None
    return report if health or report.metrics.rpartition(":")[2] == port else None


def models_in(view: View) -> list[str]:
    """The models that have series in the last reading."""
    columns = view.columns("quire_engine_up", {}) if view.rows else ()
    return sorted({own.get("model", "") for own, column in columns if view.at(column, len(view.rows) - 1) >= 0})


def gather(
    view: View, labels: Mapping[str, str], snapshot: Snapshot | None, *, server_error: str = "",
    only_metrics_away: bool = False, slo_class: str = "", report: HealthDetails | None = None,
) -> Evidence:  # fmt: skip
    """Collect the evidence on one model.

    Args:
        view: readings of /metrics.
        labels: of the model's series.
        snapshot: the model's own, when it could be had.
        server_error: why the last reading failed.
        only_metrics_away: whether the server answered all the same.
        slo_class: judge only this class; empty: all.
        report: that of `quire serve`, when it could be had.
    """

    def now(query: Gauge) -> float | None:
        return latest(query, view, labels).get("")

    def over(query: Gauge, seconds: float) -> list[float]:
        """Its values in the last seconds."""
        return [value for row in _rows(view, seconds) for value in query.values(view, labels, row, row).values()]

    objectives = latest(Gauge(name="quire_slo_objective_ratio", by="slo", how="max"), view, labels)
    usage = Gauge(name="quire_kv_cache_usage_ratio", how="max")

    def waiting(reason: str) -> float:
        """In the mean of some seconds."""
        found = over(Gauge(name="quire_requests_waiting", labels=(("reason", reason),)), SUSTAINED_S)
        return sum(found) / len(found) if found else 0.0

    up, all_up = (now(Gauge(name="quire_engine_up", how=how)) for how in ("max", "min"))
    awake = Gauge(name="quire_engine_sleep_state", labels=(("sleep_state", "awake"),), how="max")
    workers = latest(Gauge(name="quire_worker_up", by="rank", how="min"), view, labels)
    engine = snapshot.engine if snapshot is not None else None
    minute = _window(view, labels, WINDOW_S, slo_class)
    server_restarts, restarts = _server_restarts(view, labels), _engine_restarts(view, labels)
    # What a death cost is over with it.
    since_restart = max(NOW_S, min((*server_restarts[:1], *restarts[:1]), default=RECENT_S))
    goes_on_s = _until_over(view, labels, MISSES, _PREEMPTIONS)
    engines = latest(Gauge(name="quire_engine_up", by="engine", how="min"), view, labels)
    restarted = _grown(Rate(name="quire_engine_restarts_total", by="engine"), view, labels, NOW_S)
    model, report = labels.get("model", ""), report or HealthDetails(history=())
    return Evidence(
        **{field.name: getattr(minute, field.name) for field in fields(minute)},
        recent=_window(view, labels, min(since_restart, goes_on_s), slo_class),
        recent_invalid=_window(view, labels, _until_over(view, labels, _REJECTED), slo_class),
        server_error=server_error,
        only_metrics_away=only_metrics_away,
        has_model=up is not None,
        engine_up=None if up is None else up >= 1,
        is_sleeping=up is not None and up >= 1 and now(awake) == 0,
        one_down=all_up is not None and all_up < 1,
        engines_down=_of_several(engines, {name for name, is_up in engines.items() if is_up < 1}),
        engines_restarted=_of_several(engines, {name for name, number in restarted.items() if number >= 1}),
        engine_death=report.engine_death(model),
        server_death=report.server_death(),
        problems=report.problems_of(model),
        host=report.host,
        server_restarts=server_restarts,
        restarts=restarts,
        running=now(Gauge(name="quire_requests_running")) or 0.0,
        waiting=waiting("queue"),
        waiting_for_grammar=waiting("grammar"),
        held=now(Gauge(name="quire_requests_waiting", labels=(("reason", "held"),))) or 0.0,
        max_num_seqs=engine.max_num_seqs or None if engine else None,
        max_num_batched_tokens=engine.max_num_batched_tokens or None if engine else None,
        has_slo=None if not objectives else bool(slo_targets(view, labels)),
        objectives=objectives,
        kv_usage=now(usage),
        kv_usage_peak=max(over(usage, WINDOW_S), default=None),
        # While the engine is down, its ranks are down, too.
        workers_down=tuple(sorted(rank for rank, value in workers.items() if value < 1)) if all_up else (),
        rank_seconds=_rank_seconds(view, labels),
        step_seconds=latest(Quantile(name="quire_step_seconds", q=0.5, by="phase"), view, labels),
    )  # fmt: skip


def _of_several(engines: Mapping[str, float], picked: set[str]) -> tuple[str, ...]:
    return tuple(sorted(picked)) if len(engines) > 1 else ()


def _window(view: View, labels: Mapping[str, str], window_s: float, slo_class: str) -> Window:
    """What was counted in the last `window_s` seconds."""

    def grown(name: str, by: str = "", own: tuple[tuple[str, str], ...] = ()) -> dict[str, float]:
        return _grown(Rate(name=name, by=by, labels=own), view, labels, window_s)

    def p95(name: str, own: tuple[tuple[str, str], ...] = ()) -> float | None:
        return latest(Quantile(name=name, q=0.95, labels=own), view, labels, window_s).get("")

    picked = (("slo", slo_class),) if slo_class else ()
    good = grown("quire_slo_requests_total", "slo", (*picked, ("verdict", "good")))
    missed = grown("quire_slo_requests_total", "slo", (*picked, ("verdict", "miss")))
    # One that is late for longer than the window was counted before it. A late token may still be made up for.
    for target in ("ttft", "e2e"):
        overdue = Gauge(name="quire_requests_overdue", by="slo", labels=(*picked, ("target", target)))
        for slo, number in latest(overdue, view, labels).items():
            missed[slo] = max(missed.get(slo, 0.0), number)
    good = dict.fromkeys(missed, 0.0) | good
    causes = grown("quire_slo_requests_total", "cause", (*picked, ("verdict", "miss")))
    outcomes = grown("quire_requests_total", "outcome")
    # Those that were rejected for want of room are judged, and others are not.
    for_capacity = grown("quire_slo_requests_total", "", (("cause", "rejected"),)).get("", 0.0)
    prompts = grown("quire_request_prompt_tokens_count").get("", 0.0)
    prompt_tokens = grown("quire_request_prompt_tokens_sum").get("", 0.0)
    seconds = min(window_s, view.times[-1] - view.times[0]) if view.times else 0.0
    return Window(
        seconds=seconds,
        preemptions=grown("quire_preemptions_total").get("", 0.0),
        goodput={slo: count / total for slo, count in good.items() if (total := count + missed.get(slo, 0.0)) > 0}
        | (_said_goodput(view, {**labels, **dict(picked)}) if seconds < window_s == WINDOW_S else {}),
        missed=missed,
        misses={cause: count for cause, count in causes.items() if count > 0},
        ended=sum(outcomes.values()),
        invalid=max(0.0, outcomes.get("rejected", 0.0) - for_capacity),
        ttft_p95=p95("quire_time_to_first_token_seconds", picked),
        queue_p95=p95("quire_request_queue_time_seconds"),
        prefill_p95=p95("quire_request_prefill_time_seconds"),
        mean_prompt_tokens=prompt_tokens / prompts if prompts else None,
    )  # fmt: skip


def _said_goodput(view: View, labels: Mapping[str, str]) -> dict[str, float]:
    """What the server says of the last minute, for a history that is shorter. 1 may mean that none has ended."""
    said = latest(Gauge(name="quire_goodput_ratio", labels=(("window", "1m"),), by="slo", how="min"), view, labels)
    return {slo: ratio for slo, ratio in said.items() if ratio < 1}


def _rank_seconds(view: View, labels: Mapping[str, str]) -> dict[str, float]:
    """What a step took of each rank on average; of none, while no steps are computed."""
    busy = _grown(Rate(name="quire_worker_busy_seconds_total", by="rank"), view, labels, SUSTAINED_S)
    counted = Rate(name="quire_step_seconds_count", labels=(("phase", "execute"),))
    steps = _grown(counted, view, labels, SUSTAINED_S).get("", 0.0)
    return {rank: seconds / steps for rank, seconds in busy.items()} if steps >= FEW_STEPS else {}


def _until_over(view: View, labels: Mapping[str, str], *counted: Rate) -> float:
    """For how many seconds events have to stay away before they are over.

    ::

        events of a minute      ||  |       |  |                the longest gap, `UNTIL_OVER` times
        now                                          ▲
    """
    seen: list[float] = []
    number = 0.0
    for before, row in pairwise(_rows(view, WINDOW_S)):
        events = sum(sum(query.increases(view, labels, before, row).values()) for query in counted)
        if events > 0:
            seen.append(view.times[row])
            number += events
    if number < FEW_EVENTS:
        return RECENT_S
    if number >= OFTEN:  # a gap may then be one between two incidents
        return NOW_S
    longest = max((after - before for before, after in pairwise(seen)), default=0.0)
    return min(max(NOW_S, UNTIL_OVER * longest), RECENT_S)


def _grown(query: Rate, view: View, labels: Mapping[str, str], window_s: float) -> dict[str, float]:
    """How much a counter grew in the last `window_s` seconds, per line."""
    if not view.times:
        return {}
    last = len(view.times) - 1
    return query.increases(view, labels, view.row_at(view.times[last] - window_s), last)


def _rows(view: View, window_s: float) -> range:
    """Those of the last `window_s` seconds."""
    first = bisect.bisect_left(view.times, view.times[-1] - window_s) if view.times else 0
    return range(first, len(view.times))


def _server_restarts(view: View, labels: Mapping[str, str]) -> tuple[float, ...]:
    """How many seconds ago each start of the server was seen, the latest first."""
    query = Gauge(name="quire_server_start_time_seconds", how="max")
    starts = [
        (view.times[row], start)
        for row in _rows(view, SYMPTOMS["server_restarts"].limits["window"].begins)
        for start in query.values(view, labels, row, row).values()
    ]
    seen = [time for (_, before), (time, start) in pairwise(starts) if start != before]
    return tuple(view.times[-1] - time for time in reversed(seen))


def _engine_restarts(view: View, labels: Mapping[str, str]) -> tuple[float, ...]:
    """Likewise."""
    query = Rate(name="quire_engine_restarts_total")
    pairs = pairwise(_rows(view, SYMPTOMS["engine_restarts"].limits["window"].begins))
    seen = [row for before, row in pairs if any(query.increases(view, labels, before, row).values())]
    return tuple(view.times[-1] - view.times[row] for row in reversed(seen))


def slo_targets(view: View, labels: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The targets of each class that has any, in seconds: `ttft`, `tpot`, `e2e`."""
    found: dict[str, dict[str, float]] = {}
    for own, column in view.columns("quire_slo_target_seconds", labels) if view.rows else ():
        value = view.at(column, len(view.rows) - 1)
        if not math.isnan(value):
            found.setdefault(own.get("slo", ""), {})[own.get("target", "")] = value
    return found
