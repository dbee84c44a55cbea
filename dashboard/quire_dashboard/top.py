"""`quire top`: the overview in the terminal, from /metrics.

What it says is what the dashboard's overview says; it only knows the time since it was started. Below are the last
incidents that a dashboard of this user and machine has noted.
"""

import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from quire_client.health_details import HealthDetails
from quire_client.symptoms import SYMPTOMS, Level
from quire_load.scrape import Key, ScrapeError, fetch, parse
from rich.console import Console
from rich.live import Live
from rich.text import Text

from quire_dashboard import figures, words
from quire_dashboard.evidence import WINDOW_S, ask_serve, gather, models_in
from quire_dashboard.health import assess
from quire_dashboard.history import Ring, View
from quire_dashboard.incidents import incidents_file, is_written, read_incidents
from quire_dashboard.queries import Query, latest
from quire_dashboard.settings import Settings

HISTORY_S = 100.0 + SYMPTOMS["server_restarts"].limits["window"].begins
"""Somewhat more than the longest window that the verdict looks back over."""
_STYLES = {Level.OK: "bold green", Level.WARNING: "bold yellow", Level.CRITICAL: "bold red"}
_MOST_CLASSES = 8
_MOST_INCIDENTS = 3


class Top:
    """Readings of one server, and what they say.

    Args:
        metrics: HOST:PORT of its /metrics.
        interval_s: between two readings.
        read: fetches /metrics; raises ScrapeError.
        is_once: whether it ends after what it shows first.
        health: HOST:PORT of the health address of `quire serve`; empty: the usual one.

    Raises:
        ValueError: an address is wrong.
    """

    def __init__(
        self, metrics: str, interval_s: float, read: Callable[[str], str] = fetch, *, is_once: bool = False,
        health: str = "",
    ) -> None:  # fmt: skip
        Settings(metrics=metrics, health=health)  # checks them
        self._metrics, self._health = metrics, health
        self.is_once, self.interval_s = is_once, interval_s
        self._report: HealthDetails | None = None
        self._read = read
        self._ring = Ring(math.ceil(HISTORY_S / interval_s))
        self._keys: dict[str, Key] = {}
        self._last_success: float | None = None
        self._standing: dict[str, Sequence[str]] = {}
        self.error = ""
        """Why the last reading failed; empty when it did not."""

    def read(self, now: float) -> None:
        """Take one reading, at a time in seconds since the epoch."""
        self._report = ask_serve(self._health, self._metrics)
        try:
            self._ring.append(parse(self._read(self._metrics), now, self._keys))
        except ScrapeError as error:
            self.error = str(error)
            return
        self.error, self._last_success = "", now

    def render(self, now: float) -> Text:
        """What is known. Nothing that the server says controls the terminal."""
        text = self._compose(now)
        self._add_incidents(text)
        text.plain = "\n".join(words.printable(line, len(line)) for line in text.plain.split("\n"))
        return text

    def _compose(self, now: float) -> Text:
        moment = datetime.fromtimestamp(now).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        times = self._ring.view().times
        seconds = times[-1] - times[0] if times else WINDOW_S
        window = f"   figures of the last {seconds:.0f} s" if seconds < WINDOW_S else ""
        text = Text(f"quire top   {self._metrics}   {moment}{window}\n", style="dim")
        if self.error:
            evidence = gather(self._ring.view(), {}, None, server_error=self.error, report=self._report)
            health = assess(evidence)
            text.append(f"\n{health.headline} {self.error}\n", style=_STYLES[health.level])
            for cause in filter(None, (evidence.server_death, *evidence.problems)):
                text.append(f"  - {cause}.\n")
            age = None if self._last_success is None else now - self._last_success
            what = ["trying again"] * (not self.is_once)
            what += [] if age is None else [f"what follows is {words.seconds(age)} old"]
            text.append(f"{'; '.join(what).capitalize()}.\n" if what else "")
        if self._last_success is None:
            return text
        view = self._ring.view()
        models = models_in(view)
        if not models:
            text.append("\nThe server runs, but serves no model of Quire.\n", style=_STYLES[Level.WARNING])
        for model in models:
            self._add_model(text, view, model)
        return text

    def _add_model(self, text: Text, view: View, model: str) -> None:
        labels = {"model": model}
        evidence = gather(view, labels, None, report=self._report)
        health = assess(evidence, self._standing.get(model, ()))
        self._standing[model] = health.standing

        def now(query: Query) -> float | None:
            return latest(query, view, labels).get("")

        text.append(f"\n{words.printable(model, 60)}  ", style="bold")
        text.append(f"{health.headline}\n", style=_STYLES[health.level])
        for finding in health.findings:
            text.append(f"  - {finding.title}. {finding.detail}\n")
        good = now(figures.goodput(()))
        if good is None:  # what the server says, of the worst class
            good = min(evidence.goodput.values(), default=None)
        queue = ("queue p95", words.seconds_or_dash(now(figures.QUEUE)))
        prefill = ("prefill p95", words.seconds_or_dash(now(figures.PREFILL)))
        latencies: tuple[tuple[str, str], ...] = (
            ("TTFT p95", words.seconds_or_dash(now(figures.TTFT))), queue, prefill,
            ("between tokens p95", words.seconds_or_dash(now(figures.BETWEEN))),
        )  # fmt: skip
        tokens = ("tokens", words.per_second(now(figures.TOKENS)))
        if figures.gives_vectors(now):
            latencies = ("e2e p95", words.seconds_or_dash(now(figures.E2E))), queue, prefill
            tokens = ("prompt tokens", words.per_second(now(figures.PROMPT_TOKENS)))
        rows = (
            (("goodput", "no SLO" if evidence.has_slo is False else words.percent(good)),
             ("requests", words.per_second(now(figures.ENDED))), ("failed", words.percent(now(figures.FAILED))),
             tokens),
            latencies,
            (("running", words.count(now(figures.RUNNING))), ("waiting", words.count(now(figures.WAITING))),
             ("KV cache", words.percent(now(figures.USAGE))), ("preemptions/min", words.count(evidence.preemptions)),
             ("restarts", words.count(now(figures.RESTARTS)))),
        )  # fmt: skip
        for row in rows:
            text.append("  " + "   ".join(f"{name} {value}" for name, value in row) + "\n")
        if adapters := latest(figures.ADAPTERS, view, labels):
            loads = latest(figures.ADAPTER_LOADS, view, labels)
            memory = f"{words.count(adapters.get('ready'))} ready, {words.count(adapters.get('in_use'))} in use"
            rates = f"{words.per_second(loads.get('loaded'))} loaded, {words.per_second(loads.get('failed'))} failed"
            text.append(f"  adapters: {memory}, {rates}\n")
        classes = sorted(evidence.goodput.items())
        if len(classes) > 1 and evidence.has_slo is not False:
            shown = [f"{name} {words.percent(value)}" for name, value in classes[:_MOST_CLASSES]]
            more = f", {len(classes) - _MOST_CLASSES} more" if len(classes) > _MOST_CLASSES else ""
            text.append(f"  goodput by class: {', '.join(shown)}{more}\n")

    def _add_incidents(self, text: Text) -> None:
        path = incidents_file(self._metrics)
        rows = list(read_incidents(path).values())[-_MOST_INCIDENTS:]
        end = "goes on" if is_written(path) else "no dashboard has noted its end"
        if rows:
            text.append("\nlast incidents\n", style="bold")
        for row in reversed(rows):
            moments = [row.began] if row.over is None else [row.began, row.over]
            when = " to ".join(f"{datetime.fromtimestamp(one):%m-%d %H:%M:%S}" for one in moments)
            whose = f"{row.model}: " if row.model else ""
            state = f" ({end})" if row.over is None else ""
            text.append(f"  {when}{state}  {whose}{row.title}; {words.count(row.num_hurt)} requests hurt\n")


def show(top: Top, sleep: Callable[[float], None] = time.sleep) -> int:
    """Show it until Ctrl-C, or once.

    Returns:
        1 if it ends after what it shows first and the server does not answer, else 0.
    """
    try:
        return _once(top, sleep) if top.is_once else _follow(top, sleep)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _once(top: Top, sleep: Callable[[float], None]) -> int:
    """Rates need two readings."""
    top.read(time.time())
    if not top.error:
        sleep(top.interval_s)
        top.read(time.time())
    print(top.render(time.time()).plain, end="")
    return 1 if top.error else 0


def _follow(top: Top, sleep: Callable[[float], None]) -> int:
    console = Console()
    top.read(time.time())
    if not console.is_terminal:
        while True:
            print(top.render(time.time()).plain, flush=True)
            sleep(top.interval_s)
            top.read(time.time())
    with Live(top.render(time.time()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            sleep(top.interval_s)
            top.read(time.time())
            live.update(top.render(time.time()), refresh=True)
