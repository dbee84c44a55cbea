"""One watcher per dashboard process, for all its visitors: readings of /metrics, and snapshots, fetched once for all.

A thread reads /metrics every two seconds, even without visitors, so that a new page shows the time before, and notes
incidents. A snapshot is fetched when a model has been loaded and then only while a page that shows one is open, and
all pages share it until it is as old as a refresh. What is computed from them is cached, too: many visitors cost hardly
more than one.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire_client import Client, ClientError, EndedAnswer, Snapshot
from quire_client.health_details import HealthDetails
from quire_client.symptoms import SYMPTOMS
from quire_load.scrape import Key, Scrape, ScrapeError, fetch, parse

from quire_dashboard.ended_requests import EndedLog, EndedSeen
from quire_dashboard.evidence import MISSES, Evidence, ask_serve, gather, models_in
from quire_dashboard.health import Health, assess
from quire_dashboard.history import Point, Ring, View
from quire_dashboard.incidents import Hurt, IncidentLog, hurt_among, incidents_file
from quire_dashboard.prometheus import Prometheus
from quire_dashboard.queries import Gauge, Query, evaluate, latest
from quire_dashboard.settings import Settings

SCRAPE_INTERVAL_S = 2.0
HISTORY_S = 3600.0
SNAPSHOT_AGE_S = 0.9 * SCRAPE_INTERVAL_S
"""A little less than a refresh: a page that looks every two seconds sees a new one each time."""
PROMETHEUS_AGE_S = 2.0
SEED_S = SYMPTOMS["server_restarts"].limits["window"].begins
"""So much of the time before the first reading is taken from Prometheus: health looks back no further."""
_LOADED = Gauge(name="quire_model_load_timestamp_seconds", how="max")


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot, or why there is none."""

    snapshot: Snapshot | None = None
    error: str = ""
    at: float = 0.0
    """`time.monotonic()` of its arrival."""


@dataclass(frozen=True, slots=True)
class StepState:
    """The part of each snapshot that is kept, as /metrics has no series of it."""

    time: float
    number: int
    """Number of the last step then. If it is that of the snapshot before, nothing was computed in between."""
    num_prefill_tokens: int
    num_decode_tokens: int


