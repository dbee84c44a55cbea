"""Ended requests as the dashboard reads them: why each was slow or failed, and what is kept over looks."""

from typing import Any

import msgspec
import pytest
from quire_client import ClientError, EndedAnswer, EndedRequest
from quire_dashboard.ended_requests import EndedLog, why
from support.fake_triton import State, make_ended_request


def request(**values: Any) -> EndedRequest:
    return msgspec.convert(make_ended_request(0, **values), EndedRequest)


EARLY = {"time_to_first_token_seconds": None, "prefill_seconds": 1.3, "decode_seconds": 0.0, "slo_verdict": ""}


@pytest.mark.parametrize(
    ("values", "kind", "sentence"),
    [
        ({}, "queue", "4.1 s of 4.4 s in the queue, behind 16 running and 3 waiting"),
        ({"prefill_seconds": 4.0, "queue_seconds": 0.4, "num_cached_tokens": 40, "num_running_before": 0},
         "prefill", "4.0 s of 4.4 s in prefill of 60 tokens (40 more were cached)"),
        ({"slo_cause": "tpot", "time_per_output_token_seconds": 0.02},
         "decode", "1.0 s of 1.0 s in decode of 51 tokens, 20 ms each"),
        ({"slo_cause": "tpot", "decode_seconds": 0.3, "preempted_seconds": 0.7, "num_preemptions": 2},
         "preempted", "700 ms of 1.0 s without a token; preempted twice"),
        ({"slo_cause": "e2e", "num_replays": 1, "num_preemptions": 1},
         "queue", "4.1 s of 5.4 s in the queue, behind 16 running and 3 waiting; replayed after an engine restart; "
         "preempted once"),
        ({"finish_reason": "abort", "aborted_by": "client"}, "client left", "Client left after 5.4 s, with 51 tokens"),
        ({**EARLY, "finish_reason": "abort", "aborted_by": "operator"},
         "cancelled", "An operator cancelled it after 5.4 s, before its first token"),
        ({"finish_reason": "abort", "aborted_by": "server", "num_output_tokens": 1},
         "server", "The server ended it after 5.4 s, with 1 token"),
        ({**EARLY, "finish_reason": "rejected", "error": "text_input is empty", "error_code": "invalid_arg"},
         "invalid", "Rejected as invalid: text_input is empty"),
        ({**EARLY, "finish_reason": "error", "error": "the queue is full", "error_code": "unavailable",
          "queue_seconds": 0.001}, "rejected", "Rejected: the queue is full"),
        ({**EARLY, "finish_reason": "error", "error": "it waited too long", "error_code": "unavailable"},
         "rejected", "Rejected after 4.1 s in the queue: it waited too long"),
        ({**EARLY, "finish_reason": "error", "error_code": "deadline", "e2e_seconds": 4.2, "queue_seconds": 4.2,
          "num_waiting_before": 0}, "deadline",
         "Missed its deadline after 4.2 s, before its first token: 4.2 s of 4.2 s in the queue, behind 16 running"),
        ({"finish_reason": "error", "num_replays": 2, "error": "the engine died"},
         "error", "Failed after 5.4 s, with 51 tokens: the engine died; replayed after 2 engine restarts"),
        ({**EARLY, "finish_reason": "error", "error_code": "lost", "error": "tritonserver was killed by SIGKILL"},
         "server died", "Lost after 5.4 s, as the server died: tritonserver was killed by SIGKILL"),
        ({**EARLY, "finish_reason": "error", "e2e_seconds": 0.0, "queue_seconds": 0.0},
         "error", "Failed after 0.0 ms, before its first token: the engine gave no reason"),
        ({"held_seconds": 3.9, "queue_seconds": 0.2}, "held", "3.9 s of 4.4 s without an engine"),
        ({"encode_seconds": 3.9, "queue_seconds": 0.2}, "encode", "3.9 s of 4.4 s until its images were encoded"),
        ({"slo_cause": "tpot", "decode_seconds": 0.4, "replayed_seconds": 0.6, "num_replays": 1},
         "replayed", "600 ms of 1.0 s until another engine had caught up; replayed after an engine restart"),
        ({**EARLY, "finish_reason": "error", "error": "all die", "error_code": "unavailable",
          "queue_seconds": 0.0, "held_seconds": 5.4}, "rejected", "Rejected after 5.4 s without an engine: all die"),
    ],
)  # fmt: skip
def test_why_in_a_sentence(values: dict[str, Any], kind: str, sentence: str) -> None:
    if "num_running_before" in values:
        values = {**values, "num_waiting_before": 0}
    said = why(request(**values))
    assert (said.kind, said.sentence) == (kind, sentence)


def test_the_phases_are_the_whole_time_to_the_last_token() -> None:
    phases = request(preempted_seconds=0.25, decode_seconds=0.75).phases
    assert [name for name, _ in phases] == ["queue", "prefill", "decode", "preempted"]
    assert sum(seconds for _, seconds in phases) == pytest.approx(5.4)
    assert request(error_code="lost", finish_reason="error").phases == [], "how far it had come is not known"
    assert request(**EARLY).phases == [("queue", 4.1), ("prefill", pytest.approx(1.3))]


def test_the_trace_of_the_caller() -> None:
    assert request(traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01").trace_id == "ab" * 16
    assert request().trace_id == request(traceparent="garbage").trace_id == ""


def test_each_look_asks_only_for_what_is_new_and_old_ones_stay_when_the_server_is_gone() -> None:
    state, now = State(), 0.0
    is_gone = False

    def ask(cursor: str) -> EndedAnswer:
        if is_gone:
            raise ClientError("no server there")
        return msgspec.convert(state.ended_since(cursor), EndedAnswer)

    log = EndedLog(ask, clock=lambda: now)
    assert log.look(2.0).requests == {}
    state.end(label="a")
    assert log.look(2.0).requests == {}, "the last look is not old yet"
    for label in ("b", "c"):
        now += 2.0
        state.end(label=label)
        log.look(2.0)
    seen = log.look(2.0)
    assert [one.label for one in seen.requests.values()] == ["c", "b", "a"]
    assert state.cursors == ["", "aaaa0000:0", "aaaa0000:2"]
    assert seen.answer is not None
    assert len(seen.answer.requests) == 1
    is_gone, now = True, now + 60.0
    seen = log.look(2.0)
    assert (len(seen.requests), seen.error, seen.age_s) == (3, "no server there", 60.0)
    is_gone, now = False, now + 2.0
    state.ended.update(ring="bbbb1111", requests=[], num_ended=0, capacity=3)
    state.end(label="after the restart", time_unix=2e9)
    seen = log.look(2.0)
    assert [one.label for one in seen.requests.values()] == ["after the restart", "c", "b"]
    assert seen.error == ""
