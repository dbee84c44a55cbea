"""What a request's time goes to: each instant is in exactly one phase, whatever becomes of its engines."""

from collections.abc import Callable

import pytest
from quire_engine.config import DisaggregationConfig
from quire_engine.core.journal import ISOLATION_TOKENS, Journal
from quire_engine.messages import EngineCoreOutput, EngineCoreReady, EngineCoreRequest, FinishReason
from quire_engine.replicas.disaggregation import Disaggregation
from quire_engine.sampling_params import SamplingParams
from quire_engine.timeline import Timeline, phase_seconds
from support.scheduling import FakeModelRunner, make_requests, make_scheduler, run_step


class World:
    """A request and the journals of two engines, at times that a test says."""

    def __init__(self) -> None:
        self.now = 10.0
        self.timeline = Timeline(10.0)
        self.journals = [Journal(64, lambda: self.now) for _ in range(2)]

    @property
    def journal(self) -> Journal:
        return self.journals[0]

    def at(self, seconds: float) -> "World":
        """From its arrival."""
        self.now = 10.0 + seconds
        return self

    def arrives(self) -> None:
        self.journal.add(EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=40)), self.timeline)

    def is_taken(self, is_up: bool = True) -> None:
        """What a client does after a request has come to its journal."""
        if is_up:
            self.journal.take_unsent()
        self.journal.note_held("r")

    def is_scheduled(self, ago: float = 0.0) -> None:
        self.journal.note_changes([("r", "scheduled", ago)])

    def is_preempted(self, ago: float = 0.0) -> None:
        self.journal.note_changes([("r", "preempted", ago)])

    def has_tokens(self, number: int = 1, reason: FinishReason | None = None) -> None:
        self.journal.note_outputs([EngineCoreOutput("r", [7] * number, reason)])

    def engine_dies(self, has_begun: bool = True) -> None:
        self.journal.engine_died(lambda message_number: has_begun)

    def ends(self) -> list[tuple[str, float]]:
        phases = self.timeline.end(self.now)
        end = self.now - 10.0
        seconds = phase_seconds(phases, end)
        assert sum(seconds.values()) == pytest.approx(end)
        counted = dict.fromkeys(seconds, 0.0)
        for phase, length in self.timeline.ended:
            counted[phase] += length
        assert counted == pytest.approx(seconds), "what is counted is what there was"
        return [(phase, begin) for phase, begin in phases]


@pytest.fixture
def world() -> World:
    return World()


