"""The symptoms of a server that is unwell, each with its words, its limits and the alert that fires of it.

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
_OUTAGE, _OVERLOAD = "outage", "overload"
_SLO_ALERT = "QuireSLOBurnFast"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """One row."""

    title: str
    """In words. A finding may say more exactly what it has found."""
    level: Level
    """The highest one of its findings may be above it, or below."""
    alert: str = _SLO_ALERT
    """Fires if it goes on. Empty: none does, as it makes no request miss its objective."""
    family: str = ""
    """Symptoms of one family follow each other in one incident; empty: it is a family of its own."""
    is_of_server: bool = False
    """Whether all models of a server have it at once."""
    limits: Mapping[str, Limit] = field(default_factory=dict)

    @property
    def runbook(self) -> str:
        """The heading of its section in `docs/runbooks.md`."""
        return self.alert or self.title


SYMPTOMS: dict[str, Symptom] = {
    # -- a server, an engine or a rank is down ------------------------------------------------------------------------
    "server_away": Symptom(
        title="The server does not answer", level=Level.CRITICAL, alert="QuireServerDown", family=_OUTAGE,
        is_of_server=True,
    ),
    "metrics_away": Symptom(
        title="The server answers, but its metrics cannot be read", level=Level.WARNING, alert="QuireServerDown",
        is_of_server=True,
    ),
    "server_restarts": Symptom(
        title="The server dies again and again", level=Level.CRITICAL, alert="QuireServerCrashLoop", family=_OUTAGE,
        is_of_server=True,
        # `times` within a `window` of seconds. One that is away again within `life` seconds of its start is in a loop.
        limits={"times": Limit(2), "window": Limit(600), "life": Limit(60)},
    ),
    "no_model": Symptom(
        title="No model of Quire is loaded", level=Level.WARNING, alert="QuireServerAbsent",
    ),
    "absent": Symptom(
        title="No server of Quire is watched", level=Level.CRITICAL, alert="QuireServerAbsent",
    ),
    "watchdog": Symptom(
        title="Prometheus evaluates rules and reaches Alertmanager", level=Level.OK, alert="QuireWatchdog",
    ),
    "engine_down": Symptom(
        title="The engine is down", level=Level.CRITICAL, alert="QuireEngineDown", family=_OUTAGE,
    ),
    "one_down": Symptom(
        title="One of the model's engines is down", level=Level.WARNING, alert="QuireEngineDown", family=_OUTAGE,
    ),
    # `stale`: seconds without a look at the server, after which its health is unknown.
    "not_served": Symptom(
        title="Requests are not served", level=Level.CRITICAL, family=_OUTAGE, limits={"stale": Limit(5)},
    ),
    "engine_restarts": Symptom(
        title="The engine crashes again and again", level=Level.CRITICAL, alert="QuireEngineCrashLoop", family=_OUTAGE,
        limits={"times": Limit(3), "window": Limit(600)},
    ),
    "worker_down": Symptom(
        title="A rank is down", level=Level.CRITICAL, alert="QuireWorkerDown", family=_OUTAGE,
    ),
    # -- something takes long -----------------------------------------------------------------------------------------
    # Shares of the time in which some task waits for a CPU or for memory, and of the CPUs that other processes use.
    # From the pressure `looked_at` on, `quire serve` looks at the other processes.
    "host_memory": Symptom(
        title="The host is short of memory", level=Level.WARNING, is_of_server=True,
        limits={"pressure": Limit(0.1, 0.05)},
    ),
    "host_cpu": Symptom(
        title="Other processes take the host's CPUs", level=Level.WARNING, is_of_server=True,
        limits={"pressure": Limit(0.5, 0.4), "others": Limit(0.4, 0.3), "looked_at": Limit(0.1)},
    ),
    # `usage`: share of the blocks that live requests hold; `waiting`: requests, in the mean of some seconds;
    # `preemptions`: of late; then, while they go on, per second and per request that ends.
    "kv_cache_full": Symptom(
        title="The KV cache is full", level=Level.WARNING, alert="QuireKVCacheSaturated",
        limits={
            "usage": Limit(0.95, 0.85), "waiting": Limit(1, 0.5), "preemptions": Limit(1),
            "per_second": Limit(0.05, 0.025), "per_request": Limit(0.1),
        },
    ),
    # `ratio`: how many times the usual time of a step: of the other ranks, or of the rank itself in the last hours.
    "slow_rank": Symptom(
        title="A rank is slow", level=Level.WARNING, alert="QuireRankSlow", limits={"ratio": Limit(2, 1.7)},
    ),
    # `prefill`: share of the time to first token; `length`: mean prompt, as a share of the tokens of a step.
    "long_prompts": Symptom(
        title="Long prompts hold up the batch", level=Level.WARNING,
        limits={"prefill": Limit(0.5, 0.4), "length": Limit(0.5, 0.4)},
    ),
    # `waiting`: requests; `crowded`: the same per request that runs; `taken`: share of `max_num_seqs`; `growing`:
    # requests that wait in a queue that grows.
    "queue": Symptom(
        title="Requests wait in the queue", level=Level.WARNING, alert="QuireQueueGrowing", family=_OVERLOAD,
        limits={
            "waiting": Limit(1, 0.5), "crowded": Limit(1, 0.5), "taken": Limit(1, 0.8), "growing": Limit(10),
        },
    ),
    "rejections": Symptom(title="Requests are rejected", level=Level.WARNING, family=_OVERLOAD),
    "errors": Symptom(title="Requests fail", level=Level.WARNING),
    # `ratio`: scheduling's time per the model's.
    "host_bound": Symptom(
        title="The engine spends more time on scheduling than on the model", level=Level.WARNING,
        limits={"ratio": Limit(1, 0.8)},
    ),
    # `burn`: how many times more misses than the objective allows; `requests`: fewer say little.
    "slo": Symptom(
        title="Users are affected", level=Level.CRITICAL, limits={"burn": Limit(14.4, 10), "requests": Limit(30)},
    ),
    "slo_slow": Symptom(
        title="A month's budget of misses lasts five days", level=Level.WARNING, alert="QuireSLOBurnSlow",
        limits={"burn": Limit(6), "requests": Limit(60)},
    ),
    "slo_slowest": Symptom(
        title="A month's budget of misses does not last the month", level=Level.WARNING, alert="QuireSLOBurnSlowest",
        limits={"burn": Limit(1, 0.7), "requests": Limit(100)},
    ),
    # -- what makes no request miss its objective ---------------------------------------------------------------------
    # `share` of all requests; fewer than `requests` are a client that is being tried out.
    "invalid": Symptom(
        title="A client sends invalid requests", level=Level.WARNING, alert="",
        limits={"share": Limit(0.1, 0.05), "requests": Limit(5)},
    ),
    "grammar": Symptom(
        title="Requests wait for their grammar", level=Level.OK, alert="", limits={"waiting": Limit(1, 0.5)},
    ),
    "no_slo": Symptom(title="No SLO is set", level=Level.OK, alert=""),
}  # fmt: skip
"""By the name of the cause in a finding, and in the order of `docs/runbooks.md`."""
