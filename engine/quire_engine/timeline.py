"""Timeline: the phases of a live request. Each instant is in exactly one phase: they add up to its life.

::

    encode ──► queue ──► prefill ──► decode ──► end
    encode     its images are encoded, or wait for others; only of requests with images
    held       no engine has it: from the death of one, or from its arrival, until it is sent to one
    preempted  from the loss of its blocks, and replayed from the hand-over to another engine, to its next token
    queue      again, if another replica continues after its prompt (`disaggregation`)

All times are of the frontend's monotonic clock. A journal writes it in the order of events; the engine core reports
ages, so that the two may run on different hosts.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

RequestPhase = Literal["encode", "held", "queue", "prefill", "decode", "preempted", "replayed"]
REQUEST_PHASES: tuple[RequestPhase, ...] = get_args(RequestPhase)

PhaseChange = tuple[str, Literal["scheduled", "preempted"], float]
"""A request's id, its first step or latest preemption in an engine core, and how many seconds ago that was."""


class Timeline:
    """The phases of one request.

    Args:
        began_at: when it arrived.
        encode_seconds: what its images took; 0 without any.
    """

    __slots__ = ("began_at", "ended", "first_token_at", "phase", "phase_began_at", "phases")

    def __init__(self, began_at: float, encode_seconds: float = 0.0) -> None:
        self.began_at = self.phase_began_at = began_at
        self.phase: RequestPhase = "encode" if encode_seconds else "queue"
        self.phases: list[tuple[RequestPhase, float]] = [(self.phase, 0.0)]
        """Each phase and its begin, in seconds from the arrival."""
        self.first_token_at: float | None = None
        self.ended: list[tuple[RequestPhase, float]] = []
        """Phases that have ended and their seconds, until they are counted. Decode ends with the request."""
        self.enter("queue", began_at + encode_seconds)

    def enter(self, phase: RequestPhase, at: float) -> None:
        """Begin the next phase; not before the present one."""
        if phase == self.phase:
            return
        if at > self.phase_began_at:
            if self.phase != "decode":
                self.ended.append((self.phase, at - self.phase_began_at))
            self.phase_began_at = at
        else:
            self.phases.pop()
        self.phase = phase
        self.phases.append((phase, self.phase_began_at - self.began_at))

    def sent(self, now: float) -> None:
        """It is sent to an engine: the first one, one after a death, or the one that continues after its prompt."""
        has_begun = any(phase not in ("encode", "held", "queue") for phase, _ in self.phases)
        self.enter("replayed" if self.phase == "held" and has_begun else "queue", now)

    def token(self, now: float) -> None:
        """It has another token."""
        if self.first_token_at is None:
            self.first_token_at = now
        if self.phase not in ("held", "queue"):
            self.enter("decode", now)

    def change(self, kind: Literal["scheduled", "preempted"], at: float) -> None:
        """An engine core has scheduled or preempted it."""
        if self.phase == "queue" and kind == "scheduled":
            self.enter("prefill" if self.first_token_at is None else "decode", at)
        elif self.phase not in ("held", "queue") and kind == "preempted":
            self.enter("preempted", at)

    def end(self, now: float) -> list[tuple[RequestPhase, float]]:
        """End it. Returns its phases, as in `phases`."""
        if self.first_token_at is not None:
            self.ended.append(("decode", phase_seconds(self.phases, now - self.began_at)["decode"]))
        if self.phase != "decode":
            self.ended.append((self.phase, now - self.phase_began_at))
        return self.phases


def note_changes(changes: Iterable[PhaseChange], find: Callable[[str], Timeline | None], now: float) -> None:
    """Write changes into the requests' timelines; requests that have ended are ignored."""
    for request_id, kind, age in changes:
        timeline = find(request_id)
        if timeline is not None:
            timeline.change(kind, now - age)


def stretches(phases: list[tuple[RequestPhase, float]], end: float) -> Iterator[tuple[RequestPhase, float, float]]:
    """Each phase with its begin and end, from the begin of every phase and the end of the last."""
    for number, (phase, begin) in enumerate(phases, 1):
        yield phase, begin, phases[number][1] if number < len(phases) else end


def phase_seconds(phases: list[tuple[RequestPhase, float]], end: float) -> dict[RequestPhase, float]:
    """The total time of each phase, likewise."""
    totals: dict[RequestPhase, float] = dict.fromkeys(REQUEST_PHASES, 0.0)
    for phase, begin, phase_end in stretches(phases, end):
        totals[phase] += phase_end - begin
    return totals