class Monitor:
    """Watches one server.

    Args:
        settings: where it is.
        interval_s: between two readings of /metrics.
    """

    def __init__(self, settings: Settings, interval_s: float = SCRAPE_INTERVAL_S) -> None:
        self.settings = settings
        self.client = Client(settings.url, settings.introspection_token)
        self.ring = Ring(int(HISTORY_S / interval_s))
        self.incidents = IncidentLog(incidents_file(settings.metrics))
        self.report: HealthDetails | None = None
        """That of the `quire serve` that has started the server, if there is one on this machine."""
        self._interval_s = interval_s
        self._prometheus = Prometheus(settings.prometheus) if settings.prometheus else None
        self._at = {"instance": settings.instance} if settings.instance else {}
        self._error = "no reading of /metrics yet"
        self._unreachable = ""
        self._num_answers_without = 0
        """Readings in a row that failed though gRPC answered."""
        self._last_success = 0.0
        """On the clock of `time.monotonic`, as `_since`."""
        self._since = time.monotonic()
        self._has_read = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._model_locks: dict[str, threading.Lock] = {}
        self._seen: dict[str, Seen] = {}
        self._last_snapshots: dict[str, Snapshot] = {}
        self._looked_at: set[tuple[str, float]] = set()
        """Loads of models: (model, when)."""
        self._verdicts: dict[tuple[str, str], tuple[object, Evidence, Health]] = {}
        """By model and SLO class, with the state that they are of."""
        self._verdicts_lock = threading.Lock()
        self._steps: dict[str, deque[StepState]] = {}
        self._ended: dict[str, EndedLog] = {}
        self._asked: dict[object, tuple[float, list[Point]]] = {}
        self._keys: dict[str, Key] = {}
        self._points_lock = threading.Lock()
        self._known: dict[object, dict[tuple[int, int], list[Point]]] = {}
        self._computed: dict[object, tuple[int, list[Point]]] = {}
        self._thread = threading.Thread(target=self._run, name="quire-dashboard-monitor", daemon=True)

    def start(self) -> None:
        """Read in a thread from now on."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the first reading was taken or has failed, or for so long."""
        self._has_read.wait(timeout_s)

    def prepare_to_stop(self) -> None:
        """Take no more readings. `stop` may then have to wait for the present one."""
        self._stopping.set()

    def stop(self) -> None:
        """End the thread and close the channel."""
        self.prepare_to_stop()
        if self._thread.is_alive():
            self._thread.join()
        self.client.close()
        self.incidents.close()

    def _run(self) -> None:
        self._read_metrics()
        self._has_read.set()
        self._look_further()
        self._look_at_new_models()
        while not self._stopping.wait(self._interval_s):
            self.read()
            self._look_at_new_models()

    def _look_at_new_models(self) -> None:
        """Take a snapshot of each model once it is loaded: the verdict uses its limits, and waits for no snapshot."""
        for model in self.models() if not self._error else ():
            loaded = latest(_LOADED, self.view(), {"model": model}).get("", 0.0)
            if (model, loaded) not in self._looked_at:
                self._looked_at.add((model, loaded))
                self.snapshot(model)

    def read(self) -> None:
        """Take one reading, and note what it says of incidents."""
        self._read_metrics()
        self._look_further()

    def _look_further(self) -> None:
        self.report = ask_serve(self.settings.health, self.settings.metrics)
        is_draining = self.report is not None and self.report.is_draining
        away_s = self.seconds_away
        # A single reading may have come too late, on a busy machine.
        if not self._last_success or is_draining or (away_s is not None and away_s < 1.5 * self._interval_s):
            return
        models = self.models() if away_s is None else [""]
        self.incidents.look({model: self.judge(model)[1] for model in models}, self._hurt)

    def _hurt(self, model: str, since: float) -> tuple[int, Sequence[Hurt]]:
        """How many requests have missed or failed from shortly before a moment on, and the first of them."""
        view = self.ring.view()
        # Of a server that is away, what happened is as old as its last answer.
        since = min([since - 2 * self._interval_s, *view.times[view.row_at(since) :][:1]])
        labels = {"model": model} if model else {}
        number = sum(MISSES.increases(view, labels, view.row_at(since), len(view.rows) - 1).values())
        if self._error or (self.report is not None and self.report.problems):  # it would wait for an answer
            return round(number), ()
        models = [model] if model else self.models()
        ended = [request for name in models for request in self.ended(name).requests.values()]
        return round(number), hurt_among(ended, since)

    def judge(self, model: str, *, slo_class: str = "") -> tuple[Evidence, Health]:
        """The verdict on one model, without a request to its server. It is computed once per reading, for all visitors,
        and each begins where the last one ended.

        Args:
            model: which one; empty: there is none, or none was seen yet.
            slo_class: judge only this class; empty: all.
        """
        view, snapshot = self.view(), self.last_snapshot(model)
        state = (view.last, self.error, self.only_metrics_away, snapshot is None, self.report)
        with self._verdicts_lock:
            last = self._verdicts.get((model, slo_class))
            if last is None or last[0] != state:
                evidence = gather(
                    view, {"model": model} if model else {}, snapshot, server_error=self.error,
                    only_metrics_away=self.only_metrics_away, slo_class=slo_class, report=self.report,
                )  # fmt: skip
                last = (state, evidence, assess(evidence, last[2].standing if last is not None else ()))
                self._verdicts[model, slo_class] = last
            return last[1:]

    def _read_metrics(self) -> None:
        try:
            scrape = parse(fetch(self.settings.metrics), time.time(), self._keys)
        except ScrapeError as error:
            # Whether gRPC answers is found out here, so that no visitor of a server that is gone waits for it.
            self._unreachable = self._why_unreachable()
            self._num_answers_without = 0 if self._unreachable else self._num_answers_without + 1
            self._error = str(error)
            return
        if not self._last_success:
            self._seed(scrape)
        self.ring.append(scrape)
        self._last_success = time.monotonic()
        self._error = self._unreachable = ""
        self._num_answers_without = 0

    def _why_unreachable(self) -> str:
        try:
            self.client.check_live()
        except ClientError as error:
            return str(error)
        return ""

    def _seed(self, scrape: Scrape) -> None:
        """Put the readings before the first one into the ring, so that health knows of them."""
        if self._prometheus is None:
            return
        with suppress(ScrapeError):  # the charts say it
            for before in self._prometheus.readings(
                scrape.values, self._at, scrape.time - SEED_S, scrape.time - SCRAPE_INTERVAL_S
            ):
                self.ring.append(before)

    @property
    def error(self) -> str:
        """Why the last reading failed; empty when it did not."""
        return self._error

    @property
    def only_metrics_away(self) -> bool:
        """Whether /metrics cannot be read though the server itself answers. Once does not count: a server that has just
        been started opens one port after the other."""
        return self._num_answers_without > 1

    @property
    def seconds_since_success(self) -> float | None:
        """Age of the last good reading; None when there has been none."""
        return time.monotonic() - self._last_success if self._last_success else None

    @property
    def seconds_away(self) -> float | None:
        """How long the server has not answered, as far as is known; None while it does."""
        return time.monotonic() - (self._last_success or self._since) if self._error else None

    def models(self) -> list[str]:
        """The models that have series in the last reading, else those that ever had."""
        view = self.ring.view()
        return models_in(view) or sorted({own.get("model", "") for own, _ in view.columns("quire_engine_up", {})})

    def points(self, query: Query, by: str, labels: Mapping[str, str], range_s: float) -> list[Point]:
        """Result of a query over the last `range_s` seconds: from Prometheus, if there is one, else from memory.

        Returns:
            The same list until there is something new.

        Raises:
            ScrapeError: Prometheus does not answer.
        """
        what = (query, tuple(sorted(labels.items())), range_s)
        if self._prometheus is None:
            return self._own_points(what, query, labels, range_s)
        with self._lock:
            asked_at, points = self._asked.get(what, (0.0, []))
        if time.monotonic() - asked_at > PROMETHEUS_AGE_S or not asked_at:
            now = time.time()
            points = self._prometheus.range(query, by, {**labels, **self._at}, now - range_s, now)
            with self._lock:
                self._asked[what] = (time.monotonic(), points)
        return points

    def _own_points(self, what: object, query: Query, labels: Mapping[str, str], range_s: float) -> list[Point]:
        view = self.ring.view()
        with self._points_lock:
            last, points = self._computed.get(what, (-1, []))
            if last != view.last:
                points = evaluate(query, view, labels, range_s, self._known.setdefault(what, {}))
                self._computed[what] = (view.last, points)
            return points

    def view(self) -> View:
        """The own readings."""
        return self.ring.view()

    def snapshot(self, model: str, refresh_s: float | None = None) -> Seen:
        """The model's snapshot, about two seconds old at most, or why there is none.

        Args:
            model: which one.
            refresh_s: how often the visitor looks, if that is more often.
        """
        age_s = SNAPSHOT_AGE_S if refresh_s is None else min(SNAPSHOT_AGE_S, 0.9 * refresh_s)
        with self._lock:
            lock = self._model_locks.setdefault(model, threading.Lock())
        with lock:
            seen = self._seen.get(model)
            if seen is not None and time.monotonic() - seen.at < age_s:
                return seen
            try:
                self._check()
                snapshot = self.client.snapshot(model)
                seen = Seen(snapshot, at=time.monotonic())
                self._last_snapshots[model] = snapshot
                self._take_note(model, snapshot)
            except ClientError as error:
                seen = Seen(error=str(error), at=time.monotonic())
            self._seen[model] = seen
            return seen

    def last_snapshot(self, model: str) -> Snapshot | None:
        """The last one that there was, however old; nothing is asked."""
        return self._last_snapshots.get(model)

    def ended(self, model: str) -> EndedSeen:
        """The model's ended requests, about two seconds old at most, and those before its server ended or loaded it
        again. Nothing is fetched without visitors."""
        with self._lock:
            log = self._ended.setdefault(model, EndedLog(lambda cursor: self._ask_for_ended(model, cursor)))
        return log.look(SNAPSHOT_AGE_S)

    def _ask_for_ended(self, model: str, cursor: str) -> EndedAnswer:
        self._check()
        return self.client.ended(model, cursor)

    def _check(self) -> None:
        """Raise what a call to a server that is gone would, without its timeout."""
        if self._unreachable:
            raise ClientError(self._unreachable)

    def forget_snapshot(self, model: str) -> None:
        """Fetch a new snapshot next time, for example after a cancellation."""
        with self._lock:
            lock = self._model_locks.setdefault(model, threading.Lock())
        with lock:
            self._seen.pop(model, None)

    def steps(self, model: str) -> list[StepState]:
        """The steps in the snapshots so far."""
        with self._lock:
            return list(self._steps.get(model, ()))

    def _take_note(self, model: str, snapshot: Snapshot) -> None:
        step = snapshot.engine.last_step
        with self._lock:
            states = self._steps.setdefault(model, deque(maxlen=int(HISTORY_S)))
            # When the step of the first snapshot was computed is not known.
            is_new = bool(states) and states[-1].number != snapshot.engine.step
            states.append(
                StepState(
                    time=time.time(),
                    number=snapshot.engine.step,
                    num_prefill_tokens=step.num_prefill_tokens if is_new else 0,
                    num_decode_tokens=step.num_decode_tokens if is_new else 0,
                )
            )
