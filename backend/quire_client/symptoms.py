"""The symptoms of a server that is unwell, each with its words, its limits and its alert.

The dashboard and `quire top` find them, Prometheus' alerts and Grafana's boards have their limits, incidents their
families, and `docs/runbooks.md` has a row for each: all of it is made from this table or tested against it.

A limit has one value wherever it is used. The time that it is compared over may differ: the dashboard looks at the last
seconds, an alert at minutes or hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

OBJECTIVE = 0.99
"""Share of good requests that is promised where a class does not say."""
_SLO_ALERT = "QuireSLOBurnFast"
_OUTAGE, _OVERLOAD = "outage", "overload"


class Level(IntEnum):
    """Severity. The alert of a critical symptom is a page, that of a warning a ticket."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


class Limit(NamedTuple):
    """The figure at which a symptom begins, and the one below which it ends: around a single limit, findings would come
    and go with every refresh."""

    begins: float
    ends: float | None = None
    """None: where it begins."""

    def at(self, standing: bool) -> float:
        """The one that counts, for a symptom that was there before if `standing`."""
        return self.ends if standing and self.ends is not None else self.begins


@dataclass(frozen=True, slots=True)
class Symptom:
    """One row."""

    level: Level
    """A finding may have another, if it is graver or milder than usual."""
    title: str
    """In words. A finding may say more exactly what it has found."""
    alert: str = _SLO_ALERT
    """Fires if it goes on. Empty: none does, as it makes no request miss its objective."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    family: str = ""
    """Symptoms of one family follow each other in one incident; empty: it is a family of its own."""
    is_of_server: bool = False
    """Whether all models of a server have it at once."""

    @property
    def runbook(self) -> str:
        """The heading of its section in `docs/runbooks.md`."""
        return self.alert or self.title


_OK, _WARNING, _CRITICAL = Level
SYMPTOMS: dict[str, Symptom] = {
    # -- a server, an engine or a rank is down ------------------------------------------------------------------------
    "server_away": Symptom(
        _CRITICAL, "The server does not answer", "QuireServerDown", family=_OUTAGE, is_of_server=True,
    ),
    "metrics_away": Symptom(
        _WARNING, "The server answers, but its metrics cannot be read", "QuireServerDown", is_of_server=True,
    ),
    # `times` within a `window` of seconds. One that is away again within `life` seconds of its start is in a loop.
    "server_restarts": Symptom(
        _CRITICAL, "The server dies again and again", "QuireServerCrashLoop",
        {"times": Limit(2), "window": Limit(600), "life": Limit(60)}, family=_OUTAGE, is_of_server=True,
    ),
    "no_model": Symptom(_WARNING, "No model of Quire is loaded", "QuireServerAbsent"),
    "absent": Symptom(_CRITICAL, "No server of Quire is watched", "QuireServerAbsent"),
    "watchdog": Symptom(_OK, "Prometheus evaluates rules and reaches Alertmanager", "QuireWatchdog"),
    "engine_down": Symptom(_CRITICAL, "The engine is down", "QuireEngineDown", family=_OUTAGE),
    "one_down": Symptom(_WARNING, "One of the model's engines is down", "QuireEngineDown", family=_OUTAGE),
    # `stale`: seconds without a look at the server, after which its health is unknown.
    "not_served": Symptom(_CRITICAL, "Requests are not served", limits={"stale": Limit(5)}, family=_OUTAGE),
    "engine_restarts": Symptom(
        _CRITICAL, "The engine crashes again and again", "QuireEngineCrashLoop",
        {"times": Limit(3), "window": Limit(600)}, family=_OUTAGE,
    ),
    "worker_down": Symptom(_CRITICAL, "A rank is down", "QuireWorkerDown", family=_OUTAGE),
    # -- something takes long -----------------------------------------------------------------------------------------
    # Shares of the time in which some task waits for memory or for a CPU, and of the CPUs that other processes use.
    # From the pressure `looked_at` on, `quire serve` looks at the other processes.
    "host_memory": Symptom(
        _WARNING, "The host is short of memory", limits={"pressure": Limit(0.1, 0.05)}, is_of_server=True,
    ),
    "host_cpu": Symptom(
        _WARNING, "Other processes take the host's CPUs", is_of_server=True,
        limits={"pressure": Limit(0.5, 0.4), "others": Limit(0.4, 0.3), "looked_at": Limit(0.1)},
    ),
    # `usage`: share of the blocks that live requests hold; `waiting`: requests, in the mean of some seconds;
    # `preemptions`: of late; if they go on, `per_second` and `per_request` that ends.
    "kv_cache_full": Symptom(
        _WARNING, "The KV cache is full", "QuireKVCacheSaturated",
        {"usage": Limit(0.95, 0.85), "waiting": Limit(1, 0.5), "preemptions": Limit(1),
         "per_second": Limit(0.05, 0.025), "per_request": Limit(0.1)},
    ),
    # How many times as long as usual a step takes: as that of the other ranks, or as the rank's own of the last hours.
    "slow_rank": Symptom(_WARNING, "A rank is slow", "QuireRankSlow", {"ratio": Limit(2, 1.7)}),
    # `prefill`: share of the time to first token; `length`: mean prompt, as a share of the tokens of a step.
    "long_prompts": Symptom(
        _WARNING, "Long prompts hold up the batch", limits={"prefill": Limit(0.5, 0.4), "length": Limit(0.5, 0.4)},
    ),
    # `waiting`: requests; `crowded`: the same per request that runs; `taken`: share of `max_num_seqs`; `queued`: share
    # of the time to first token; `growing`: requests that wait in a queue that grows.
    "queue": Symptom(
        _WARNING, "Requests wait in the queue", "QuireQueueGrowing",
        {"waiting": Limit(1, 0.5), "crowded": Limit(1, 0.5), "taken": Limit(1, 0.8), "queued": Limit(0.5),
         "growing": Limit(10)},
        family=_OVERLOAD,
    ),
    "rejections": Symptom(_WARNING, "Requests are rejected", family=_OVERLOAD),
    "errors": Symptom(_WARNING, "Requests fail"),
    # Scheduling's time per the model's.
    "host_bound": Symptom(
        _WARNING, "The engine spends more time on scheduling than on the model", limits={"ratio": Limit(1, 0.8)},
    ),
    # `burn`: how many times more misses than the objective allows; of fewer `requests` it says little.
    "slo": Symptom(_CRITICAL, "Users are affected", limits={"burn": Limit(14.4, 10), "requests": Limit(30)}),
    "slo_slow": Symptom(
        _WARNING, "A month's budget of misses lasts five days", "QuireSLOBurnSlow",
        {"burn": Limit(6), "requests": Limit(60)},
    ),
    "slo_slowest": Symptom(
        _WARNING, "A month's budget of misses does not last the month", "QuireSLOBurnSlowest",
        {"burn": Limit(1, 0.7), "requests": Limit(100)},
    ),
    # -- what makes no request miss its objective ---------------------------------------------------------------------
    # `share` of all requests; fewer than `requests` are a client that is being tried out.
    "invalid": Symptom(
        _WARNING, "A client sends invalid requests", "", {"share": Limit(0.1, 0.05), "requests": Limit(5)},
    ),
    "asleep": Symptom(_OK, "The engine sleeps", ""),
    "grammar": Symptom(_OK, "Requests wait for their grammar", "", {"waiting": Limit(1, 0.5)}),
    "no_slo": Symptom(_OK, "No SLO is set", ""),
}  # fmt: skip
"""By the name of the cause in a finding, and in the order of `docs/runbooks.md`."""
