"""Ratios of what was good lately, by a clock that the test turns."""

import random

import pytest
from quire_monitoring.definitions import WINDOWS
from quire_monitoring.goodput import Goodput
from support.virtual_clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(123_456.75)


def test_ratios_of_one_and_five_minutes(clock: Clock) -> None:
    goodput = Goodput(["default", "batch"], WINDOWS, clock)
    assert set(goodput.ratios().values()) == {1.0}
    for good in (True, True, False, True):
        goodput.record("default", good)
    clock.now += 120
    goodput.record("default", False)
    assert goodput.ratios() == {
        ("default", "1m"): 0.0, ("default", "5m"): 0.6, ("batch", "1m"): 1.0, ("batch", "5m"): 1.0,
    }  # fmt: skip
    clock.now += 120
    assert goodput.ratios()["default", "1m"] == 1.0
    assert goodput.ratios()["default", "5m"] == 0.6
    clock.now += 100
    assert goodput.ratios()["default", "5m"] == 0.0
    clock.now += 10_000_000
    assert set(goodput.ratios().values()) == {1.0}


def test_unknown_classes_are_passed_over(clock: Clock) -> None:
    goodput = Goodput(["default"], WINDOWS, clock)
    goodput.record("gold", False)
    assert goodput.ratios() == {("default", "1m"): 1.0, ("default", "5m"): 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_ring_equals_a_list(clock: Clock, seed: int) -> None:
    """A bucket is a sixtieth of the window: what is that close to its end may be in or out."""
    rng = random.Random(seed)
    goodput, history = Goodput(["default"], WINDOWS, clock), []
    for _ in range(2000):
        clock.now += rng.choice([0.0, 0.01, 0.3, 1.0, 7.0]) * rng.random()
        history.append((clock.now, rng.random() < 0.7))
        goodput.record("default", history[-1][1])
        if rng.random() < 0.01:
            clock.now += rng.uniform(0, 400)
        for name, seconds in WINDOWS.items():
            # The present bucket and the 59 before it.
            bucket = seconds / 60
            inside = [good for at, good in history if int(at / bucket) > int(clock.now / bucket) - 60]
            expected = sum(inside) / len(inside) if inside else 1.0
            assert goodput.ratios()["default", name] == pytest.approx(expected)
