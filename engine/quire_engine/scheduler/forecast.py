"""Predicts when waiting requests have their first tokens, if those before them are computed first.

It simulates the next steps in numbers alone: steps as large as they may be, rows that end after as many tokens as such
requests usually have, and the prompts in their order. It knows neither requests nor queues.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine.scheduler.step_time import StepLoad, StepTime

MAX_STEPS = 4000
"""Most steps that are simulated; a request that has not begun by then begins at that time at the earliest."""
_IN_PART = 0.5
"""Assumed share of the time that a prompt takes in steps of its own: in steps shared with others it may take less."""


@dataclass(slots=True)
class Upcoming:
    """A request that has tokens to compute, in numbers."""

    num_left: int
    """Tokens to compute until its next one is sampled."""
    num_computed: int
    num_output_left: float
    """Output tokens that are likely to follow."""
    num_blocks: int
    """Blocks that it has to add for these tokens."""
    num_held_blocks: int
    is_running: bool
    first_token_within: float
    """Seconds; a waiting request that cannot have its next token by then is left out."""
    begins: float = 0.0
    first_token: float = math.inf
    """The result: seconds until it begins, and until it has its next token."""


@dataclass(slots=True)
class Forecast:
    """The engine at some time of the simulation."""

    times: StepTime
    max_num_batched_tokens: int
    max_running: int
    num_free_blocks: int
    step_seconds: float
    """How long a step with rows and prompts may take."""
    least_chunk: int
    """Prompt tokens of a step in any case."""
    seconds: float = 0.0
    num_steps: float = 0.0
    num_prompts: int = 0
    """Prompts that have begun."""
    context: float = 0.0
    """Positions that all rows attend to."""
    ends: list[tuple[float, int]] = field(default_factory=list)
    """A heap: after which step each row ends, and the blocks that it gives back."""

    def run(self, rows: Sequence[Upcoming], prompts: Sequence[Upcoming]) -> None:
        """Fill in `begins` and `first_token` of requests with more to compute.

        Args:
            rows: requests that run, and have one token left to compute at a time.
            prompts: the others, running or waiting, in their order.
        """
        self.ends = [(one.num_output_left, one.num_held_blocks) for one in rows]
        heapq.heapify(self.ends)
        self.context = float(sum(one.num_computed for one in rows))
        self.num_prompts = sum(one.is_running for one in prompts)
        pending = list(prompts)
        for _ in range(MAX_STEPS):
            if not pending:
                return
            pending = self._step(pending)
        for one in pending:
            one.begins = one.first_token = self.seconds

    def _step(self, pending: list[Upcoming]) -> list[Upcoming]:
        """Simulate one step, or all steps until a row ends. Returns the prompts that are still pending."""
        while self.ends and self.ends[0][0] <= self.num_steps:
            self.context -= self.context / len(self.ends)
            self.num_free_blocks += heapq.heappop(self.ends)[1]
        rows = StepLoad(0, len(self.ends), self.context)
        room = self._room(rows)
        full_step = self.times.seconds(rows._replace(num_prompt_tokens=room, prompt_context=room * room / 2))
        tokens, context = 0, 0.0
        finished: list[Upcoming] = []
        left: list[Upcoming] = []
        may_begin = True
        for place, one in enumerate(pending):
            if tokens == room:
                left += pending[place:]
                break
            if not one.is_running:
                num_own_steps = -(-one.num_left // room)
                if self.seconds + num_own_steps * full_step * _IN_PART > one.first_token_within:
                    one.begins, one.first_token = self.seconds, self.seconds + num_own_steps * full_step
                    continue
                may_begin = may_begin and self._begin(one)
            number = min(one.num_left, room - tokens) if one.is_running else 0
            tokens += number
            context += number * (one.num_computed + number / 2)
            one.num_left -= number
            one.num_computed += number
            (left if one.num_left else finished).append(one)
        if tokens:
            self.seconds += self.times.seconds(rows._replace(num_prompt_tokens=tokens, prompt_context=context))
            self.num_steps += 1
            self.context += len(self.ends)
        elif self.ends:
            num_steps = max(self.ends[0][0] - self.num_steps, 1.0)
            self.seconds += num_steps * self.times.seconds(rows)
            self.num_steps += num_steps
        for one in finished:
            self.num_prompts -= 1
            one.first_token = self.seconds
            self.context += one.num_computed
            heapq.heappush(self.ends, (self.num_steps + one.num_output_left, one.num_held_blocks + one.num_blocks))
        return left

    def _room(self, rows: StepLoad) -> int:
        """Prompt tokens of a step beside these rows."""
        room = float(self.max_num_batched_tokens - rows.num_rows)
        if rows.num_rows and self.step_seconds < math.inf:
            room = min(room, max(self.times.prompt_tokens_within(self.step_seconds, rows), self.least_chunk))
        return max(int(room), 1)

    def _begin(self, one: Upcoming) -> bool:
        """Let a waiting request run, if there is a place and there are blocks for it, or no other request runs."""
        num_running = self.num_prompts + len(self.ends)
        if num_running and (num_running >= self.max_running or one.num_blocks > self.num_free_blocks):
            return False
        self.num_free_blocks -= one.num_blocks
        self.num_prompts += 1
        one.is_running, one.begins = True, self.seconds
        return True
