"""Which replicas get a request, and when it goes on at another one: no engine is needed for that."""

from typing import Any

import pytest
from quire_engine.config import DisaggregationConfig
from quire_engine.core.journal import Journal
from quire_engine.messages import EngineCoreOutput, EngineCoreReady, EngineCoreRequest, FinishReason
from quire_engine.replicas.disaggregation import Disaggregation
from quire_engine.sampling_params import SamplingParams

READY = EngineCoreReady(block_size=4, max_model_len=100)
UP = [0, 1, 2, 3, 4]


def disaggregation() -> Disaggregation:
    """Of replicas 0 and 1, which prefill, and 2, 3 and 4, which decode."""
    return Disaggregation(DisaggregationConfig(prefill=2, decode=3), clock=lambda: 7.0)


def request(num_prompt_tokens: int = 9, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest("a", list(range(num_prompt_tokens)), SamplingParams(**params))


def test_a_request_goes_from_a_prefill_replica_to_a_decode_replica() -> None:
    one, asked = disaggregation(), request(max_tokens=5)
    first, journal = one.add(asked, READY, UP), Journal(100)
    journal.add(first)
    (sent,) = journal.take_unsent()
    assert sent.max_new_tokens == 1
    assert one.candidates(first, [0, 1, 2, 3, 4]) == [0, 1]
    assert one.candidates(first, [3, 4]) == [3, 4], "who decodes can prefill, too"
    output = EngineCoreOutput("a", [42], FinishReason.LENGTH, num_preemptions=1)
    (entry,) = one.take_prefilled([EngineCoreOutput("b", [1], FinishReason.LENGTH), output])
    assert (output.new_token_ids, output.finish_reason) == ([42], None), "the client is told of no end"
    assert one.candidates(entry.request, [0, 1, 2, 3, 4]) == [2, 3, 4]
    assert one.candidates(entry.request, [0, 1]) == [0, 1]
    other = Journal(100, lambda: 8.0)
    other.take_over(entry)
    (sent,) = other.take_unsent()
    assert (sent.output_token_ids, sent.max_new_tokens, sent.num_preemptions) == ([42], None, 1)
    assert sent.is_replay, "a full queue does not refuse it"
    assert sent.was_prefilled
    assert not one.take_prefilled([EngineCoreOutput("a", [43], FinishReason.LENGTH)]), "that is its end"


@pytest.mark.parametrize("asked", [request(3, max_tokens=5), request(1), request(9, max_tokens=1), request(99)])
def test_what_has_nothing_to_hand_over_is_computed_at_one_place(asked: EngineCoreRequest) -> None:
    one = disaggregation()
    assert one.add(asked, READY, UP) is asked
    assert one.candidates(asked, [0, 1, 2, 3, 4]) == [2, 3, 4]
    assert not one.take_prefilled([EngineCoreOutput("a", [42], FinishReason.LENGTH)])


@pytest.mark.parametrize("up", [[0, 1], [3], []])
def test_while_nobody_of_one_role_is_there_a_request_stays_where_it_is(up: list[int]) -> None:
    """None has joined yet, or all have died: whoever has it computes all of it."""
    one, asked = disaggregation(), request(max_tokens=5)
    assert one.add(asked, READY, up) is asked
    assert not one.take_prefilled([EngineCoreOutput("a", [42], FinishReason.LENGTH)])


def test_ranks_beyond_those_that_are_counted_go_on_from_prompts() -> None:
    one, asked = disaggregation(), request(max_tokens=5)
    assert one.candidates(one.add(asked, READY, [0, 6]), [0, 6]) == [0]
    one.take_prefilled([EngineCoreOutput("a", [42], FinishReason.LENGTH)])
    assert one.candidates(asked, [0, 6]) == [6]


def test_one_that_ends_with_its_first_token_does_not_go_on() -> None:
    one = disaggregation()
    for output in (
        EngineCoreOutput("a", [42], FinishReason.STOP),
        EngineCoreOutput("a", finish_reason=FinishReason.ERROR, error="no"),
    ):
        one.add(request(), READY, UP)
        assert not one.take_prefilled([output])
        assert output.finish_reason is not None
    one.add(request(), READY, UP)
    one.remove("a")
    assert not one.take_prefilled([EngineCoreOutput("a", [42], FinishReason.LENGTH)])


def test_tokens_of_a_replica_that_died_are_not_forgotten() -> None:
    """A suspect gets two tokens when it runs alone, and after that one more in its own right."""
    one = disaggregation()
    one.add(request(max_tokens=5), READY, UP)
    assert not one.take_prefilled([EngineCoreOutput("a", [42, 43])])
    (entry,) = one.take_prefilled([EngineCoreOutput("a", [44], FinishReason.LENGTH)])
    assert entry.output_token_ids == [42, 43, 44]
