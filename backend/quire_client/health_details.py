"""What `GET /health/details` of `quire serve` answers: what it knows of its server and its host, and the server cannot
say.

Only a client on the same machine gets this answer. Fields that are missing in it get their defaults, and unknown ones
are ignored, as in a snapshot; an answer of another form is rejected as a whole.
"""

import time

import msgspec

_DEATH_S = 600.0
"""An older death explains nothing of now."""
_STARTS_AGAIN = "; the server is being started again"
_DRAINS = "the server is draining"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why requests are or were not served, or not by all engines. Times are seconds since the epoch."""

    problem: str
    since: float
    until: float | None = None
    """None: it goes on."""


class Host(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine, over some seconds. None: unknown."""

    cpus: float | None = None
    cpus_of_others: float | None = None
    """CPUs that processes other than the server's have used; known while tasks wait for CPUs."""
    busiest: str | None = None
    """Name and id of the one among them that used most."""
    cpu_pressure: float | None = None
    """Share of the time in which some task waited for a CPU."""
    memory_pressure: float | None = None


class HealthDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    problems: tuple[str, ...] = ()
    """Why requests are not served now."""
    history: tuple[Problem, ...]
    """Problems of now and before, the latest last. No other program's answer has them."""
    host: Host = Host()
    metrics: str = ""
    """HOST:PORT of the /metrics that it is about."""

    @property
    def is_draining(self) -> bool:
        """Whether the server ends because of a request to."""
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
            one.problem for one in reversed(self.history)
            if one.since >= least and one.problem.startswith(prefix) and one.problem.endswith(suffix)
        )  # fmt: skip
        return next(found, "").partition(";")[0]
