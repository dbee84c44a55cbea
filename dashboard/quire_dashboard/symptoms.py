"""What is known of a model, and what is found in it: the data of health in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from quire_dashboard.serve_report import Host

MINUTE_S = 60.0
RECENT_S = 30.0
"""What has not happened for so long is over, though the figures of the last minute still show it."""
NOW_S = 6.0
"""The same of what happens often, and of what happens once: three readings."""
OFTEN = 30
"""Events in a minute, of which one expects three within `NOW_S`: with none, they are over."""
UNTIL_OVER = 1.5
"""What happened again and again is over once it has stayed away for so many times its longest gap."""


class Level(IntEnum):
    """Severity."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What was counted in a window of time. None or empty: unknown."""

    seconds: float = MINUTE_S
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
    """Of these, requests that were rejected for what they asked."""
    ttft_p95: float | None = None
    queue_p95: float | None = None
    prefill_p95: float | None = None
    mean_prompt_tokens: float | None = None

    @property
    def within(self) -> str:
        """The window in words."""
        return "the last minute" if self.seconds >= MINUTE_S - 1 else f"the last {self.seconds:.0f} s"


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
    one_down: bool = False
    """Whether any of them is."""
    engines_down: tuple[str, ...] = ()
    """Of several: which."""
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
    """Of the server itself, in ten minutes: how many seconds ago, the latest first."""
    restarts: Sequence[float] = ()
    """Of the engine, in five minutes; likewise."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem."""

    level: Level
    cause: str
    """A short name, such as `kv_cache_full`."""
    title: str
    detail: str
    """The figures behind it, and what helps."""
