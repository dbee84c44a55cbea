"""StepCosts: how long a step takes, by the number of its tokens, learned from the steps themselves.

A small step takes as long as it takes to read the weights, however many tokens it has; a large one as long as it takes
to multiply. Where one becomes the other depends on model, machine and number format::

    seconds
      │              ╱
      │            ╱      a draft costs what a token of another request costs
      │ ─────────╱
      │  a draft costs nearly nothing
      └──────────────────── tokens

It tells the cost of a few more tokens in a step of about the present size. `cost_model` predicts other steps: longer
prompts, more rows, longer contexts.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

MEAN_WEIGHT = 0.2
"""Weight of a new measurement against earlier ones."""
_LARGEST_RATIO = 2.0
"""A measurement counts as at most this many times the mean: other programs may have used the cores."""
_FORGOTTEN_AFTER = 64
"""Recorded steps after which a size is unknown again, for each measurement: one slow step must not decide for long."""
_REFRESHED_AFTER = 16
"""Recorded steps after which one without drafts is due again, for each measurement: the first steps are slow."""
_FEW_MEASUREMENTS = 4
"""Up to this many measurements the fastest counts, and then a moving mean: a step can only be slowed down."""
_MOST_MEASUREMENTS = 16
"""Most measurements that count: contexts grow, and the machine's other load changes."""
_UNKNOWN_SLOPE = 0.5
"""Cost of a token beyond the largest known step, relative to the mean cost of a token in a step of that size or of
`_SMALL_STEP`: low enough to try."""
_SMALL_STEP = 16
"""Tokens up to which a step is likely to wait for memory."""
_OLDEST = _FORGOTTEN_AFTER * _MOST_MEASUREMENTS


@dataclass(slots=True)
class _Size:
    """Measurements of one size of step. The first is left out: the processor's caches were cold."""

    last_step: int
    seconds: float = 0.0
    num_measurements: int = 0

    def is_known(self, step: int, max_age: int) -> bool:
        """Whether the last measurement is at most so many steps old, and not forgotten."""
        limit = min(max_age, _FORGOTTEN_AFTER * self.num_measurements)
        return self.num_measurements > 0 and step - self.last_step <= limit


class StepCosts:
    """Means of the last times, by size, and straight lines between them.

    Steps with drafts and without are kept apart: they are computed in other ways, on a GPU without and with graphs.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Size] = {}
        self._drafted: dict[int, _Size] = {}
        self._step = 0
        self.propose_seconds = 0.0
        """Time of a request's proposal: to look drafts up, or until a model has made the first one."""
        self.draft_seconds = 0.0
        """Time of each further draft of a model."""
        self._num_draftings = 0

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
        if size.is_known(self._step, _OLDEST):
            size.seconds = _after_one_more(size.seconds, seconds, size.num_measurements)
            size.num_measurements = min(size.num_measurements + 1, _MOST_MEASUREMENTS)
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
        each = seconds / number
        if is_upper_bound:
            self.propose_seconds = min(self.propose_seconds or each, each)
        else:
            self.propose_seconds = moved_mean(self.propose_seconds, each) if self.propose_seconds else each

    def record_drafting(self, number: int, seconds: float) -> None:
        """Add the time of `number` further drafts of a model."""
        each = seconds / number
        self.draft_seconds = _after_one_more(self.draft_seconds or each, each, self._num_draftings)
        self._num_draftings += 1

    def proposal_seconds(self, num_drafts: int) -> float:
        """Time of a proposal of `num_drafts` drafts, at least one."""
        return self.propose_seconds + (num_drafts - 1) * self.draft_seconds

    def is_unknown(self, num_tokens: int, max_age: int) -> bool:
        """Whether the last `max_age` steps had too few of about this size without drafts."""
        size = self._plain.get(_size_class(num_tokens))
        return size is None or not size.is_known(self._step, min(max_age, _REFRESHED_AFTER * size.num_measurements))

    def are_known(self) -> bool:
        """Whether anything is known of steps without drafts."""
        return any(size.is_known(self._step, _OLDEST) for size in self._plain.values())

    def seconds(self, num_tokens: int, num_drafts: int) -> npt.NDArray[np.float64] | None:
        """How long steps take with 0, 1, 2, … drafts; None if nothing is known of steps without.

        Args:
            num_tokens: of the step without drafts; at least 1.
            num_drafts: the most.
        """
        plain = self._known(self._plain)
        if not plain:
            return None
        without = _on_line(num_tokens, plain)
        drafted = {size: mean for size, mean in self._known(self._drafted).items() if size > num_tokens}
        known = {num_tokens: without, **drafted}
        sizes = np.arange(num_tokens, num_tokens + num_drafts + 1)
        means = _rising(known)
        seconds: npt.NDArray[np.float64] = np.interp(sizes, list(known), means)
        slope = max(_slope_beyond(known, means), _slope_before(num_tokens, without, plain))
        seconds += np.maximum(sizes - next(reversed(known)), 0) * slope
        return seconds

    def _known(self, sizes: dict[int, _Size]) -> dict[int, float]:
        """Size → seconds, ascending."""
        return {tokens: size.seconds for tokens, size in sorted(sizes.items()) if size.is_known(self._step, _OLDEST)}


def moved_mean(mean: float, seconds: float) -> float:
    """A mean of seconds after one more measurement, which counts as at most `_LARGEST_RATIO` times the mean."""
    return mean + MEAN_WEIGHT * (min(seconds, _LARGEST_RATIO * mean) - mean)


def _after_one_more(known: float, seconds: float, num_measurements: int) -> float:
    """The fastest of few measurements, and a moving mean of more."""
    return min(known, seconds) if num_measurements < _FEW_MEASUREMENTS else moved_mean(known, seconds)


def _on_line(num_tokens: int, known: dict[int, float]) -> float:
    """Seconds between and beyond known sizes, which are in ascending order."""
    sizes, means = list(known), _rising(known)
    right = bisect_right(sizes, num_tokens)
    if right == 0:
        return means[0]
    left = right - 1
    if right == len(sizes):
        return means[left] + (num_tokens - sizes[left]) * _slope_beyond(known, means)
    share = (num_tokens - sizes[left]) / (sizes[right] - sizes[left])
    return means[left] + (means[right] - means[left]) * share


def _rising(known: dict[int, float]) -> list[float]:
    """The means by size, made to rise: more tokens never take less time, and a lower mean is noise."""
    return list(accumulate(known.values(), max))


def _slope_beyond(known: dict[int, float], means: list[float]) -> float:
    """Cost of a token beyond the largest known size."""
    return _UNKNOWN_SLOPE * means[-1] / max(next(reversed(known)), _SMALL_STEP)


def _slope_before(num_tokens: int, seconds: float, known: dict[int, float]) -> float:
    """Cost of a token between this step and a known one of at most half its size. As the curve bends upwards, tokens of
    larger steps cost no less. 0 if no such step is known: between two sizes that are near the slope would be noise."""
    smaller = [size for size in known if 2 * size <= num_tokens]
    return max(seconds - known[smaller[-1]], 0.0) / (num_tokens - smaller[-1]) if smaller else 0.0


def _size_class(num_tokens: int) -> int:
    """Sizes above 15 are rounded down to one of eight per power of two."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return num_tokens >> shift << shift
