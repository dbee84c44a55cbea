"""StepBudget: what is left of a step, in tokens and in partial prefills.

A prompt that exceeds the remaining tokens gets as many as are left: chunked prefill. At most `max_num_partial_prefills`
prompts are partial at a time, and at most `max_long_partial_prefills` of them are long; prompts that fit into the step
overtake the others. So no prompt, however long, keeps others from going on or from starting.
"""

from quire_engine.config import SchedulerConfig


class StepBudget:
    """Counts what the requests of one step take. Knows numbers of tokens, but not requests or blocks."""

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
        """Whether one more prompt, with `num_left` uncomputed tokens, may take several steps."""
        if self._num_partial_prefills >= self._config.max_num_partial_prefills:
            return False
        return not self._is_long(num_left) or self._num_long_partial_prefills < self._config.max_long_partial_prefills

    def count_partial_prefill(self, num_left: int) -> None:
        """Count a prompt that this step does not finish."""
        self._num_partial_prefills += 1
        self._num_long_partial_prefills += self._is_long(num_left)

    def _is_long(self, num_tokens: int) -> bool:
        return 0 < self._config.long_prefill_token_threshold < num_tokens
