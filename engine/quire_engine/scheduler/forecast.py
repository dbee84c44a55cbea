"""Predicts when waiting requests have their first tokens, if those before them are computed first.

It simulates the next steps in numbers alone: steps as large as they may be, rows that end after as many tokens as such
requests usually have, and the prompts in their order. It knows neither requests nor queues.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.scheduler.cost_model import CostModel, StepLoad

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
    num_held_blocks: int = 0
    is_running: bool = True
    first_token_within: float = math.inf
    """Seconds; a waiting request that cannot have its next token by then is left out."""
    begins: float = 0.0
    first_token: float = math.inf
    """The result: seconds until it begins, and until it has its next token."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Limits and free resources of the engine."""

    max_num_batched_tokens: int
    max_running: int
    num_free_blocks: int
    step_seconds: float = math.inf
    """How long a step with rows and prompts may take."""
    least_chunk: int = 1
    """Prompt tokens of a step in any case."""


def forecast(costs: CostModel, outlook: Outlook, rows: Sequence[Upcoming], prompts: Sequence[Upcoming]) -> None:
    """Fill in `begins` and `first_token` of each of the prompts.

    Args:
        costs: of steps.
        outlook: limits and free resources.
        rows: requests that run, and have one token left to compute at a time.
        prompts: those with more to compute, running or waiting, in their order.
    """
    ends = [(one.num_output_left, one.num_held_blocks) for one in rows]
    heapq.heapify(ends)
    simulation = _Simulation(costs, outlook, ends, float(sum(one.num_computed for one in rows)))
    simulation.num_prompts = sum(one.is_running for one in prompts)
    pending = list(prompts)
    for _ in range(MAX_STEPS):
        if not pending:
            return
        pending = simulation.step(pending)
    for one in pending:
        one.begins = one.first_token = max(simulation.seconds, 0.0)


class _Simulation:
    """The engine at some time of the simulation."""

    def __init__(self, costs: CostModel, outlook: Outlook, ends: list[tuple[float, int]], context: float) -> None:
        self._costs = costs
        self._outlook = outlook
        self._ends = ends
        """A heap: after which step each row ends, and the blocks that it gives back."""
        self._context = context
        self._num_free_blocks = outlook.num_free_blocks
        self._num_steps = 0.0
        self.seconds = 0.0
        self.num_prompts = 0
        """Prompts that have begun."""

    def step(self, pending: list[Upcoming]) -> list[Upcoming]:
        """Simulate one step, or all steps until a row ends. Returns the prompts that are still pending."""
        while self._ends and self._ends[0][0] <= self._num_steps:
            self._context -= self._context / len(self._ends)
            self._num_free_blocks += heapq.heappop(self._ends)[1]
        rows = StepLoad(0, len(self._ends), self._context)
        room = self._room(rows)
        tokens, context, finished, left_out = 0, 0.0, [], []
        full_step = self._costs.seconds(rows._replace(num_prompt_tokens=room, prompt_context=room * room / 2))
        may_begin = True
        for one in pending:
            if tokens == room:
                break
            if not one.is_running:
                if self.seconds + -(-one.num_left // room) * full_step * _IN_PART > one.first_token_within:
                    one.begins, one.first_token = self.seconds, self.seconds + -(-one.num_left // room) * full_step
                    left_out.append(one)
                    continue
                may_begin = may_begin and self._begin(one)
                if not may_begin:
                    continue
            number = min(one.num_left, room - tokens)
            tokens += number
            context += number * (one.num_computed + number / 2)
            one.num_left -= number
            one.num_computed += number
            if one.num_left == 0:
                finished.append(one)
        if tokens:
            self.seconds += self._costs.seconds(rows._replace(num_prompt_tokens=tokens, prompt_context=context))
            self._num_steps += 1
            self._context += len(self._ends)
        elif self._ends:
            num_steps = max(self._ends[0][0] - self._num_steps, 1.0)
            self.seconds += num_steps * self._costs.seconds(rows)
            self._num_steps += num_steps
        for one in finished:
            self.num_prompts -= 1
            one.first_token = self.seconds
            self._context += one.num_computed
            heapq.heappush(self._ends, (self._num_steps + one.num_output_left, one.num_held_blocks + one.num_blocks))
        done = {id(one) for one in finished + left_out}
        return [one for one in pending if id(one) not in done] if done else pending

    def _room(self, rows: StepLoad) -> int:
        """Prompt tokens of a step beside these rows."""
        room = float(self._outlook.max_num_batched_tokens - rows.num_rows)
        if rows.num_rows and self._outlook.step_seconds < math.inf:
            within = self._costs.prompt_tokens_within(self._outlook.step_seconds, rows)
            room = min(room, max(within, self._outlook.least_chunk))
        return max(int(room), 1)

    def _begin(self, one: Upcoming) -> bool:
        """Let a waiting request run, if there is a place and there are blocks for it, or no other request runs."""
        num_running = self.num_prompts + len(self._ends)
        if num_running and (num_running >= self._outlook.max_running or one.num_blocks > self._num_free_blocks):
            return False
        self._num_free_blocks -= one.num_blocks
        self.num_prompts += 1
        one.is_running, one.begins = True, self.seconds
        return True
