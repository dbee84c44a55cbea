"""The search of `quire tune`: which settings meet the objectives at the highest rate of requests.

For one setting after the other, all its values are tried beside the best ones found so far (coordinate descent: the
number of trials is the sum of the values, not their product). The rate that a trial bears is found by doubling and
bisection. One that cannot bear a little more than the best so far is given up after a single run.

What is searched is a function of the results alone: with a journal of them, a search that was interrupted goes on where
it was.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOWEST, HIGHEST = 1 / 64, 4096
"""Bounds of the search, as multiples of the first rate. Settings that fail at the lower bound meet no objectives;
settings that hold at the upper bound count as unlimited."""

Settings = Mapping[str, Any]
Meets = Callable[[Settings, float], bool]
"""Whether settings meet the objectives at so many requests per second."""


class TrialError(Exception):
    """These settings cannot be tried: the server does not start with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Settings and what they bear."""

    settings: Settings
    """Besides those that are always the same."""
    rate: float
    """The highest that met the objectives; 0: none did, or none above the best so far."""
    is_best: bool = False
    """Better than all trials before it."""
    error: str = ""
    """Why it could not be tried."""


def highest_rate(meets: Callable[[float], bool], start: float, precision: float) -> float:
    """The highest rate that meets the objectives, by doubling or halving from `start`, and bisection.

    Args:
        meets: whether a rate does.
        start: the first rate.
        precision: how far below the highest the answer may be, as a share.

    Returns:
        0 if none down to `LOWEST` of the first one does.
    """
    good, bad = start, start
    if meets(start):
        while good < HIGHEST * start and meets(bad := 2 * good):
            good = bad
    else:
        while not meets(good := bad / 2):
            bad = good
            if bad < LOWEST * start:
                return 0.0
    while good < bad / (1 + precision):
        middle = math.sqrt(good * bad)
        if meets(middle):
            good = middle
        else:
            bad = middle
    return good


def search(
    space: Mapping[str, Sequence[Any]], meets: Meets, *, start: float, precision: float,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:  # fmt: skip
    """Try the space's values, setting by setting.

    Args:
        space: setting → values; None stands for leaving it out.
        meets: one run.
        start: the first rate that is tried.
        precision: of rates, as a share; values that gain less are passed over.
        on_trial: called with each trial when it has ended.

    Returns:
        All trials in their order; the last one that `is_best` is the answer.
    """
    trials: list[Trial] = []
    best: dict[str, Any] = {}
    best_rate = 0.0

    def attempt(settings: dict[str, Any]) -> None:
        nonlocal best, best_rate
        if any(trial.settings == settings for trial in trials):
            return
        try:
            hurdle = best_rate * (1 + precision)
            if best_rate and not meets(settings, hurdle):
                rate = 0.0
            else:
                rate = highest_rate(lambda rate: meets(settings, rate), hurdle or start, precision)
        except TrialError as error:
            trials.append(Trial(settings=settings, rate=0.0, error=str(error)))
        else:
            trials.append(Trial(settings=settings, rate=rate, is_best=rate > best_rate))
            if rate > best_rate:
                best, best_rate = settings, rate
        on_trial(trials[-1])

    attempt({})
    for name, values in space.items():
        others = {key: value for key, value in best.items() if key != name}
        for value in values:
            attempt(others if value is None else {**others, name: value})
    return trials
