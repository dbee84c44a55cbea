"""CostModel: how long a step takes, by what it computes, learned from the steps themselves.

The time of a step is about (Sarathi-Serve, section 3; SLOs-Serve, section 4)::

    seconds = fixed + a · prompt tokens + b · rows + c · positions that the rows attend to
                                                   + d · positions that the prompt tokens attend to

with coefficients that are never below zero. Measurements are kept by the kind of step, each number of its load rounded
to a power of two. Each kind has one mean, however often it occurs, so that a thousand steps of decodes do not outweigh
those of prompts, and these are not forgotten while no prompt comes. The coefficients fit the means. A factor follows
what all kinds have in common: the machine's other load.

`step_costs` knows no contexts, no difference between prompts and decodes, and no sizes that did not occur lately; but
it follows any curve, on which the worth of drafts depends. Both use the same means.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire_engine.messages import SchedulerOutput
from quire_engine.scheduler.step_costs import MEAN_WEIGHT, moved_mean

_MAX_KINDS = 96
"""Most kinds of steps that are kept; the least recent one is dropped."""
_STEPS_PER_FIT = 8
_MOST_MEASUREMENTS = 8
"""Most measurements that count in the weight of a kind."""
_HALF_AGE = 1024.0
"""Steps after which a kind's mean counts half as much."""
_LEAST_STEPS = 16
_LEAST_PROMPT_STEPS = 4
_LARGEST_ERROR = 0.5
"""Mean error up to which predictions are trusted, relative to the larger of prediction and measurement: half as long is
as wrong as twice as long."""
_MEAN_WEIGHT = 0.05
_LARGEST_RATIO = 2.0
"""A measurement counts as at most this many times the prediction."""
_PACES = 0.25, 4.0
_RIDGE = 1e-6


class StepLoad(NamedTuple):
    """What a step computes."""

    num_prompt_tokens: int = 0
    """Tokens of prompts, and tokens that are computed again after a preemption."""
    num_rows: int = 0
    """The others: next tokens, and drafts."""
    context: float = 0.0
    """Positions that the rows attend to, in all."""
    prompt_context: float = 0.0
    """Positions that the prompt tokens attend to, in all."""

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepLoad":
        """The load of a scheduled step."""
        scheduled, drafts = output.num_scheduled_tokens, output.draft_token_ids
        prompt_tokens = rows = 0
        context = prompt_context = 0.0
        cached = output.cached_requests
        for request_id, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            number = scheduled[request_id]
            if number == 1 or request_id in drafts:
                rows += number
                context += number * computed
            else:
                prompt_tokens += number
                prompt_context += number * (computed + number / 2)
        for new in output.new_requests:
            number = scheduled[new.request_id]
            prompt_tokens += number
            prompt_context += number * (new.num_computed_tokens + number / 2)
        return cls(prompt_tokens, rows, context, prompt_context)


@dataclass(slots=True)
class _Kind:
    """Means of the steps of one kind."""

    load: npt.NDArray[np.float64]
    seconds: float
    num_measurements: int
    last_step: int


class CostModel:
    """Learns from `record`, and predicts with `seconds`. Takes a few microseconds per step."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._coefficients = [0.0] * (1 + len(StepLoad._fields))
        self._pace = 1.0
        self._error = 1.0
        self._num_predicted = 0
        self._num_steps = 0
        self._num_prompt_steps = 0

    @property
    def is_confident(self) -> bool:
        """Whether enough steps were measured, of prompts too, and the last ones took about as long as predicted."""
        return (
            self._num_steps >= _LEAST_STEPS
            and self._num_prompt_steps >= _LEAST_PROMPT_STEPS
            and self._error <= _LARGEST_ERROR
        )

    def seconds(self, load: StepLoad) -> float:
        """How long a step takes; 0 before the first measurement."""
        fixed, prompt_token, row, position, prompt_position = self._coefficients
        return self._pace * (
            fixed
            + prompt_token * load.num_prompt_tokens
            + row * load.num_rows
            + position * load.context
            + prompt_position * load.prompt_context
        )

    def prompt_tokens_within(self, seconds: float, rows: StepLoad, computed: int = 0) -> float:
        """How many prompt tokens fit into a step of some duration beside these rows; may be below 0 or infinite.

        Args:
            seconds: of the whole step.
            rows: its load without the prompt's.
            computed: tokens of the prompt that precede these.
        """
        _, prompt_token, _, _, prompt_position = self._coefficients
        left = seconds - self.seconds(rows)
        linear, square = self._pace * (prompt_token + prompt_position * computed), self._pace * prompt_position / 2
        if left <= 0:
            return left / linear if linear else -math.inf
        root = linear + math.sqrt(linear * linear + 4 * square * left)
        return 2 * left / root if root else math.inf

    def record(self, load: StepLoad, seconds: float) -> None:
        """Add a measured step."""
        self._num_steps += 1
        self._num_prompt_steps += load.num_prompt_tokens > 0
        expected = self.seconds(load)
        if expected > 0:
            ratio = min(max(seconds / expected, 1 / _LARGEST_RATIO), _LARGEST_RATIO)
            self._num_predicted += 1
            error = abs(expected - seconds) / max(expected, seconds)
            self._error += max(1 / self._num_predicted, _MEAN_WEIGHT) * (error - self._error)
            self._pace = min(max(self._pace * ratio**_MEAN_WEIGHT, _PACES[0]), _PACES[1])
        self._take(load, seconds / self._pace, expected / self._pace)
        if self._num_steps % _STEPS_PER_FIT == 0:
            self._fit()

    def _take(self, load: StepLoad, seconds: float, expected: float) -> None:
        key = tuple(int(number).bit_length() for number in load)
        kind = self._kinds.get(key)
        if kind is None:
            if expected > 0:
                seconds = min(seconds, _LARGEST_RATIO * expected)
            elif self._num_steps <= 2:
                return  # the processor's caches were cold
            if len(self._kinds) >= _MAX_KINDS:
                del self._kinds[min(self._kinds, key=lambda one: self._kinds[one].last_step)]
            self._kinds[key] = _Kind(np.array(load, np.float64), seconds, 1, self._num_steps)
            return
        kind.load += (np.array(load, np.float64) - kind.load) * MEAN_WEIGHT
        kind.seconds = moved_mean(kind.seconds, seconds)
        kind.num_measurements = min(kind.num_measurements + 1, _MOST_MEASUREMENTS)
        kind.last_step = self._num_steps

    def _fit(self) -> None:
        """Weighted least squares of relative errors. Coefficients below 0 are left out, the lowest first."""
        kinds = list(self._kinds.values())
        if not kinds:
            return
        seconds = np.array([kind.seconds for kind in kinds])
        ages = np.array([self._num_steps - kind.last_step for kind in kinds])
        weights = np.sqrt(np.array([kind.num_measurements for kind in kinds]) * 0.5 ** (ages / _HALF_AGE)) / seconds
        rows = np.column_stack([np.ones(len(kinds)), np.array([kind.load for kind in kinds])]) * weights[:, None]
        scales = np.maximum(np.sqrt((rows * rows).sum(axis=0)), 1e-30)
        rows, target = rows / scales, seconds * weights
        coefficients = np.zeros(rows.shape[1])
        kept = [index for index in range(rows.shape[1]) if scales[index] > 1e-30]
        while kept:
            part = rows[:, kept]
            found = np.linalg.solve(part.T @ part + _RIDGE * np.eye(len(kept)), part.T @ target)
            if found.min() >= 0:
                coefficients[kept] = found / scales[kept]
                break
            del kept[int(found.argmin())]
        self._coefficients = coefficients.tolist()