def test_a_request_queues_is_computed_and_decodes(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(3).is_scheduled(ago=1.0)
    world.has_tokens()
    world.at(5).has_tokens()
    assert world.ends() == [("queue", 0.0), ("prefill", 2.0), ("decode", 3.0)]


def test_one_that_never_ran_was_in_the_queue(world: World) -> None:
    world.arrives()
    world.is_taken()
    assert world.at(4).ends() == [("queue", 0.0)]


def test_images_are_encoded_before_it_queues(world: World) -> None:
    world.timeline = Timeline(10.0, encode_seconds=2.0)
    world.at(2).arrives()
    world.is_taken(is_up=False)
    world.at(5).is_taken()
    world.at(6).is_scheduled()
    world.at(7).has_tokens()
    assert world.ends() == [("encode", 0.0), ("held", 2.0), ("queue", 5.0), ("prefill", 6.0), ("decode", 7.0)]


def test_the_wait_for_an_engine_is_no_queue_and_no_prefill(world: World) -> None:
    world.arrives()
    world.at(0.5).is_taken(is_up=False)
    assert world.timeline.phase == "held"
    world.at(13).is_taken()
    world.at(14).is_scheduled()
    world.at(15).has_tokens()
    assert world.ends() == [("held", 0.0), ("queue", 13.0), ("prefill", 14.0), ("decode", 15.0)]


def test_after_a_death_it_is_held_and_then_replayed_until_its_next_token(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(1).is_scheduled()
    world.at(2).has_tokens()
    world.at(4).engine_dies()
    world.at(9).is_taken()
    world.at(10).is_scheduled()
    world.at(11).has_tokens()
    expected = [("queue", 0), ("prefill", 1), ("decode", 2), ("held", 4), ("replayed", 9), ("decode", 11)]
    assert world.ends() == expected


def test_one_whose_prefill_is_cut_short_is_replayed_and_one_that_only_queued_queues_again(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(1).engine_dies(has_begun=False)
    world.at(2).is_taken()
    world.at(3).is_scheduled()
    world.at(4).engine_dies()
    world.at(5).is_taken()
    world.at(6).has_tokens()
    assert [phase for phase, _ in world.ends()] == ["queue", "held", "queue", "prefill", "held", "replayed", "decode"]


def test_a_preemption_lasts_until_the_next_token(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(1).is_scheduled()
    world.at(2).has_tokens()
    world.at(4).is_preempted(ago=0.5)
    world.at(5).is_scheduled()
    world.at(7).has_tokens()
    assert world.ends() == [("queue", 0), ("prefill", 1), ("decode", 2), ("preempted", 3.5), ("decode", 7)]


def test_a_suspect_is_held_again_when_it_has_run_alone(world: World) -> None:
    world.arrives()
    world.journal.add(EngineCoreRequest("other", [1, 2], SamplingParams(max_tokens=40)))
    world.is_taken()
    for second in (1, 2):
        world.at(second).is_scheduled()
        world.at(second + 0.5).engine_dies()
        world.is_taken()
    world.at(3).has_tokens(ISOLATION_TOKENS, FinishReason.LENGTH)
    world.is_taken()
    assert world.timeline.phase == "held", "the other one runs alone now"
    world.journal.remove("other")
    world.at(5).is_taken()
    world.at(6).has_tokens()
    assert world.ends()[-3:] == [("held", 3), ("replayed", 5), ("decode", 6)]


def test_a_replica_that_leaves_hands_over_what_is_replayed(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(1).is_scheduled()
    world.at(2).has_tokens()
    (entry,) = world.at(3).journal.give_up_all()
    world.journals.reverse()
    world.journal.take_over(entry)
    world.is_taken()
    world.at(4).has_tokens()
    assert world.ends() == [("queue", 0), ("prefill", 1), ("decode", 2), ("replayed", 3), ("decode", 4)]


def test_after_its_prompt_it_queues_at_the_replica_that_goes_on(world: World) -> None:
    roles = Disaggregation(DisaggregationConfig(prefill=1, decode=1), clock=lambda: world.now)
    request = EngineCoreRequest("r", [*range(20)], SamplingParams(max_tokens=40))
    ready = EngineCoreReady(block_size=4, max_model_len=100)
    world.journal.add(roles.add(request, ready, [0, 1], world.timeline), world.timeline)
    world.is_taken()
    world.at(2).is_scheduled()
    world.at(3)
    first = [EngineCoreOutput("r", [7], FinishReason.LENGTH)]
    world.journal.note_outputs(first)
    (entry,) = roles.take_prefilled(first)
    world.journals.reverse()
    world.journal.take_over(entry)
    world.is_taken()
    world.at(5).is_scheduled(ago=0.5)
    world.has_tokens()
    assert world.at(6).ends() == [("queue", 0), ("prefill", 2), ("queue", 3), ("decode", 4.5)]


def test_late_words_of_an_engine_change_nothing(world: World) -> None:
    world.arrives()
    world.is_taken()
    world.at(2).engine_dies()
    world.is_preempted(ago=1.0)
    world.at(3).is_taken()
    world.is_preempted()
    world.at(4).is_scheduled(ago=9.0)  # not before it was sent
    world.journal.note_changes([("unknown", "scheduled", 1.0)])
    assert world.ends() == [("queue", 0), ("held", 2), ("prefill", 3)]


def test_the_scheduler_reports_first_steps_and_lost_blocks() -> None:
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False, clock=clock)
    runner = FakeModelRunner.for_scheduler(scheduler)
    for one in make_requests(2, prompt_length=7, max_tokens=8):
        scheduler.add_request(one)
    seen: list[tuple[str, str]] = []
    while scheduler.has_requests():
        run_step(scheduler, runner)
        now[0] += 0.25
        for request_id, kind, age in scheduler.take_phase_changes():
            assert age == 0.25
            seen.append((request_id, kind))
    assert seen == [("r0", "scheduled"), ("r1", "scheduled"), ("r1", "preempted")]
    assert scheduler.num_preemptions == 1
