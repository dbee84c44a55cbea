"""Disaggregation: some replicas compute prompts, the others all that follows. It knows no process and no socket.

::

    request ─► a prefill replica: prompt and first token ──────────► the client
                     │ saves the prompt's blocks (`kv_connector/`)       ▲
                     ▼                                                   │
               a decode replica: loads them, and goes on with the second token

A prefill replica gets a request that ends after one token (`max_new_tokens`). When it does, the client does not see it:
the request goes on at a decode replica, from an entry like those that a journal gives up when an engine has died. So
the blocks are only what need not be computed: whatever becomes of them or of either replica, the tokens are the same.

The second replica gets the request when the first has sent the token, and often before the blocks are in their place:
then it waits a little for them (`KVLoad.is_coming`).

Requests of which no block is to be handed over go to a decode replica at once. Where no replica of a kind can take a
request, one of the other kind does: all of them are whole engines. On several hosts it is the same: a rank says which
role an engine has, wherever it joins from, and ranks beyond those that the setting counts go on from prompts.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from quire_engine.config import DisaggregationConfig
from quire_engine.core.journal import JournalEntry
from quire_engine.messages import EngineCoreOutput, EngineCoreReady, EngineCoreRequest, FinishReason
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.timeline import Timeline


class Disaggregation:
    """Says which replicas may get a request, and when it goes on at another one.

    Args:
        roles: how many replicas have each; prefill replicas come first.
        clock: seconds, monotonic; the journals' one.
    """

    def __init__(self, roles: DisaggregationConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_prefill = roles.prefill
        self._clock = clock
        self._prefills: dict[str, tuple[JournalEntry, int]] = {}
        """Requests that a prefill replica has, or is to have, and the most tokens that each can get."""

    def add(
        self, request: EngineCoreRequest, ready: EngineCoreReady, up: Sequence[int], timeline: Timeline | None = None
    ) -> EngineCoreRequest:
        """A new request, as its first replica is to get it.

        Args:
            request: as the frontend made it.
            ready: of the engines.
            up: the replicas that are up; where all of them have the same role, no replica can take it over.
            timeline: what the journals write.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = max_output_tokens(num_prompt_tokens, request.sampling_params, ready.max_model_len)
        num_prefill = sum(index < self._num_prefill for index in up)
        if num_prompt_tokens < ready.block_size or max_tokens <= 1 or num_prefill in (0, len(up)):
            return request
        entry = JournalEntry(request, timeline or Timeline(self._clock()), was_sent=True)
        self._prefills[request.request_id] = entry, max_tokens
        return msgspec.structs.replace(request, max_new_tokens=1)

    def remove(self, request_id: str) -> None:
        """A request ends on this side, if it is known."""
        self._prefills.pop(request_id, None)

    def candidates(self, request: EngineCoreRequest, candidates: Sequence[int]) -> Sequence[int]:
        """Those of some replicas that have the role which a request needs; all, if none of them has it."""
        wants_prefill = request.request_id in self._prefills
        return [index for index in candidates if (index < self._num_prefill) == wants_prefill] or candidates

    def take_prefilled(self, outputs: Sequence[EngineCoreOutput]) -> list[JournalEntry]:
        """Requests that go on at another replica now. Their outputs do not say any more that they have ended."""
        entries = []
        for output in outputs:
            if output.request_id not in self._prefills:
                continue
            entry, max_tokens = self._prefills[output.request_id]
            entry.output_token_ids += output.new_token_ids
            entry.num_preemptions = max(entry.num_preemptions, output.num_preemptions)
            if output.finish_reason is None:
                continue
            del self._prefills[output.request_id]
            if output.finish_reason is FinishReason.LENGTH and len(entry.output_token_ids) < max_tokens:
                output.finish_reason = None
                entry.request = msgspec.structs.replace(entry.request, was_prefilled=True)
                entries.append(entry)
        return entries
