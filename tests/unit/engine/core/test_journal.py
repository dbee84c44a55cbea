"""The journal: who is sent to which engine, with which tokens, and who is to blame."""

import msgspec
import pytest
from quire_engine.core.journal import ISOLATION_TOKENS, MAX_CRASHES, MAX_ISOLATED_DEATHS, Journal
from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.slo import SLOTargets
from support.virtual_clock import Clock


def request(request_id: str, max_tokens: int = 8, deadline_ms: float | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2], SamplingParams(max_tokens=max_tokens), RequestOptions(deadline_ms=deadline_ms)
    )


def journal_of(*request_ids: str, clock: Clock | None = None) -> Journal:
    journal = Journal(64, clock or Clock())
    for request_id in request_ids:
        journal.add(request(request_id))
    return journal


def sent(journal: Journal) -> list[str]:
    return [message.request_id for message in journal.take_unsent()]


def died(journal: Journal) -> list[str]:
    """An engine dies that had begun with all it had."""
    return journal.engine_died(lambda message_number: True)


def tokens(journal: Journal, **token_ids: int) -> list[EngineCoreOutput]:
    outputs = [EngineCoreOutput(request_id, [token_id]) for request_id, token_id in token_ids.items()]
    journal.note_outputs(outputs)
    return outputs


def test_a_request_is_sent_once() -> None:
    journal = journal_of("a", "b")
    assert sent(journal) == ["a", "b"]
    assert sent(journal) == []
    assert journal.num_sent == 2
    journal.add(request("c"))
    assert sent(journal) == ["c"]


def test_a_request_that_another_host_replays_keeps_its_tokens() -> None:
    journal = Journal(64, Clock())
    replayed = msgspec.structs.replace(request("a"), output_token_ids=[7, 8], num_preemptions=3, is_replay=True)
    journal.add(replayed)
    assert journal.take_unsent() == [replayed]
    tokens(journal, a=9)
    assert replayed.output_token_ids == [7, 8], "the journal writes to a list of its own"
    died(journal)
    assert [message.output_token_ids for message in journal.take_unsent()] == [[7, 8, 9]]


def test_after_a_death_all_go_on_behind_their_tokens_in_their_old_order() -> None:
    journal = journal_of("a", "b", "c")
    first = journal.take_unsent()
    assert [message.is_replay for message in first] == [False] * 3
    tokens(journal, a=7, c=5)
    tokens(journal, c=6)
    journal.add(request("d"))  # never sent to the one that dies
    assert died(journal) == []
    assert journal.num_sent == 0
    again = journal.take_unsent()
    assert [(m.request_id, m.output_token_ids, m.is_replay) for m in again] == [
        ("a", [7], True),
        ("b", [], True),
        ("c", [5, 6], True),
        ("d", [], False),
    ]
    assert all(message.max_new_tokens is None for message in again)
    tokens(journal, a=8)
    journal.remove("b")
    journal.remove("c")
    journal.remove("d")
    died(journal)
    (message,) = journal.take_unsent()
    assert message.output_token_ids == [7, 8]
    assert again[0].output_token_ids == [7], "what was sent does not change any more"


def test_ended_and_aborted_requests_are_forgotten() -> None:
    journal = journal_of("a", "b", "c")
    assert journal.remove("c") is False, "no engine has it"
    sent(journal)
    journal.note_outputs([EngineCoreOutput("a", [3], FinishReason.STOP)])
    assert journal.remove("a") is False, "the engine knows already"
    assert journal.remove("b") is True
    assert journal.remove("unknown") is False
    assert journal.request_ids == []
    journal.note_outputs([EngineCoreOutput("b", [3])])  # on its way when it was aborted
    died(journal)
    assert sent(journal) == []


def test_counts_of_preemptions_go_on() -> None:
    journal = journal_of("a")
    sent(journal)
    journal.note_outputs([EngineCoreOutput("a", [3], num_preemptions=2)])
    died(journal)
    assert journal.take_unsent()[0].num_preemptions == 2


