"""Timeline: what the time of a live request goes to. Each instant is in exactly one phase: they add up to its life.

::

    queue ──► prefill ──► decode ──► end
    held       no engine has it: from the death of one, or from its arrival, until another one gets it
    preempted  from the loss of its blocks, and replayed from the hand-over to another engine, to its next token
    queue      again, where another replica goes on after its prompt (`disaggregation`)

All times are of the frontend's monotonic clock. A journal writes it in the order in which things happen to the request;
of the engine core it knows ages, so that the two may run on different hosts.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

RequestPhase = Literal["held", "queue", "prefill", "decode", "preempted", "replayed"]
REQUEST_PHASES: tuple[RequestPhase, ...] = get_args(RequestPhase)

PhaseChange = tuple[str, Literal["scheduled", "preempted"], float]
"""A request's id, what an engine core did with it, and how many seconds ago: its first step there, or the last loss of
its blocks."""


class Timeline:
    """The phases of one request.

    Args:
        began_at: when it arrived.
    """

    __slots__ = ("began_at", "ended", "first_token_at", "phase", "phase_began_at", "phases")

    def __init__(self, began_at: float) -> None:
        self.began_at = self.phase_began_at = began_at
        self.phase: RequestPhase = "queue"
        self.phases: list[tuple[RequestPhase, float]] = [("queue", 0.0)]
        """Each phase and its begin, in seconds from the arrival."""
        self.first_token_at: float | None = None
        self.ended: list[tuple[RequestPhase, float]] = []
        """Phases that have ended and their seconds, until they are counted. Decode ends with the request."""

    def enter(self, phase: RequestPhase, at: float) -> None:
        """The next phase begins; not before the present one did."""
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
        """An engine gets it: the first one, the next one after a death, or the one that goes on after its prompt."""
        has_begun = any(phase not in ("held", "queue") for phase, _ in self.phases)
        self.enter("replayed" if self.phase == "held" and has_begun else "queue", now)

    def token(self, now: float) -> None:
        """It has a token."""
        if self.first_token_at is None:
            self.first_token_at = now
        if self.phase not in ("held", "queue"):
            self.enter("decode", now)

    def change(self, kind: Literal["scheduled", "preempted"], at: float) -> None:
        """An engine core did something with it."""
        if self.phase == "queue" and kind == "scheduled":
            self.enter("prefill" if self.first_token_at is None else "decode", at)
        elif self.phase not in ("held", "queue") and kind == "preempted":
            self.enter("preempted", at)

    def end(self, now: float) -> list[tuple[RequestPhase, float]]:
        """It has ended. Returns its phases, as in `phases`."""
        if self.first_token_at is not None:
            self.ended.append(("decode", phase_seconds(self.phases, now - self.began_at)["decode"]))
        if self.phase != "decode":
            self.ended.append((self.phase, now - self.phase_began_at))
        return self.phases


def note_changes(changes: Iterable[PhaseChange], find: Callable[[str], Timeline | None], now: float) -> None:
    """Write what an engine core did into the requests' timelines; those that have ended are ignored."""
    for request_id, kind, age in changes:
        timeline = find(request_id)
        if timeline is not None:
            timeline.change(kind, now - age)


def stretches(phases: list[tuple[RequestPhase, float]], end: float) -> Iterator[tuple[RequestPhase, float, float]]:
    """Each phase with its begin and end, by the begin of every phase and the end of the last."""
    for number, (phase, begin) in enumerate(phases, 1):
        yield phase, begin, phases[number][1] if number < len(phases) else end


def phase_seconds(phases: list[tuple[RequestPhase, float]], end: float) -> dict[RequestPhase, float]:
    """What each phase took in all, likewise."""
    totals: dict[RequestPhase, float] = dict.fromkeys(REQUEST_PHASES, 0.0)
    for phase, begin, phase_end in stretches(phases, end):
        totals[phase] += phase_end - begin
    return totals
