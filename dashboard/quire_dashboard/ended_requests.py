"""The ended requests of a model that this dashboard has read, and in a sentence why each was slow or failed.

Each look fetches only what has ended since the last one. What was read outlives its server, so that an operator can
still see what ended before the server died.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire_client import ClientError
from quire_client.ended import LOST, EndedAnswer, EndedRequest

from quire_dashboard.words import count, seconds

WAIT_S = 0.05
"""A request that was rejected sooner has not waited."""


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
        return "invalid", f"rejected as invalid: {said}"
    if request.finish_reason == "rejected" or request.error_code == "unavailable":
        waits = ((request.queue_seconds, "in the queue"), (request.held_seconds, "without an engine"))
        waited = "".join(f" after {seconds(length)} {where}" for length, where in waits if length >= WAIT_S)
        return "rejected", f"rejected{waited}: {said}"
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
    if request.task:
        return after
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
        phases = {name: length for name, length in phases.items() if name not in ("encode", "queue", "prefill")}
    phase = max(phases, key=lambda name: phases[name], default="queue")
    share = f"{seconds(phases.get(phase, 0.0))} of {seconds(whole)}"
    if phase == "encode":
        return "encode", f"{share} until its images were encoded{_extras(request)}"
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
    replays = request.num_replays
    replayed = f"replayed after {'an engine restart' if replays == 1 else f'{replays} engine restarts'}"
    preempted = "preempted " + {1: "once", 2: "twice"}.get(request.num_preemptions, f"{request.num_preemptions} times")
    said = [replayed] * bool(replays) + [preempted] * bool(request.num_preemptions)
    return "".join(f"; {one}" for one in said)


def _tokens(number: int) -> str:
    return f"{count(number)} token{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class EndedSeen:
    """What is known at a look. The mapping stays the same until something has ended."""

    requests: Mapping[str, EndedRequest] = field(default_factory=dict)
    """By a name that stays theirs, the latest first."""
    answer: EndedAnswer | None = None
    """The last one, of which the requests are what was new; None: there was none yet."""
    error: str = ""
    """Why the last look brought nothing."""
    age_s: float = 0.0
    """The last answer's."""


class EndedLog:
    """Keeps as many as the model does. Thread-safe.

    Args:
        ask: for what has ended since a cursor; raises ClientError.
        clock: seconds, monotonic.
    """

    def __init__(self, ask: Callable[[str], EndedAnswer], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Mapping[str, EndedRequest] = {}
        self._answer: EndedAnswer | None = None
        self._error = ""
        self._asked_at: float | None = None
        self._answered_at = 0.0

    def look(self, age_s: float) -> EndedSeen:
        """What is known; asks the model if the last look is older than `age_s`."""
        with self._lock:
            now = self._clock()
            if self._asked_at is None or now - self._asked_at >= age_s:
                self._asked_at = now
                self._refresh(now)
            return EndedSeen(self._requests, self._answer, self._error, now - self._answered_at)

    def _refresh(self, now: float) -> None:
        try:
            answer = self._ask("" if self._answer is None else self._answer.cursor)
        except ClientError as error:
            self._error = str(error)
            return
        self._answer, self._answered_at, self._error = answer, now, ""
        if answer.requests:
            # A model that was loaded again, or another instance of it, lists all that it keeps.
            found = {**self._requests, **{f"{answer.ring}:{one.number}": one for one in answer.requests}}
            latest = sorted(found.items(), key=lambda item: -item[1].time_unix)
            self._requests = dict(latest[: max(answer.capacity, 1)])
