"""The ring of ended requests: what is kept, and what an asker gets who has seen some of it."""

import json

import msgspec
import pytest
from quire_engine.errors import RequestError
from quire_engine.sampling_params import SamplingParams
from quire_engine.slo import SLOTargets
from quire_engine.stats import FinishedRequestStats, IterationStats
from quire_monitoring.ended_requests import EndedRequestLog

SLO = {"default": SLOTargets(ttft_ms=500)}


def log(capacity: int = 3, *, keep_text: bool = False) -> EndedRequestLog:
    return EndedRequestLog(capacity, SLO, keep_text=keep_text, clock=lambda: 1000.0)


def end(into: EndedRequestLog, *labels: str) -> None:
    into.record(None, IterationStats(finished_requests=[FinishedRequestStats("stop", label=one) for one in labels]))


def test_an_asker_gets_what_is_new_to_it_and_all_that_is_kept_without_a_cursor() -> None:
    ring = log()
    assert (ring.since().requests, ring.since().num_ended, ring.since().since_unix) == ([], 0, 1000.0)
    seen = ring.since().cursor
    end(ring, "a", "b")
    answer = ring.since(seen)
    assert [one.label for one in answer.requests] == ["a", "b"]
    assert ring.since(answer.cursor).requests == []
    end(ring, "c", "d", "e")
    assert [one.label for one in ring.since(answer.cursor).requests] == ["c", "d", "e"]
    assert [(one.number, one.label) for one in ring.since(seen).requests] == [(2, "c"), (3, "d"), (4, "e")]
    assert (ring.since(seen).num_ended, ring.since(seen).capacity) == (5, 3)


def test_a_cursor_of_the_model_before_it_was_loaded_again_gets_everything() -> None:
    before, now = log(), log()
    end(before, "a", "b")
    end(now, "c")
    assert [one.label for one in now.since(before.since().cursor).requests] == ["c"]


@pytest.mark.parametrize("cursor", ["x", ":3", "a:", "a:-1", "a:\u0661", "a:" + "9" * 5000])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(RequestError, match="cursor is"):
        log().since(cursor)


def test_nothing_is_kept_if_the_settings_say_so() -> None:
    ring = log(0)
    end(ring, "a")
    assert (ring.since().num_ended, ring.since().capacity, ring.since().requests) == (0, 0, [])


def test_no_text_is_kept_unless_it_is_asked_for() -> None:
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=["secret"], cache_salt="secret", n=2)
    phases = [("queue", 0.0), ("decode", 0.5), ("preempted", 1.0), ("decode", 2.5), ("preempted", 3.0), ("decode", 3.5)]
    stats = FinishedRequestStats("stop", prompt="secret words", params=params, phases=phases, e2e_seconds=9.0)
    for keep_text in (False, True):
        ring = log(keep_text=keep_text)
        ring.add(stats)
        (kept,) = ring.since().requests
        assert (kept.queue_seconds, kept.decode_seconds, kept.preempted_seconds) == (0.5, 6.5, 2.0)
        assert ("secret" in json.dumps(msgspec.to_builtins(ring.since()))) is keep_text
        assert {"max_tokens": 7, "temperature": 0.5, "n": 2}.items() <= kept.parameters.items()
        assert "cache_salt" not in kept.parameters
    assert (kept.prompt, kept.parameters["stop"]) == ("secret words", ["secret"])
