"""StepBudget: what is left of a step, in tokens and in prompts that take several steps.

A long prompt that exceeds the tokens simply gets what is left of them: chunked prefill. Only `max_num_partial_prefills`
prompts are in such a state at a time, of which `max_long_partial_prefills` are long; prompts that fit into the step
pass the others by. So no prompt, however long, keeps the others from going on or from starting.
"""

from quire_engine.config import SchedulerConfig

__all__ = ["StepBudget"]


class StepBudget:
    """Counts what the requests of one step take. Knows numbers of tokens, and nothing of requests or blocks."""

    __slots__ = ("_config", "_num_long_partial_prefills", "_num_partial_prefills", "num_tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.num_tokens = config.max_num_batched_tokens
        """Tokens that the step still has room for."""
        self._num_partial_prefills = 0
        self._num_long_partial_prefills = 0

    def chunk(self, num_left: int, limit: int) -> int:
        """How many of a request's `num_left` uncomputed tokens go into this step, at most `limit`."""
        threshold = self._config.long_prefill_token_threshold
        return min(num_left, limit, threshold) if threshold else min(num_left, limit)

    def may_be_partial(self, num_left: int) -> bool:
        """Whether one more prompt, of which `num_left` tokens are not computed, may take several steps."""
        if self._num_partial_prefills >= self._config.max_num_partial_prefills:
            return False
        return not self._is_long(num_left) or self._num_long_partial_prefills < self._config.max_long_partial_prefills

    def count_partial_prefill(self, num_left: int) -> None:
        """Take note of a prompt that this step does not finish."""
        self._num_partial_prefills += 1
        self._num_long_partial_prefills += self._is_long(num_left)

    def _is_long(self, num_tokens: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_tokens
