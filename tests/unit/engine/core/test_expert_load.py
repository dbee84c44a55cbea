"""What is reported of the tokens that experts were sent."""

from typing import Any

import numpy as np
import pytest
from quire_engine.config import ParallelConfig
from quire_engine.core.experts import ExpertLoadReport
from support.virtual_clock import Clock


def tokens(*rows: list[int]) -> Any:
    return lambda: np.array(rows)


def test_the_busiest_rank_and_expert_of_what_was_computed_since() -> None:
    clock = Clock(0.0)
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    report = ExpertLoadReport(parallel, clock)
    assert report.make(tokens([0] * 4, [0] * 4, [0] * 4), False) is None, "there is nothing to say yet"
    first = report.make(tokens([4, 0, 4, 0], [0] * 4, [6, 2, 0, 0]), False)
    assert first is not None
    assert (first.mean_over_ranks, first.max_over_ranks) == (1.5, 2.0), "1 in the first layer, 2 in the last"
    assert (first.mean_over_experts, first.max_over_experts) == (2.5, 3.0)
    assert (first.tokens, first.rank_tokens) == ([[4, 0, 4, 0], [], [6, 2, 0, 0]], [12, 4])

    later = tokens([5, 1, 5, 1], [0] * 4, [6, 2, 0, 0])
    clock.now = 0.5
    assert report.make(later, False) is None, "it is not due"
    second = report.make(later, True)
    assert second is not None, "nothing comes after it"
    assert (second.max_over_ranks, second.max_over_experts) == (1.0, 1.0), "of the growth alone"
    assert second.rank_tokens == [14, 6]
    assert report.make(later, True) is None, "nothing was computed since"

    clock.now = 9.0
    third = report.make(tokens([0, 3, 0, 0], [0] * 4, [0] * 4), False)
    assert third is not None, "the ranks count from 0 again"
    assert (third.max_over_experts, third.rank_tokens) == (4.0, [17, 6])


@pytest.mark.parametrize(("settings", "expected"), [
    ({"tensor_parallel_size": 2}, [7, 7]),
    ({"pipeline_parallel_size": 2}, [4, 3]),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True}, [1, 3, 3, 0]),
    ({"data_parallel_size": 3, "enable_expert_parallel": True, "data_parallel_rank": 1}, [3, 1, 3]),
])  # fmt: skip
def test_what_each_rank_computes(settings: dict[str, Any], expected: list[int]) -> None:
    load = ExpertLoadReport(ParallelConfig(**settings)).make(tokens([1, 0, 3], [2, 1, 0]), True)
    assert load is not None
    assert load.rank_tokens == expected


def test_engines_whose_ranks_do_not_tell_report_nothing() -> None:
    assert ExpertLoadReport(ParallelConfig()).make(lambda: None, True) is None
