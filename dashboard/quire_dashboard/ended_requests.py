"""Requests that have ended, as the model tells of them, and why each was slow or failed, in a sentence.

Fields missing in an answer get their defaults, and unknown ones are ignored, as in `snapshot_answer`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_dashboard.snapshot_answer import build
from quire_dashboard.words import count, seconds

LOST = "lost"
"""`error_code` of a request whose server died."""
PHASES = ("held", "queue", "prefill", "decode", "preempted", "replayed")
"""What a request's time can go to."""
WAIT_S = 0.05
"""A request that was refused sooner has not waited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRequest:
    """One request that has ended; `quire_engine.snapshot.EndedRequest` says what the fields are."""

    number: int = 0
    time_unix: float = 0.0
    finish_reason: str = ""
    """`stop`, `length`, `abort`, `error`, or `rejected` before it reached the engine."""
    id: str = ""
    label: str = ""
    slo_class: str = ""
    slo_verdict: str = ""
    slo_cause: str = ""
    error: str = ""
    error_code: str = ""
    aborted_by: str = ""
    e2e_seconds: float = 0.0
    held_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preempted_seconds: float = 0.0
    replayed_seconds: float = 0.0
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_sequences: int = 1
    num_preemptions: int = 0
    num_replays: int = 0
    num_running_before: int = 0
    num_waiting_before: int = 0
    traceparent: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether its client did not get what it asked for."""
        return self.finish_reason not in ("stop", "length")

    @property
    def is_slow(self) -> bool:
        """Whether it missed an objective, and has not failed."""
        return not self.has_failed and self.slo_verdict == "miss"

    @property
    def trace_id(self) -> str:
        """Of the caller's trace; empty without one."""
        parts = self.traceparent.split("-")
        return parts[1] if len(parts) >= 4 else ""

    @property
    def phases(self) -> list[tuple[str, float]]:
        """(phase, seconds) of what its time went to; the sum is `e2e_seconds`. None if it never reached the engine."""
        if self.finish_reason == "rejected" or self.error_code == LOST:
            return []
        parts = [(phase, float(getattr(self, f"{phase}_seconds"))) for phase in PHASES]
        return [(phase, length) for phase, length in parts if length > 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedAnswer:
    """What the model says: those that have ended since the cursor that it was shown."""

    cursor: str = ""
    num_ended: int = 0
    capacity: int = 0
    since_unix: float = 0.0
    slo: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    requests: Sequence[EndedRequest] = ()

    @classmethod
    def from_json(cls, text: str) -> "EndedAnswer":
        """Read an answer.

        Raises:
            ValueError: it is none.
        """
        said = json.loads(text)
        if not isinstance(said, dict) or "cursor" not in said:
            raise ValueError("the model's answer tells of no ended requests; does it run an older version of Quire?")
        return build(cls, {**said, "requests": [build(EndedRequest, one) for one in said.get("requests") or ()]})

    @property
    def ring(self) -> str:
        """The name of what the model keeps: another one after it was loaded again."""
        return self.cursor.partition(":")[0]

    @property
    def has_slo(self) -> bool:
        """Whether any class has a target."""
        return any(self.slo.values())


@dataclass(frozen=True, slots=True)
class Why:
    """Why a request was slow or failed, from what was measured of it."""

    kind: str
    """One of a few: to filter by."""
    sentence: str


def why(request: EndedRequest) -> Why:
    """The cause that explains the most."""
    kind, sentence = _why_it_failed(request) if request.has_failed else _where_the_time_went(request)
    return Why(kind, sentence[:1].upper() + sentence[1:])


def _why_it_failed(request: EndedRequest) -> tuple[str, str]:
    said = request.error or "the engine gave no reason"
    if request.error_code == LOST:
        return "server died", f"lost after {seconds(request.e2e_seconds)}, as the server died: {said}"
    if request.error_code in ("invalid_arg", "not_found"):
        return "invalid", f"refused as invalid: {said}"
    if request.finish_reason == "rejected" or request.error_code == "unavailable":
        waits = ((request.queue_seconds, "in the queue"), (request.held_seconds, "without an engine"))
        waited = "".join(f" after {seconds(length)} {where}" for length, where in waits if length >= WAIT_S)
        return "refused", f"refused{waited}: {said}"
    if request.error_code == "deadline":
        return "deadline", f"missed its deadline {_when(request)}: {_where_the_time_went(request)[1]}"
    if request.finish_reason == "abort":
        who = {
            "operator": ("cancelled", "an operator cancelled it"),
            "server": ("server", "the server ended it"),
        }.get(request.aborted_by, ("client left", "client left"))  # fmt: skip
        return who[0], f"{who[1]} {_when(request)}{_extras(request)}"
    return "error", f"failed {_when(request)}: {said}{_extras(request)}"


def _when(request: EndedRequest) -> str:
    after = f"after {seconds(request.e2e_seconds)}"
    if request.time_to_first_token_seconds is None:
        return f"{after}, before its first token"
    return f"{after}, with {_tokens(request.num_output_tokens)}"


def _where_the_time_went(request: EndedRequest) -> tuple[str, str]:
    """The longest phase of what its missed objective is about, or of the whole request."""
    first_token = request.time_to_first_token_seconds
    whole, phases = request.e2e_seconds, dict(request.phases)
    if first_token is not None and request.slo_cause == "ttft":
        whole = first_token
        phases = {name: min(length, whole) for name, length in phases.items() if name != "decode"}
    elif first_token is not None and request.slo_cause == "tpot":
        whole -= first_token
        phases = {name: length for name, length in phases.items() if name not in ("queue", "prefill")}
    phase = max(phases, key=lambda name: phases[name], default="queue")
    share = f"{seconds(phases.get(phase, 0.0))} of {seconds(whole)}"
    if phase == "held":
        return "held", f"{share} without an engine{_extras(request)}"
    if phase == "replayed":
        return "replayed", f"{share} until another engine had caught up{_extras(request)}"
    if phase == "queue":
        return "queue", f"{share} in the queue{_behind(request)}{_extras(request)}"
    if phase == "prefill":
        new = request.num_prompt_tokens - request.num_cached_tokens
        cached = f" ({count(request.num_cached_tokens)} more were cached)" if request.num_cached_tokens else ""
        return "prefill", f"{share} in prefill of {_tokens(new)}{cached}{_extras(request)}"
    if phase == "preempted":
        return "preempted", f"{share} without a token{_extras(request)}"
    each = request.time_per_output_token_seconds
    pace = f", {seconds(each)} each" if each is not None else ""
    return "decode", f"{share} in decode of {_tokens(request.num_output_tokens)}{pace}{_extras(request)}"


def _behind(request: EndedRequest) -> str:
    """Who was there when it arrived."""
    running, waiting = request.num_running_before, request.num_waiting_before
    if not running and not waiting:
        return ""
    return f", behind {count(running)} running" + (f" and {count(waiting)} waiting" if waiting else "")


def _extras(request: EndedRequest) -> str:
    replayed = f"replayed after {_times(request.num_replays, 'an engine restart', 'engine restarts')}"
    preempted = "preempted " + {1: "once", 2: "twice"}.get(request.num_preemptions, f"{request.num_preemptions} times")
    said = [replayed] * bool(request.num_replays) + [preempted] * bool(request.num_preemptions)
    return "".join(f"; {one}" for one in said)


def _times(number: int, one: str, several: str) -> str:
    return one if number == 1 else f"{number} {several}"


def _tokens(number: int) -> str:
    return f"{count(number)} token{'' if number == 1 else 's'}"
