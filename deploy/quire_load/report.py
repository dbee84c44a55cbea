"""What a run measured: percentiles, throughput, goodput and errors, under the names of `vllm bench serve`."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_load.load import RequestRecord

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency",
           "e2el": "end-to-end latency"}  # fmt: skip
_GOODPUT = re.compile(r"(?:(?P<slo_class>[A-Za-z0-9_.-]+)=)?(?P<targets>.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The longest times that are good, in milliseconds; one that is unset is always met."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def are_met(self, record: RequestRecord) -> bool:
        """Whether a request was answered, and in time."""
        times = ((self.ttft, record.ttft_s), (self.tpot, record.tpot_s), (self.e2el, record.e2el_s))
        return not record.error_kind and all(
            target is None or time_s is None or 1000 * time_s <= target for target, time_s in times
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Of the requests of one class."""

    slo_class: str
    num_requests: int
    num_good: int
    request_goodput: float
    """Good requests per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run in numbers. Times are in milliseconds, of the requests that were answered."""

    duration: float
    """Seconds from the start to the end of the last request."""
    completed: int
    failed: int
    errors: Mapping[str, int]
    """By kind."""
    error_messages: Mapping[str, str]
    """One of each kind."""
    total_input_tokens: int
    total_output_tokens: int
    max_lateness_ms: float
    """How long after its time a request was sent, at most: what exceeds the wait for `max_concurrency` is this process
    being too slow for the load."""
    times_ms: Mapping[str, Sequence[float]]
    """All measured times, sorted, by the names of `METRICS`; of vectors, the end-to-end latency alone."""
    goodput: Sequence[Goodput]
    has_output_tokens: bool = True
    """Whether the answers are tokens, and not vectors."""

    def rate(self, number: float) -> float:
        """So many per second."""
        return number / self.duration if self.duration else 0.0

    def as_dict(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """As JSON, with the keys of `vllm bench serve`."""
        values: dict[str, Any] = {
            "duration": self.duration, "completed": self.completed, "failed": self.failed,
            "total_input_tokens": self.total_input_tokens, "request_throughput": self.rate(self.completed),
            "total_token_throughput": self.rate(self.total_input_tokens + self.total_output_tokens),
            "errors": dict(self.errors), "error_messages": dict(self.error_messages),
            "max_lateness_ms": self.max_lateness_ms,
        }  # fmt: skip
        if self.has_output_tokens:
            values["total_output_tokens"] = self.total_output_tokens
            values["output_throughput"] = self.rate(self.total_output_tokens)
        if self.goodput:
            values["request_goodput"] = sum(one.request_goodput for one in self.goodput)
            values["goodput"] = {
                one.slo_class or "default": {"requests": one.num_requests, "good": one.num_good,
                                             "request_goodput": one.request_goodput}
                for one in self.goodput
            }  # fmt: skip
        for name, times in self.times_ms.items():
            values[f"mean_{name}_ms"] = statistics.fmean(times) if times else None
            values[f"median_{name}_ms"] = percentile(times, 0.5)
            values[f"std_{name}_ms"] = statistics.pstdev(times) if times else None
            for q in percentiles:
                values[f"p{q:g}_{name}_ms"] = percentile(times, q / 100)
        return values


def summarize(records: Sequence[RequestRecord], goodput: Mapping[str, Targets] | None = None) -> Report:
    """The numbers of a run.

    Args:
        records: of all its requests.
        goodput: targets by SLO class; those of "" are for the classes that are not named. Empty: no goodput.
    """
    answered = [record for record in records if not record.error_kind]
    duration = max((record.ended_s for record in records), default=0.0)
    failed = [record for record in records if record.error_kind]
    times: dict[str, list[float | None]] = {
        "ttft": [record.ttft_s for record in answered],
        "tpot": [record.tpot_s for record in answered],
        "itl": [gap for record in answered for gap in record.itls_s],
        "e2el": [record.e2el_s for record in answered],
    }
    has_output_tokens = not any(record.is_vector for record in answered)
    if not has_output_tokens:
        times = {"e2el": times["e2el"]}
    return Report(
        duration=duration, completed=len(answered), failed=len(failed),
        errors=Counter(record.error_kind for record in failed),
        error_messages={record.error_kind: record.error for record in failed},
        total_input_tokens=sum(record.num_input_tokens for record in answered),
        total_output_tokens=sum(record.num_output_tokens for record in answered),
        max_lateness_ms=1000 * max((record.sent_s - record.scheduled_s for record in records), default=0.0),
        times_ms={name: sorted(1000 * time for time in of if time is not None) for name, of in times.items()},
        goodput=_goodput(records, goodput, duration) if goodput else (), has_output_tokens=has_output_tokens,
    )  # fmt: skip


def _goodput(records: Sequence[RequestRecord], targets: Mapping[str, Targets], duration: float) -> list[Goodput]:
    found = []
    for name in sorted({record.slo_class for record in records}):
        own = [record for record in records if record.slo_class == name]
        of_class = targets.get(name, targets.get("", Targets()))
        num_good = sum(of_class.are_met(record) for record in own)
        rate = num_good / duration if duration else 0.0
        found.append(Goodput(slo_class=name, num_requests=len(own), num_good=num_good, request_goodput=rate))
    return found


def parse_goodput(items: Sequence[str]) -> dict[str, Targets]:
    """Targets as they are written for `--goodput`: `[CLASS=]KEY:MS[,KEY:MS]`, in milliseconds.

    Raises:
        ValueError: an item is not of that form.
    """
    found: dict[str, dict[str, float]] = {}
    for item in items:
        match = _GOODPUT.fullmatch(item)
        own = found.setdefault((match and match["slo_class"]) or "", {})
        for part in (match["targets"] if match else "").split(","):
            key, _, value = part.partition(":")
            try:
                milliseconds = float(value)
            except ValueError:
                milliseconds = math.nan
            if key not in Targets.__dataclass_fields__ or not 0 < milliseconds < math.inf:
                raise ValueError(
                    f"goodput is {item!r}; it must be [CLASS=]KEY:MS[,KEY:MS] with the keys "
                    f"{', '.join(Targets.__dataclass_fields__)} and milliseconds above 0"
                )
            own[key] = milliseconds
    return {name: Targets(**own) for name, own in found.items()}


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile, interpolated linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
