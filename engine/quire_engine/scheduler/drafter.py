"""Drafter: adds draft tokens to a step that is otherwise complete."""

import logging
from collections.abc import Mapping

from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import SchedulerOutput
from quire_engine.scheduler.proposer import Proposer
from quire_engine.scheduler.request import Request

__all__ = ["Drafter", "cut_drafts"]

logger = logging.getLogger(__name__)


class Drafter:
    """Gives drafts the tokens and blocks that a step has left. In this step no request waits or is preempted for them.

    Args:
        proposer: drafts the tokens.
        kv_cache: to allocate blocks from.
        vocab_size: drafts are cut before the first token id outside [0, vocab_size).
        max_num_rows: positions that a step may sample: the number that the memory was measured with.
    """

    def __init__(self, proposer: Proposer, kv_cache: KVCacheManager, vocab_size: int, max_num_rows: int) -> None:
        self._proposer = proposer
        self._kv_cache = kv_cache
        self._vocab_size = vocab_size
        self._max_num_rows = max_num_rows

    def take_note(self, request: Request) -> None:
        """Ask the proposer whether it drafts for a new request."""
        try:
            request.is_drafted = self._proposer.drafts_for(request)
        except Exception:
            logger.exception("no tokens are drafted for request %s", request.request_id)
        request.needs_token_values |= request.is_drafted  # a draft follows the last token

    def add_drafts(self, output: SchedulerOutput, requests: Mapping[str, Request], num_tokens: int) -> None:
        """Add drafts to a step, after the last tokens of requests that ran before.

        Args:
            output: the step.
            requests: by id.
            num_tokens: how many tokens the step has room for.
        """
        room = min(num_tokens, self._max_num_rows - len(output.num_scheduled_tokens))
        cached = output.cached_requests
        for index, request_id in enumerate(cached.request_ids):
            request = requests[request_id]
            if not request.is_drafted or request.num_computed_tokens != request.num_tokens:
                continue
            drafts = self._propose(request, min(room, request.max_tokens - request.num_output_tokens - 1))
            if not drafts:
                continue
            block_ids = self._kv_cache.allocate_slots(request, len(drafts))
            if block_ids is None:
                continue
            cached.new_block_ids[index] = cached.new_block_ids[index] + block_ids
            output.num_scheduled_tokens[request_id] += len(drafts)
            output.draft_token_ids[request_id] = drafts
            request.num_computed_tokens += len(drafts)
            room -= len(drafts)

    def _propose(self, request: Request, max_tokens: int) -> list[int]:
        """At most `max_tokens` drafts; the step samples one more token after the last of them."""
        if max_tokens < 1:
            return []
        try:
            drafts = self._proposer.propose(request, max_tokens)[:max_tokens]
        except Exception:
            logger.exception("no more tokens are drafted for request %s", request.request_id)
            request.is_drafted = False
            return []
        for count, token_id in enumerate(drafts):
            if not 0 <= token_id < self._vocab_size:
                return drafts[:count]
        return drafts


def cut_drafts(output: SchedulerOutput, request: Request, num_left: int) -> None:
    """Leave a request only `num_left` drafts in a step that was not submitted yet."""
    drafts = output.draft_token_ids.pop(request.request_id)
    if num_left:
        output.draft_token_ids[request.request_id] = drafts[:num_left]
    output.num_scheduled_tokens[request.request_id] -= len(drafts) - num_left
    request.num_computed_tokens -= len(drafts) - num_left
