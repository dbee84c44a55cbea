"""Journal: what the frontend knows of each live request, so that the death of an engine loses none of them.

It knows no process, no socket and no text: requests go in, outputs pass through, and it returns what to send.

::

    add ──► held ──► sent ──► (outputs pass through: the tokens are noted) ──► finished, forgotten
             ▲         │ the engine dies
             └─────────┘ a replay: with its tokens so far as output, the request continues

A death counts against a request when that engine had begun to compute it: a request that was only sent, and waited for
its turn or its grammar, cannot have been the cause. At the second death that counts a request is a suspect, unless it
got `ISOLATION_TOKENS` since the first. (So occasional kills from outside make no suspects.) Suspects are isolated: each
has the engine to itself for `ISOLATION_TOKENS`, one after the other; meanwhile all others are held:

1. The suspect gets its tokens (or ends): it is cleared, and held until all suspects have run.
2. The engine dies with only the suspect in it: the suspect runs alone again. At the second such death that counts it is
   the faulty request, and ends with an error. (One such death can have another cause.)
3. When no suspect is left, all held requests are sent.

Each replica has a journal. When its engine dies, other journals take over the requests, but for suspects: they are
isolated where they are. When a replica leaves, they take over all of them; nothing counts against these, as no engine
has died.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.timeline import PhaseChange, Timeline, note_changes

MAX_CRASHES = 2
"""Deaths that count after which a request is a suspect."""
MAX_ISOLATED_DEATHS = 2
ISOLATION_TOKENS = 2
"""The first comes from a step that computes all tokens of the request, the second from a step like all later ones: a
request that kills engines in either is found."""
SHORTEST_DEADLINE_MS = 0.001


@dataclass(slots=True)
class JournalEntry:
    """One live request."""

    request: EngineCoreRequest
    timeline: Timeline
    output_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_crashes: int = 0
    """Deaths of an engine that had begun to compute it, since it was added or cleared."""
    num_isolated_deaths: int = 0
    """Those of an engine that had no other request."""
    num_output_tokens_before: int = 0
    """Output tokens that it had when it was last sent."""
    is_sent: bool = False
    """Whether the present engine has it."""
    message_number: int = 0
    """Number of the message that sent it there."""
    was_sent: bool = False
    """Whether any engine had it: an accepted request is not rejected later because the queue is full."""


class Journal:
    """The live requests of one engine, in the order in which they came.

    Args:
        max_model_len: the engine's.
        clock: seconds, monotonic, that of the timelines; deadlines are counted with it.
    """

    def __init__(self, max_model_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_model_len = max_model_len
        self._clock = clock
        self._entries: dict[str, JournalEntry] = {}
        self._unsent: dict[str, JournalEntry] = {}
        self._suspects: deque[str] = deque()
        self._isolated: str | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def request_ids(self) -> list[str]:
        """All live requests."""
        return list(self._entries)

    @property
    def entries(self) -> list[JournalEntry]:
        """What is known of all live requests."""
        return list(self._entries.values())

    @property
    def num_sent(self) -> int:
        """Requests that the engine has."""
        return len(self._entries) - len(self._unsent)

    @property
    def is_isolating(self) -> bool:
        """Whether there are suspects: others are held until they have run."""
        return self._isolated is not None or bool(self._suspects)

    @property
    def sent_ids(self) -> list[str]:
        """The live requests that the engine has."""
        return [request_id for request_id in self._entries if request_id not in self._unsent]

    @property
    def num_begun(self) -> int:
        """Requests that any engine has had."""
        return sum(entry.was_sent for entry in self._entries.values())

    def is_held(self, request_id: str) -> bool:
        """Whether it is live, and no engine has it."""
        return request_id in self._unsent

    def add(self, request: EngineCoreRequest, timeline: Timeline | None = None) -> None:
        """Add a request; one that the front of this host replays has output tokens already. `take_unsent` returns it
        when it may be sent. Its timeline is written from here on."""
        entry = JournalEntry(
            request, timeline or Timeline(self._clock()), request.output_token_ids.copy(), request.num_preemptions,
            was_sent=request.is_replay,
        )  # fmt: skip
        self._entries[request.request_id] = self._unsent[request.request_id] = entry

    def remove(self, request_id: str) -> bool:
        """Forget a request that ends on this side, if it is known. Returns whether the engine has to abort it."""
        entry = self._entries.pop(request_id, None)
        self._unsent.pop(request_id, None)
        if request_id == self._isolated:
            self._isolated = None
        return entry is not None and entry.is_sent

    def note_held(self, request_id: str) -> None:
        """A request waits for an engine, unless it was sent. One that no engine has had waits since it came."""
        entry = self._unsent.get(request_id)
        if entry is not None:
            entry.timeline.enter("held", self._clock() if entry.was_sent else entry.timeline.began_at)

    def note_sent(self, request_id: str, message_number: int) -> None:
        """Note the number of the message that sends what `take_unsent` returned."""
        self._entries[request_id].message_number = message_number

    def engine_died(self, has_begun: Callable[[int], bool]) -> list[str]:
        """Hold all that the engine had.

        Args:
            has_begun: whether the engine had begun to compute a request, by the number of its message.

        Returns:
            The request that is certainly faulty, if there is one; it is still live, and the caller ends it.
        """
        faulty_ids = []
        if self._isolated is not None:
            isolated = self._entries[self._isolated]
            isolated.num_isolated_deaths += has_begun(isolated.message_number)
            if isolated.num_isolated_deaths >= MAX_ISOLATED_DEATHS:
                faulty_ids.append(self._isolated)
            self._isolated = None
        for entry in self._entries.values():
            if entry.is_sent:
                _clear_if_served(entry)
                entry.num_crashes += has_begun(entry.message_number)
                self._hold(entry)
        self._unsent = self._entries.copy()
        self._suspects = deque(
            request_id for request_id, entry in self._entries.items() if entry.num_crashes >= MAX_CRASHES
        )
        return faulty_ids

    def give_up(self) -> list[JournalEntry]:
        """Forget the held requests, but for suspects, so that another journal can `take_over`."""
        given = [entry for request_id, entry in self._unsent.items() if request_id not in self._suspects]
        for entry in given:
            del self._entries[entry.request.request_id], self._unsent[entry.request.request_id]
        return given

    def give_up_all(self) -> list[JournalEntry]:
        """Forget all requests, also those that the engine has, so that other journals can `take_over`. There are no
        suspects."""
        given = self.entries
        for entry in given:
            if entry.is_sent:
                _clear_if_served(entry)
            self._hold(entry)
        self._entries, self._unsent = {}, {}
        return given

    def take_over(self, entry: JournalEntry) -> None:
        """Take a request that another journal gave up: it continues with its tokens so far."""
        self._entries[entry.request.request_id] = self._unsent[entry.request.request_id] = entry

    def take_unsent(self, *, holds_new: bool = False) -> list[EngineCoreRequest]:
        """The requests to send now to an engine that is up: one suspect, or all held requests when there is none; with
        `holds_new` only those that an engine has had."""
        if self._isolated is not None:
            return []
        while self._suspects:
            suspect = self._unsent.pop(self._suspects.popleft(), None)
            if suspect is not None:  # it may have been aborted
                self._isolated = suspect.request.request_id
                return [self._send(suspect, max_new_tokens=ISOLATION_TOKENS)]
        unsent, self._unsent = self._unsent, {}
        if holds_new:
            self._unsent = {request_id: entry for request_id, entry in unsent.items() if not entry.was_sent}
            unsent = {request_id: entry for request_id, entry in unsent.items() if entry.was_sent}
        return [self._send(entry) for entry in unsent.values()]

    def note_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """Note the outputs on their way to the client. A request that ends only because it was isolated continues."""
        now = self._clock()
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            if entry.timeline.phase != "decode" and output.new_token_ids:
                entry.timeline.token(now)
            entry.output_token_ids += output.new_token_ids
            entry.num_preemptions = max(entry.num_preemptions, output.num_preemptions)
            if output.request_id == self._isolated and output.finish_reason is not None:
                self._clear(entry, output)
            if output.finish_reason is not None:
                self.remove(output.request_id)

    def note_changes(self, changes: Iterable[PhaseChange]) -> None:
        """Note what the engine did with requests; before the outputs of the same message."""
        note_changes(changes, self._timeline_of, self._clock())

    def _timeline_of(self, request_id: str) -> Timeline | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.timeline

    def _hold(self, entry: JournalEntry) -> None:
        entry.is_sent = False
        entry.timeline.enter("held", self._clock())

    def _clear(self, entry: JournalEntry, output: EngineCoreOutput) -> None:
        """The isolated request has its tokens, or has ended."""
        request = entry.request
        limit = max_output_tokens(len(request.prompt_token_ids), request.sampling_params, self._max_model_len)
        if output.finish_reason is FinishReason.LENGTH and len(entry.output_token_ids) < limit:
            output.finish_reason = None
        self._isolated = None
        entry.num_crashes, entry.num_isolated_deaths = 0, 0
        self._hold(entry)
        self._unsent[request.request_id] = entry
        if not self._suspects:  # all go on, in their old order
            self._unsent = {request_id: one for request_id, one in self._entries.items() if not one.is_sent}

    def _send(self, entry: JournalEntry, max_new_tokens: int | None = None) -> EngineCoreRequest:
        request, options = entry.request, entry.request.options
        if options.deadline_ms is not None:
            left_ms = options.deadline_ms - 1000 * (self._clock() - entry.timeline.began_at)
            options = msgspec.structs.replace(options, deadline_ms=max(left_ms, SHORTEST_DEADLINE_MS))
        entry.num_output_tokens_before = len(entry.output_token_ids)
        is_replay, entry.is_sent, entry.was_sent = entry.was_sent, True, True
        entry.timeline.sent(self._clock())
        return msgspec.structs.replace(
            request,
            options=options,
            prompt=None,
            output_token_ids=entry.output_token_ids.copy(),
            num_preemptions=entry.num_preemptions,
            max_new_tokens=request.max_new_tokens if max_new_tokens is None else max_new_tokens,
            is_replay=is_replay,
        )


def _clear_if_served(entry: JournalEntry) -> None:
    """Clear a request that has got tokens since it was last sent: it did not kill the engine before."""
    if len(entry.output_token_ids) - entry.num_output_tokens_before >= ISOLATION_TOKENS:
        entry.num_crashes = 0
