"""When requests come: the statistics of the gaps."""

import math
import statistics
from typing import Any

import pytest
from quire_load.arrivals import Arrivals

NUMBER = 4000


def gaps(**settings: Any) -> list[float]:
    offsets = Arrivals(**settings).offsets(NUMBER)
    return [after - before for before, after in zip([0.0, *offsets], offsets, strict=False)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_are_as_burstiness_says(burstiness: float, variation: float) -> None:
    """Of a gamma distribution, the standard deviation is the mean by the square root of the shape."""
    found = gaps(request_rate=8.0, burstiness=burstiness)
    assert sum(found) == pytest.approx(NUMBER / 8)
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.08)
    assert min(found) >= 0


def test_poisson_s_gaps_are_exponential_and_independent() -> None:
    found = gaps(request_rate=1.0)
    for time in (0.1, 0.5, 1.0, 3.0):
        assert sum(gap <= time for gap in found) / NUMBER == pytest.approx(1 - math.exp(-time), abs=0.025)
    assert abs(statistics.correlation(found[:-1], found[1:])) < 0.05


def test_a_fixed_rate_has_equal_gaps() -> None:
    assert gaps(request_rate=4.0, burstiness=math.inf) == pytest.approx([0.25] * NUMBER)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str) -> None:
    found = gaps(ramp_up_strategy=strategy, ramp_up_start_rps=2.0, ramp_up_end_rps=32.0)
    first, middle, last = (
        1 / statistics.fmean(found[place : place + 200]) for place in (0, NUMBER // 2 - 100, NUMBER - 200)
    )
    assert first == pytest.approx(2.0, rel=0.5)
    assert middle == pytest.approx(17.0 if strategy == "linear" else 8.0, rel=0.2)
    assert last == pytest.approx(32.0, rel=0.2)


def test_a_seed_gives_the_same_times_and_another_one_others() -> None:
    first = Arrivals(request_rate=5.0, seed=1).offsets(50)
    assert first == Arrivals(request_rate=5.0, seed=1).offsets(50)
    assert first != Arrivals(request_rate=5.0, seed=2).offsets(50)
    assert first == sorted(first)


def test_without_a_rate_all_come_at_once_or_in_a_closed_loop() -> None:
    assert Arrivals().offsets(3) == [0.0] * 3
    assert not Arrivals().is_closed_loop
    assert Arrivals(max_concurrency=2).is_closed_loop
    assert not Arrivals(max_concurrency=2, request_rate=1.0).is_closed_loop


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0.0}, "request_rate is 0.0; it must be above 0"),
        ({"request_rate": math.nan}, "request_rate is nan"),
        ({"burstiness": -1.0}, "burstiness is -1.0"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"ramp_up_strategy": "steep"}, "ramp_up_strategy is 'steep'; it must be linear or exponential"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0}, "ramp_up_end_rps is None"),
        ({"ramp_up_start_rps": 1.0}, "ramp_up_strategy is not given"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 3.0},
            "request_rate is 3 beside a ramp",
        ),
    ],
)
def test_bad_values_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrivals(**settings)
