"""WorkerKnowledge: tracks what the workers know about requests, so that a step sends only what is new.

::

    introduce: all of its tokens ──► in each step: new blocks, counts ──► dropped: finished, or preempted
        ▲                                                                             │
        └───────────────────────── when a preempted one runs again ◄──────────────────┘
"""

from collections.abc import Mapping

import msgspec

from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.scheduler.request import Request


class WorkerKnowledge:
    """Writes into a step what the workers do not know yet.

    Args:
        sends_new_token_ids: whether to send sampled tokens, because there are ranks that do not sample.
        ranks_tell_each_other: whether the rank that samples sends its tokens to the others at once. That does not work
            with drafts, as only the step's result says which tokens count. So the tokens of requests that are drafted
            for are sent here.
    """

    def __init__(self, sends_new_token_ids: bool, ranks_tell_each_other: bool) -> None:
        self._sends_new_token_ids = sends_new_token_ids
        self._ranks_tell_each_other = ranks_tell_each_other
        self._dropped_request_ids: list[str] = []
        """Finished or preempted since the last step."""

    def introduce(self, request: Request, block_ids: list[int], output: SchedulerOutput) -> None:
        """Send everything about a request that begins to run, or to run again."""
        request.num_known_tokens, params = request.num_tokens, request.sampling_params
        if params.structured_outputs is not None:  # the schema may be long; workers have bitmasks in its place
            params = msgspec.structs.replace(params, structured_outputs=None)
        output.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.all_token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=params,
                stop_token_ids=sorted(request.ending_token_ids),
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                prompt_parts=request.prompt_parts,
                pooling_params=request.options.pooling_params,
                adapter_slot=request.adapter_slot,
            )
        )

    def drop(self, request_id: str) -> None:
        """Let the workers forget a request that no longer runs."""
        self._dropped_request_ids.append(request_id)

    def complete(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Add to a step the dropped requests, and the tokens that its requests sampled since their last step."""
        output.dropped_request_ids, self._dropped_request_ids = self._dropped_request_ids, []
        if not self._sends_new_token_ids:
            return
        cached = output.cached_requests
        running = [requests[request_id] for request_id in cached.request_ids]
        if self._ranks_tell_each_other and not any(request.is_drafted for request in running):
            return
        for request in running:
            is_sent = not self._ranks_tell_each_other or request.is_drafted
            cached.new_token_ids.append(request.all_token_ids[request.num_known_tokens :] if is_sent else [])
            request.num_known_tokens = request.num_tokens

    def step_was_not_sent(self, output: SchedulerOutput) -> None:
        """Send the dropped requests again with the next step: the workers never received this one."""
        self._dropped_request_ids[:0] = output.dropped_request_ids
