"""A deadline is counted from the request's arrival in the frontend, however long it takes to the engine core."""

import time
from dataclasses import replace

import pytest
from quire_engine.frontend.input_processor import ProcessedRequest
from quire_engine.sampling_params import SamplingParams
from quire_engine.slo import SLOTargets


def request_of_age(seconds: float, deadline_ms: float | None) -> ProcessedRequest:
    return ProcessedRequest(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1],
        params=SamplingParams(),
        arrival_time=time.monotonic() - seconds,
        deadline_ms=deadline_ms,
    )


def test_engine_core_gets_what_is_left() -> None:
    assert request_of_age(100.0, 250_000).to_core().deadline_ms == pytest.approx(150_000, abs=10_000)
    left = request_of_age(100.0, 1_000).to_core().deadline_ms
    assert left is not None
    assert left < 0, "it has passed on the way"


def test_no_deadline_stays_none() -> None:
    assert request_of_age(100.0, None).to_core().deadline_ms is None


def test_objectives_are_told_where_the_scheduler_works_for_them_with_the_time_of_arrival() -> None:
    request = replace(request_of_age(2.0, None), slo_class="chat", slo_targets=SLOTargets(ttft_ms=500))
    assert (request.to_core().slo_targets, request.to_core().arrived_at) == (None, None)
    told = replace(request, is_scheduled_by_slo=True).to_core()
    assert (told.slo_class, told.slo_targets) == ("chat", SLOTargets(ttft_ms=500))
    assert told.arrived_at == request.arrival_time