def test_of_a_deadline_what_is_left_is_sent() -> None:
    clock = Clock()
    journal = Journal(64, clock)
    journal.add(request("a", deadline_ms=5000.0))
    assert journal.take_unsent()[0].options.deadline_ms == 5000.0
    clock.now += 2.0
    died(journal)
    assert journal.take_unsent()[0].options.deadline_ms == pytest.approx(3000.0)
    clock.now += 60.0
    died(journal)
    deadline_ms = journal.take_unsent()[0].options.deadline_ms
    assert deadline_ms is not None
    assert 0 < deadline_ms < 1, "it has passed; the engine says so in the usual words"


def test_after_two_deaths_suspects_are_tried_one_at_a_time() -> None:
    journal = journal_of("a", "b", "c")
    sent(journal)
    died(journal)
    sent(journal)
    journal.add(request("late"))
    sent(journal)
    died(journal)  # the second for a, b and c, the first for late
    (alone,) = journal.take_unsent()
    assert (alone.request_id, alone.max_new_tokens) == ("a", ISOLATION_TOKENS)
    assert sent(journal) == [], "it is alone"
    journal.add(request("new"))
    assert sent(journal) == [], "nobody joins it"
    journal.note_outputs([])
    assert sent(journal) == []
    outputs = [EngineCoreOutput("a", [4], FinishReason.LENGTH)]
    journal.note_outputs(outputs)
    assert outputs[0].finish_reason is None, "the end of its isolation is not the end of the request"
    (alone,) = journal.take_unsent()
    assert alone.request_id == "b"
    assert died(journal) == [], "it was alone when the engine died, but that can be chance"
    assert sent(journal) == ["b"]
    assert died(journal) == ["b"]
    journal.remove("b")
    (alone,) = journal.take_unsent()
    assert alone.request_id == "c", "nobody else was with that engine, so nobody else is blamed"
    tokens(journal, c=5)
    assert sent(journal) == [], "its second token comes of another kind of step, and may be the one that kills"
    journal.note_outputs([EngineCoreOutput("c", [6], FinishReason.LENGTH)])
    rest = journal.take_unsent()
    assert [message.request_id for message in rest] == ["a", "c", "late", "new"]
    assert [message.output_token_ids for message in rest] == [[4], [5, 6], [], []]
    assert all(message.max_new_tokens is None for message in rest)
    died(journal)
    assert sent(journal) == ["late"], "its second death; who was cleared starts afresh"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ERROR])
def test_an_end_in_isolation_is_an_end(reason: FinishReason) -> None:
    journal = journal_of("a", "b")
    for _ in range(2):
        sent(journal)
        died(journal)
    assert sent(journal) == ["a"]
    outputs = [EngineCoreOutput("a", [4], reason)]
    journal.note_outputs(outputs)
    assert outputs[0].finish_reason is reason
    assert "a" not in journal
    assert sent(journal) == ["b"]


def test_in_isolation_the_last_token_of_all_is_an_end() -> None:
    journal = Journal(64, Clock())
    journal.add(request("a", max_tokens=3))
    sent(journal)
    tokens(journal, a=1)
    for _ in range(2):
        died(journal)
        sent(journal)
    died(journal)
    journal.add(request("b"))
    outputs = [EngineCoreOutput("a", [2], FinishReason.LENGTH)]
    journal.take_unsent()
    journal.note_outputs(outputs)
    assert outputs[0].finish_reason is None
    for _ in range(2):
        sent(journal)
        died(journal)
    journal.take_unsent()
    outputs = [EngineCoreOutput("a", [3], FinishReason.LENGTH)]
    journal.note_outputs(outputs)
    assert outputs[0].finish_reason is FinishReason.LENGTH


def test_suspects_that_are_aborted_hold_nobody_up() -> None:
    journal = journal_of("a", "b", "c")
    for _ in range(2):
        sent(journal)
        died(journal)
    assert sent(journal) == ["a"]
    assert journal.remove("a") is True
    journal.remove("b")
    assert sent(journal) == ["c"]
    journal.remove("c")
    journal.add(request("d"))
    assert sent(journal) == ["d"]


