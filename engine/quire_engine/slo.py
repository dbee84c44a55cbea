"""Service level objectives: targets of a request, and whether it met them.

It knows no clock: measured times go in, a verdict comes out. Classes come from the settings alone::

    "slo": {"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10000}, "batch": {"e2e_ms": 60000}}

A request for a vector has no output tokens: the end-to-end target alone applies to it.

With the setting `scheduling_policy` "slo" the scheduler works for them, and a class's `on_overload` decides about a
request that cannot meet its time to first token.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from quire_engine.errors import RequestError

DEFAULT_CLASS = "default"
"""The class of a request that names none. It always exists, without targets unless the settings give it some."""
MAX_CLASSES = 100
"""Each class has about a hundred series, most of them latency buckets."""

ON_OVERLOAD = ("refuse", "best_effort")
_TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class SLOTargets:
    """The longest times that are good, in milliseconds; a target that is unset is always met."""

    ttft_ms: float | None = None
    """Time to first token."""
    tpot_ms: float | None = None
    """Mean time per token after the first."""
    e2e_ms: float | None = None
    """From the request's arrival to its end."""
    on_overload: str = "refuse"
    """For a request that cannot have its first token in time because of those before it: `refuse` rejects it at once,
    `best_effort` runs it when others leave room. Only with `scheduling_policy` "slo"."""

    objective: float = 0.99
    """The promised share of good requests of the class, which alerts and the dashboard use."""

    def __post_init__(self) -> None:
        if not (_is_time(self.objective) and self.objective < 1):
            raise ValueError(f"objective is {self.objective!r}; it must be a share between 0 and 1")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not _is_time(value):
                raise ValueError(f"{name} is {value!r}; it must be a number of milliseconds above 0")
        if self.on_overload not in ON_OVERLOAD:
            raise ValueError(f"on_overload is {self.on_overload!r}; it must be {' or '.join(map(repr, ON_OVERLOAD))}")

    def seconds(self) -> dict[str, float]:
        """The targets that are set: `ttft`, `tpot` and `e2e`."""
        times = {name: getattr(self, name) for name in _TIMES}
        return {name.removesuffix("_ms"): value / 1000 for name, value in times.items() if value is not None}


NO_TARGETS = SLOTargets()
"""No targets: every time is good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSLO:
    """The objectives of one request: a class, and targets that override the class's."""

    slo_class: str = DEFAULT_CLASS
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SLOVerdict:
    """Whether a request met its targets."""

    good: bool
    cause: str = "none"
    """The cause of a miss: "ttft", "tpot" or "e2e", the target that was missed first; "rejected" or "error"."""

    @property
    def verdict(self) -> str:
        """The value of the metrics' label."""
        return "good" if self.good else "miss"


def parse_classes(value: object) -> dict[str, SLOTargets]:
    """The setting `slo`, checked, with the default class.

    Raises:
        ValueError: it is malformed; the message says what is wrong.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"slo is {value!r}; it must be an object of classes, each an object of targets")
    if len(value) > MAX_CLASSES:
        raise ValueError(f"slo holds {len(value)} classes; it must hold at most {MAX_CLASSES}")
    classes = {DEFAULT_CLASS: NO_TARGETS}
    known = [item.name for item in fields(SLOTargets)]
    for name, targets in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"slo: {name!r} is no name of a class; it must be of 1 to 64 letters, digits, _, . and -")
        if isinstance(targets, SLOTargets):
            classes[name] = targets
            continue
        if not isinstance(targets, Mapping) or not set(targets) <= set(known):
            raise ValueError(f"slo: class {name!r} is {targets!r}; it must be an object of {', '.join(known)}")
        try:
            classes[name] = SLOTargets(**targets)
        except ValueError as error:
            raise ValueError(f"slo: class {name!r}: {error}") from None
    return classes


def resolve(classes: Mapping[str, SLOTargets], slo: RequestSLO, *, has_output_tokens: bool = True) -> SLOTargets:
    """The targets that apply to a request: its class's, and its own in their place.

    Args:
        classes: the setting `slo`.
        slo: what the request says.
        has_output_tokens: whether it generates; else the class's targets for tokens do not apply.

    Raises:
        RequestError: there is no such class, or a target is not a time.
    """
    of_class = classes.get(slo.slo_class)
    if of_class is None:
        raise RequestError.of("slo_class", f"is {slo.slo_class[:100]!r}; this model has {', '.join(sorted(classes))}")
    own = {name: value for name in _TIMES if (value := getattr(slo, name)) is not None}
    for name, value in own.items():
        if not _is_time(value):
            raise RequestError(f"slo_{name}", f"slo_{name} is {value}; it must be a number above 0")
        if name != "e2e_ms" and not has_output_tokens:
            raise RequestError(
                f"slo_{name}", f"slo_{name} is {value}; a request without output tokens can have slo_e2e_ms alone"
            )
    if not has_output_tokens and (of_class.ttft_ms, of_class.tpot_ms) != (None, None):
        of_class = replace(of_class, ttft_ms=None, tpot_ms=None)
    return replace(of_class, **own) if own else of_class


def judge(
    targets: SLOTargets,
    *,
    e2e_seconds: float,
    time_to_first_token_seconds: float | None,
    time_per_output_token_seconds: float | None,
    decode_seconds: float,
) -> SLOVerdict:
    """The verdict on a request that finished.

    The cause of a miss is the target that expired first. Counted from the request's arrival that is, for the first
    token and the end, the target itself; for the time per token, the first token plus the time that all later ones may
    take::

        arrival ───── ttft_ms ──┬────────────────── e2e_ms ──►
                    first token └─ tpot_ms × tokens ─►
    """
    missed: list[tuple[float, str]] = []
    ttft, tpot = time_to_first_token_seconds, time_per_output_token_seconds
    if targets.ttft_ms is not None and (e2e_seconds if ttft is None else ttft) > targets.ttft_ms / 1000:
        missed.append((targets.ttft_ms / 1000, "ttft"))
    if targets.tpot_ms is not None and tpot and tpot > targets.tpot_ms / 1000:
        missed.append(((ttft or 0.0) + decode_seconds * targets.tpot_ms / 1000 / tpot, "tpot"))
    if targets.e2e_ms is not None and e2e_seconds > targets.e2e_ms / 1000:
        missed.append((targets.e2e_ms / 1000, "e2e"))
    if not missed:
        return SLOVerdict(good=True)
    return SLOVerdict(good=False, cause=min(missed, key=lambda miss: miss[0])[1])
