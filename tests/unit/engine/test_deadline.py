"""A deadline is counted from the request's arrival in the frontend, however long it takes to the engine core."""

import time
from pathlib import Path

import pytest
from quire_engine.core.journal import Journal
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreReady, EngineCoreRequest
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.slo import RequestSLO, SLOTargets
from quire_engine.timeline import Timeline

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"


def sent_at_age(seconds: float, deadline_ms: float | None) -> RequestOptions:
    """What an engine gets of a request that arrived so long ago."""
    arrived_at = time.monotonic() - seconds
    options = RequestOptions(deadline_ms=deadline_ms)
    journal = Journal(64)
    journal.add(EngineCoreRequest("r", [1], SamplingParams(), options, arrived_at=arrived_at), Timeline(arrived_at))
    (sent,) = journal.take_unsent()
    return sent.options


def test_engine_core_gets_what_is_left() -> None:
    assert sent_at_age(100.0, 250_000).deadline_ms == pytest.approx(150_000, abs=10_000)
    left = sent_at_age(100.0, 1_000).deadline_ms
    assert left is not None
    assert 0 < left < 1, "it has passed on the way; the engine says so in the usual words"


def test_no_deadline_stays_none() -> None:
    assert sent_at_age(100.0, None).deadline_ms is None


def test_what_the_caller_says_arrives_whole_with_the_time_of_arrival() -> None:
    ready = EngineCoreReady(vocab_size=100, max_model_len=64, num_kv_cache_tokens=64)
    inputs = InputProcessor(load_tokenizer(TINYPY), ready, {"chat": SLOTargets(ttft_ms=500, e2e_ms=9)})
    options = RequestOptions(slo=RequestSLO(slo_class="chat", e2e_ms=7), label="mine", traceparent="00-a-b-01")
    before = time.monotonic()
    request = inputs.process([1, 2], SamplingParams(), "r", options)
    assert (request.options, request.slo_targets) == (options, SLOTargets(ttft_ms=500, e2e_ms=7))
    assert before <= request.arrived_at <= time.monotonic()
    journal = Journal(64)
    journal.add(request, Timeline(request.arrived_at))
    (sent,) = journal.take_unsent()
    assert (sent.options, sent.slo_targets, sent.arrived_at) == (options, request.slo_targets, request.arrived_at)
    inputs.shutdown()


def test_the_text_of_a_prompt_stays_in_the_frontend() -> None:
    journal = Journal(64)
    journal.add(EngineCoreRequest("r", [1], SamplingParams(), prompt="secret words"))
    assert journal.take_unsent()[0].prompt is None
    assert journal.entries[0].request.prompt == "secret words"
