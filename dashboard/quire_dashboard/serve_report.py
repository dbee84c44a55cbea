"""ServeReport: what `quire serve` knows of its server and its host, and the server cannot say, from `/health/details`.

Only a `quire serve` on the same machine answers in full; without one the dashboard does without.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from quire_load.scrape import ScrapeError, fetch

from quire_dashboard.settings import Settings, is_loopback

_DEATH_S = 600.0
"""An older death explains nothing of now."""
_STARTS_AGAIN = "; the server is being started again"
_DRAINS = "the server is draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine, over some seconds."""

    cpus: float = 1.0
    cpus_of_others: float = 0.0
    """CPUs that processes other than the server's have used."""
    busiest: str = ""
    """Name and id of the one among them that used most."""
    cpu_pressure: float = 0.0
    """Share of the time in which some task waited for a CPU."""
    memory_pressure: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """One answer."""

    metrics: str = ""
    """HOST:PORT of the /metrics that it is about."""
    problems: Sequence[str] = ()
    """Why requests are not served now."""
    history: Sequence[Mapping[str, Any]] = ()
    """Problems of now and before: `problem`, `since`, `until`; the latest last."""
    host: Host = field(default_factory=Host)

    @classmethod
    def from_json(cls, text: str) -> "ServeReport":
        """Read an answer.

        Raises:
            ValueError: it is none.
        """
        said = json.loads(text)
        if not isinstance(said, dict) or not isinstance(said.get("history"), list):
            raise ValueError("it is no answer of quire serve")
        host = said.get("host")
        figures: Mapping[str, Any] = host if isinstance(host, dict) else {}
        known = {
            item.name: figures[item.name]
            for item in fields(Host)
            if isinstance(figures.get(item.name), str if item.name == "busiest" else int | float)
        }
        history = [
            one for one in said["history"]
            if isinstance(one, dict)
            and isinstance(one.get("problem"), str) and isinstance(one.get("since"), int | float)
        ]  # fmt: skip
        problems = [str(one) for one in said.get("problems") or ()]
        return cls(metrics=str(said.get("metrics")), problems=problems, history=history, host=Host(**known))

    @property
    def is_draining(self) -> bool:
        """Whether the server ends because it was asked to."""
        return any(_DRAINS in problem for problem in self.problems)

    def problems_of(self, model: str) -> tuple[str, ...]:
        """Those of the model, and those of the whole server."""
        return tuple(problem for problem in self.problems if f"model {model!r}" in problem or "model '" not in problem)

    def server_death(self) -> str:
        """What ended the server the last time; empty if nothing did lately."""
        return self._latest("", _STARTS_AGAIN)

    def engine_death(self, model: str) -> str:
        """What ended an engine of a model the last time, and of several engines which; empty if nothing did lately."""
        return self._latest(f"model {model!r} version ", "").partition(": ")[2]

    def _latest(self, prefix: str, suffix: str) -> str:
        least = time.time() - _DEATH_S
        found = (
            str(one["problem"]) for one in reversed(self.history)
            if one["since"] >= least and one["problem"].startswith(prefix) and one["problem"].endswith(suffix)
        )  # fmt: skip
        return next(found, "").partition(";")[0]


def ask(health: str, metrics: str) -> ServeReport | None:
    """The report; None if there is none to be had.

    Args:
        health: HOST:PORT of the health address. Empty: the usual port of this machine, if the server is here, too.
        metrics: HOST:PORT; what answers at the usual port must be about this one.
    """
    host, _, port = metrics.rpartition(":")
    if not health and not is_loopback(host):  # others get no report
        return None
    try:
        report = ServeReport.from_json(fetch(health or Settings.default("health"), "/health/details"))
    except (ScrapeError, ValueError):
        return None
    return report if health or report.metrics.rpartition(":")[2] == port else None
