"""How long steps take, learned from the steps themselves. Knows numbers, but no requests.

`StepTime` predicts any step, also one that never occurred (Sarathi-Serve, section 3; SLOs-Serve, section 4)::

    seconds = fixed + a · prompt tokens + b · rows + c · positions that the rows attend to
                                                   + d · positions that the prompt tokens attend to

`StepCurve` has the cost of a few more tokens in a step of about the present size, on which the worth of drafts
depends. It knows no contexts and fits nothing, so it follows any curve, and takes a microsecond per step::

    seconds
      │              ╱
      │            ╱      a draft costs what a token of another request costs
      │ ─────────╱
      │  a draft costs nearly nothing
      └──────────────────── tokens

Both keep a mean for each kind of step, however often it occurs, so that a thousand steps of one kind neither outweigh
nor displace those of another.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire_engine.messages import SchedulerOutput

_MEAN_WEIGHT = 0.2
"""Weight of a new measurement against earlier ones."""
_LARGEST_RATIO = 2.0
"""A measurement counts as at most this many times what was expected: other programs may have used the cores."""


def moved_mean(mean: float, seconds: float) -> float:
    """A mean of seconds after one more measurement, which counts as at most `_LARGEST_RATIO` times the mean."""
    return mean + _MEAN_WEIGHT * (min(seconds, _LARGEST_RATIO * mean) - mean)


def after_one_more(known: float, seconds: float, num_measurements: int) -> float:
    """The fastest of four measurements, and a moving mean of more: the first ones are slowed down by cold caches."""
    return min(known, seconds) if num_measurements < 4 else moved_mean(known, seconds)


# -- any step ----------------------------------------------------------------------------------------------------------

_MAX_KINDS = 96
"""Most kinds of steps that are kept; the least recent one is dropped."""
_STEPS_PER_FIT = 8
_LEAST_STEPS, _LEAST_PROMPT_STEPS = 16, 4
_LARGEST_ERROR = 0.5
"""Mean error up to which predictions are trusted, relative to the larger of prediction and measurement: half as long is
as wrong as twice as long."""
_PACE_WEIGHT = 0.05


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
        scheduled, drafts, cached = output.num_scheduled_tokens, output.draft_token_ids, output.cached_requests
        prompts = [(scheduled[new.request_id], new.num_computed_tokens) for new in output.new_requests]
        num_rows, context = 0, 0.0
        for request_id, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
            number = scheduled[request_id]
            if number == 1 or request_id in drafts:
                num_rows += number
                context += number * computed
            else:
                prompts.append((number, computed))
        prompt_context = sum((number * (computed + number / 2) for number, computed in prompts), 0.0)
        return cls(sum(number for number, _ in prompts), num_rows, context, prompt_context)


@dataclass(slots=True)
class _Kind:
    """Means of the steps whose numbers are the same, each rounded to a power of two."""

    load: npt.NDArray[np.float64]
    seconds: float
    last_step: int


class StepTime:
    """Learns from `record`, and predicts with `seconds`. Takes a few microseconds per step.

    The coefficients fit the means of all kinds of steps, and are never below zero. A factor, the pace, follows what all
    kinds have in common: the machine's other load.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], _Kind] = {}
        self._coefficients = [0.0] * (1 + len(StepLoad._fields))
        self._pace = 1.0
        self._error = 1.0
        self._num_predicted = self._num_steps = self._num_prompt_steps = 0

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
            self._error += max(1 / self._num_predicted, _PACE_WEIGHT) * (error - self._error)
            self._pace *= ratio**_PACE_WEIGHT
        self._take(load, seconds / self._pace, expected / self._pace)
        if self._num_steps % _STEPS_PER_FIT == 0 and self._kinds:
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
            self._kinds[key] = _Kind(np.array(load, np.float64), seconds, self._num_steps)
            return
        kind.load += (np.array(load, np.float64) - kind.load) * _MEAN_WEIGHT
        kind.seconds = moved_mean(kind.seconds, seconds)
        kind.last_step = self._num_steps

    def _fit(self) -> None:
        """Least squares of relative errors. Coefficients below 0 are left out, the lowest first."""
        kinds = list(self._kinds.values())
        seconds = np.array([kind.seconds for kind in kinds])
        rows = np.column_stack([np.ones(len(kinds)), np.array([kind.load for kind in kinds])]) / seconds[:, None]
        scales = np.maximum(np.sqrt((rows * rows).sum(axis=0)), 1e-30)
        rows, target = rows / scales, np.ones(len(kinds))
        coefficients = np.zeros(rows.shape[1])
        kept = [index for index in range(rows.shape[1]) if scales[index] > 1e-30]
        while kept:
            found = np.linalg.lstsq(rows[:, kept], target, rcond=None)[0]
            if found.min() >= 0:
                coefficients[kept] = found / scales[kept]
                break
            del kept[int(found.argmin())]
        self._coefficients = coefficients.tolist()


# -- a few more tokens -------------------------------------------------------------------------------------------------

_REMEMBERED = 64
"""Recorded steps after which a size is unknown again, for each of its measurements up to `_MOST_REMEMBERED`: one slow
step must not decide for long. After a quarter of them one without drafts is due again."""
_MOST_REMEMBERED = 16
_UNKNOWN_SLOPE = 0.5
"""Cost of a token beyond the largest known step, relative to the mean cost of a token in a step of that size or of
`_SMALL_STEP`: low enough to try."""
_SMALL_STEP = 16
"""Tokens up to which a step is likely to wait for memory."""
_LOOKED_UP_FOR = 4
"""Recorded steps for which the times are looked up once: it takes 25 µs."""