def test_who_is_tried_after_an_abort_is_not_blamed_for_the_one_before() -> None:
    journal = journal_of("a", "b", "c")
    for _ in range(2):
        sent(journal)
        died(journal)
    assert sent(journal) == ["a"]
    journal.remove("a")  # its step may be running
    assert sent(journal) == ["b"]
    assert died(journal) == [], "of a or of b"
    assert sent(journal) == ["b"], "so it is tried again"
    assert died(journal) == ["b"]
    journal.remove("b")
    assert sent(journal) == ["c"]
    journal.remove("c")
    journal.add(request("d"))
    assert sent(journal) == ["d"]
    assert died(journal) == []


def test_who_goes_on_well_between_two_deaths_is_no_suspect() -> None:
    journal = journal_of("a", "b", "c")
    sent(journal)
    tokens(journal, b=1)
    tokens(journal, b=2)
    died(journal)
    sent(journal)
    for token_id in range(ISOLATION_TOKENS):
        tokens(journal, a=token_id)
    tokens(journal, b=3)
    died(journal)
    assert sent(journal) == ["b"], "one token after its return is too few; what it got before does not count"
    journal.note_outputs([EngineCoreOutput("b", [4], FinishReason.LENGTH)])
    assert sent(journal) == ["c"]
    journal.note_outputs([EngineCoreOutput("c", [4], FinishReason.LENGTH)])
    assert sent(journal) == ["a", "b", "c"]
    died(journal)
    assert sent(journal) == ["a"], "its second death without progress"


def test_a_death_counts_only_against_whom_the_engine_had_begun_with() -> None:
    journal = journal_of("runs", "waits")
    for _ in range(MAX_CRASHES + MAX_ISOLATED_DEATHS):
        for request_id in sent(journal):
            journal.note_sent(request_id, {"runs": 1, "waits": 2}[request_id])
        faulty_ids = journal.engine_died(lambda message_number: message_number == 1)
    assert faulty_ids == ["runs"]
    journal.remove("runs")
    assert sent(journal) == ["waits"], "no suspect: it is not isolated, and others may join it"
    journal.add(request("late"))
    assert sent(journal) == ["late"]


def test_a_trial_that_had_not_begun_is_held_again() -> None:
    journal = journal_of("a", "b")
    for _ in range(MAX_CRASHES):
        sent(journal)
        died(journal)
    for _ in range(10):
        assert sent(journal) == ["a"]
        assert journal.engine_died(lambda message_number: False) == []
    assert sent(journal) == ["a"]
    assert died(journal) == []
    assert sent(journal) == ["a"]
    assert died(journal) == ["a"]


def test_a_request_with_objectives_has_not_arrived_later_when_it_is_replayed() -> None:
    clock = Clock()
    journal = Journal(100, clock)
    told = msgspec.structs.replace(request("a"), slo_targets=SLOTargets(ttft_ms=500), arrived_at=20.0)
    journal.add(told)
    journal.add(request("b"))
    assert [one.arrived_at for one in journal.take_unsent()] == [20.0, 0.0]
    clock.now += 2
    died(journal)
    assert [one.arrived_at for one in journal.take_unsent()] == [20.0, 0.0]


def test_who_is_given_up_by_an_engine_that_lives_is_not_blamed_for_its_end() -> None:
    """A move does not count as a death, and does not make the next one count that came after enough tokens."""
    journal, other = journal_of("a", "b", "c"), Journal(64, Clock())
    sent(journal)
    died(journal)
    sent(journal)
    for _ in range(ISOLATION_TOKENS):
        tokens(journal, a=1)
    journal.add(request("d"))
    given = journal.give_up_all()
    assert [entry.request.request_id for entry in given] == ["a", "b", "c", "d"]
    assert not journal.request_ids
    assert not sent(journal)
    for entry in given:
        other.take_over(entry)
    taken = other.take_unsent()
    assert [(m.request_id, m.output_token_ids, m.is_replay) for m in taken] == [
        ("a", [1, 1], True), ("b", [], True), ("c", [], True), ("d", [], False)
    ]  # fmt: skip
    assert not died(other)
    assert other.is_isolating, "b and c were at two deaths without a token in between"
    assert sorted(entry.request.request_id for entry in other.entries if entry.num_crashes < MAX_CRASHES) == ["a", "d"]
