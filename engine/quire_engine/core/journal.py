"""Journal: what the frontend knows of each live request, so that an engine that dies loses none of them.

It knows no process, no socket and no text: requests go in, outputs pass by, and it says what an engine has to be sent.

::

    add ──► held ──► sent ──► (outputs pass by: the tokens are noted) ──► finished, forgotten
             ▲         │ the engine dies
             └─────────┘ a replay: with its tokens so far as output, it goes on where it was

A death counts against a request when that engine had begun to work for it: what was only sent, and waited for its turn
or its grammar, cannot have been the cause. At the second death that counts a request is a suspect, unless it had got
`TRIAL_TOKENS` since the first: that was its trial. (So engines that are killed from outside now and then make no
suspects.) Suspects are tried one at a time, each with the engine to itself, for `TRIAL_TOKENS`; meanwhile everybody
else is held:

1. The suspect gets its tokens (or ends): it is acquitted, and held until all suspects have been tried.
2. The engine dies with nobody but the suspect in it: the suspect is tried again, and at the second such death that
   counts it is the culprit, and ends with an error. (One such death can be somebody else's doing.)
3. When no suspect is left, all who are held are sent.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire_engine.scheduler.validation import max_output_tokens

__all__ = ["Journal"]

MAX_CRASHES = 2
"""Deaths that count after which a request is a suspect."""
MAX_TRIAL_DEATHS = 2
TRIAL_TOKENS = 2
"""The first comes of a step that computes all tokens of the request, the second of one like all later steps: a request
that kills engines in either is found."""
SHORTEST_DEADLINE_MS = 0.001


@dataclass(slots=True)
class _Entry:
    """One live request."""

    request: EngineCoreRequest
    added_at: float
    output_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_crashes: int = 0
    """Deaths of an engine that had begun to work for it, since it came or was acquitted."""
    num_trial_deaths: int = 0
    """Those of an engine that had nobody else."""
    num_output_tokens_before: int = 0
    """What it had when it was last sent."""
    is_sent: bool = False
    message_number: int = 0
    """Of the message in which the present engine got it."""
    was_sent: bool = False
    """To any engine: what was taken once is not refused for want of room later."""


class Journal:
    """The live requests of one engine, in the order in which they came.

    Args:
        max_model_len: the engine's.
        clock: seconds, monotonic; deadlines are counted with it.
    """

    def __init__(self, max_model_len: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_model_len = max_model_len
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._unsent: dict[str, _Entry] = {}
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def request_ids(self) -> list[str]:
        """All live requests."""
        return list(self._entries)

    @property
    def num_sent(self) -> int:
        """Requests that the engine has."""
        return len(self._entries) - len(self._unsent)

    def is_held(self, request_id: str) -> bool:
        """Whether it is live, and no engine has it."""
        return request_id in self._unsent

    def add(self, request: EngineCoreRequest) -> None:
        """Take a new request; `take_unsent` gives it out when its time has come."""
        entry = _Entry(request, self._clock())
        self._entries[request.request_id] = self._unsent[request.request_id] = entry

    def remove(self, request_id: str) -> bool:
        """Forget a request that ends on this side; True when the engine has to hear of it. It may not be known."""
        entry = self._entries.pop(request_id, None)
        self._unsent.pop(request_id, None)
        if request_id == self._on_trial:
            self._on_trial = None
        return entry is not None and entry.is_sent

    def note_sent(self, request_id: str, message_number: int) -> None:
        """What `take_unsent` gave out is on its way, in a message with this number."""
        self._entries[request_id].message_number = message_number

    def engine_died(self, has_begun: Callable[[int], bool]) -> list[str]:
        """All that was with the engine is held again.

        Args:
            has_begun: whether the engine had begun to work for a request, by the number of its message.

        Returns:
            The request whose fault it was for certain, if there is one; it is still live, and for the caller to end.
        """
        culprits = []
        if self._on_trial is not None:
            on_trial = self._entries[self._on_trial]
            on_trial.num_trial_deaths += has_begun(on_trial.message_number)
            if on_trial.num_trial_deaths >= MAX_TRIAL_DEATHS:
                culprits.append(self._on_trial)
            self._on_trial = None
        for entry in self._entries.values():
            if entry.is_sent:
                if len(entry.output_token_ids) - entry.num_output_tokens_before >= TRIAL_TOKENS:
                    entry.num_crashes = 0
                entry.num_crashes += has_begun(entry.message_number)
                entry.is_sent = False
        self._unsent = self._entries.copy()
        self._suspects = deque(
            request_id for request_id, entry in self._entries.items() if entry.num_crashes >= MAX_CRASHES
        )
        return culprits

    def take_unsent(self) -> list[EngineCoreRequest]:
        """What an engine that is up is to be sent now: one suspect, or all who are held when there is none."""
        if self._on_trial is not None:
            return []
        while self._suspects:
            suspect = self._unsent.pop(self._suspects.popleft(), None)
            if suspect is not None:  # it may have been aborted
                self._on_trial = suspect.request.request_id
                return [self._send(suspect, max_new_tokens=TRIAL_TOKENS)]
        unsent, self._unsent = self._unsent, {}
        return [self._send(entry) for entry in unsent.values()]

    def take_note(self, outputs: list[EngineCoreOutput]) -> None:
        """Outputs pass by on their way to the client. One that ends only because it was on trial goes on."""
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            entry.output_token_ids += output.new_token_ids
            entry.num_preemptions = max(entry.num_preemptions, output.num_preemptions)
            if output.request_id == self._on_trial and output.finish_reason is not None:
                self._acquit(entry, output)
            if output.finish_reason is not None:
                self.remove(output.request_id)

    def _acquit(self, entry: _Entry, output: EngineCoreOutput) -> None:
        """The trial is over, by its last token or otherwise."""
        request = entry.request
        limit = max_output_tokens(len(request.prompt_token_ids), request.sampling_params, self._max_model_len)
        if output.finish_reason is FinishReason.LENGTH and len(entry.output_token_ids) < limit:
            output.finish_reason = None
        self._on_trial = None
        entry.num_crashes, entry.num_trial_deaths, entry.is_sent = 0, 0, False
        self._unsent[request.request_id] = entry
        if not self._suspects:  # all go on, in their old order
            self._unsent = {request_id: one for request_id, one in self._entries.items() if not one.is_sent}

    def _send(self, entry: _Entry, max_new_tokens: int | None = None) -> EngineCoreRequest:
        request, deadline_ms = entry.request, entry.request.deadline_ms
        if deadline_ms is not None:
            deadline_ms = max(deadline_ms - 1000 * (self._clock() - entry.added_at), SHORTEST_DEADLINE_MS)
        entry.num_output_tokens_before = len(entry.output_token_ids)
        is_replay, entry.is_sent, entry.was_sent = entry.was_sent, True, True
        return msgspec.structs.replace(
            request,
            deadline_ms=deadline_ms,
            output_token_ids=entry.output_token_ids.copy(),
            num_preemptions=entry.num_preemptions,
            max_new_tokens=max_new_tokens,
            is_replay=is_replay,
        )