@dataclass(slots=True)
class _Size:
    """Measurements of one size of step. The first is left out: the processor's caches were cold."""

    last_step: int
    seconds: float = 0.0
    num_measurements: int = 0
    """At most `_MOST_REMEMBERED`."""

    def is_known(self, step: int, steps_each: int = _REMEMBERED) -> bool:
        """Whether the last measurement is at most so many steps old for each that there was."""
        return self.num_measurements > 0 and step - self.last_step <= steps_each * self.num_measurements


class StepCurve:
    """Means of the last times, by number of tokens, and straight lines between them; and the time of proposals.

    Steps with drafts and without are kept apart: they are computed in other ways, on a GPU without and with graphs.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Size] = {}
        self._drafted: dict[int, _Size] = {}
        self._step = 0
        self._looked_up: tuple[int, int, list[float]] = 0, 0, []
        """Recorded steps and number of tokens when the times were looked up last, and the times."""
        self.propose_seconds = 0.0
        """Time of a request's proposal: to look drafts up, or until a model has made the first one."""
        self.draft_seconds = 0.0
        """Time of each further draft of a model."""
        self._num_proposals = self._num_draftings = 0

    def record(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Add a step.

        Args:
            num_tokens: computed tokens, drafts and prompts included.
            seconds: its whole time.
            has_drafts: whether some of the tokens were drafts.
        """
        self._step += 1
        sizes = self._drafted if has_drafts else self._plain
        size = sizes.get(_size_class(num_tokens))
        if size is None:
            sizes[_size_class(num_tokens)] = _Size(self._step)
            return
        if size.is_known(self._step):
            size.seconds = after_one_more(size.seconds, seconds, size.num_measurements)
            size.num_measurements = min(size.num_measurements + 1, _MOST_REMEMBERED)
        else:
            size.seconds, size.num_measurements = seconds, 1
        size.last_step = self._step

    def record_proposals(self, number: int, seconds: float, *, is_upper_bound: bool = False) -> None:
        """Add the time of several requests' proposals to `propose_seconds`.

        Args:
            number: how many.
            seconds: in all.
            is_upper_bound: whether it took longer than usual.
        """
        each, known = seconds / number, self.propose_seconds
        self.propose_seconds = after_one_more(known or each, each, 0 if is_upper_bound else self._num_proposals)
        self._num_proposals += not is_upper_bound

    def record_drafting(self, number: int, seconds: float) -> None:
        """Add the time of `number` further drafts of a model."""
        each = seconds / number
        self.draft_seconds = after_one_more(self.draft_seconds or each, each, self._num_draftings)
        self._num_draftings += 1

    def proposal_seconds(self, num_drafts: int) -> float:
        """Time of a proposal of `num_drafts` drafts, at least one."""
        return self.propose_seconds + (num_drafts - 1) * self.draft_seconds

    def is_unknown(self, num_tokens: int) -> bool:
        """Whether a step of about this size without drafts is due, to measure it."""
        size = self._plain.get(_size_class(num_tokens))
        return size is None or not size.is_known(self._step, _REMEMBERED // 4)

    def are_known(self) -> bool:
        """Whether anything is known of steps without drafts."""
        return any(size.is_known(self._step) for size in self._plain.values())

    def seconds(self, num_tokens: int, num_drafts: int) -> list[float]:
        """How long steps take with 0, 1, 2, … drafts, or more of them, if anything is known of steps without.

        Args:
            num_tokens: of the step without drafts; at least 1.
            num_drafts: the most.
        """
        step, size, seconds = self._looked_up
        if size != num_tokens or len(seconds) <= num_drafts or self._step >= step + _LOOKED_UP_FOR:
            seconds = self._look_up(num_tokens, num_drafts).tolist()
            self._looked_up = self._step, num_tokens, seconds
        return seconds

    def _look_up(self, num_tokens: int, num_drafts: int) -> npt.NDArray[np.float64]:
        plain = self._known(self._plain)
        without = float(_on_curve(np.array([num_tokens]), plain)[0])
        drafted = {size: mean for size, mean in self._known(self._drafted).items() if size > num_tokens}
        # As the curve bends upwards, tokens of larger steps cost no less than between this step and one of at most half
        # its size. Between two sizes that are nearer the slope would be noise.
        smaller = [size for size in plain if 2 * size <= num_tokens]
        slope = (without - plain[smaller[-1]]) / (num_tokens - smaller[-1]) if smaller else 0.0
        sizes = np.arange(num_tokens, num_tokens + num_drafts + 1)
        return _on_curve(sizes, {num_tokens: without, **drafted}, slope)

    def _known(self, sizes: dict[int, _Size]) -> dict[int, float]:
        """Size → seconds, ascending."""
        return {tokens: size.seconds for tokens, size in sorted(sizes.items()) if size.is_known(self._step)}


def _on_curve(
    sizes: npt.NDArray[np.integer[Any]], known: dict[int, float], least_slope: float = 0.0
) -> npt.NDArray[np.float64]:
    """Seconds on straight lines between known sizes, which are in ascending order, and beyond them. The means are made
    to rise: more tokens never take less time, and a lower mean is noise."""
    last, means = next(reversed(known)), list(accumulate(known.values(), max))
    slope = max(_UNKNOWN_SLOPE * means[-1] / max(last, _SMALL_STEP), least_slope)
    seconds: npt.NDArray[np.float64] = np.interp(sizes, list(known), means)
    seconds += np.maximum(sizes - last, 0) * slope
    return seconds


def _size_class(num_tokens: int) -> int:
    """Sizes above 15 are rounded down to one of eight per power of two."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return num_tokens >> shift << shift
