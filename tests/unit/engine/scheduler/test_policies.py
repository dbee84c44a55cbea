"""Who goes first, who is held back, who is refused, and who has run out of time."""

from typing import Any

import pytest
from quire_engine.messages import EngineCoreOutput, ErrorCode, FinishReason
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.request_queue import PriorityRequestQueue
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import FakeModelRunner, make_request, make_scheduler, run_step, undisturbed_output
from support.virtual_clock import Clock


class Engine:
    """A scheduler and a worker, and everything they put out."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock(1000.0)
        self.scheduler = make_scheduler(clock=self.clock, **settings)
        self.runner = FakeModelRunner.for_scheduler(self.scheduler)
        self.ended: dict[str, EngineCoreOutput] = {}
        self.tokens: dict[str, list[int]] = {}

    def add(
        self, name: str, length: int = 8, *, max_tokens: int = 4, priority: int = 0, deadline_ms: float | None = None
    ) -> Request:
        first = len(self.tokens)
        self.tokens[name] = []
        params = SamplingParams(max_tokens=max_tokens, priority=priority)
        request = make_request([first, *range(1, length)], request_id=name, params=params)
        request.options = RequestOptions(deadline_ms=deadline_ms)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; returns what was scheduled."""
        scheduler_output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for output in self.scheduler.update_from_output(scheduler_output, self.runner.execute_model(scheduler_output)):
            assert output.request_id not in self.ended
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output
        self.scheduler.check_integrity()
        return scheduler_output.num_scheduled_tokens

    def run(self, max_steps: int = 300) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("no progress")


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


# -- priority --------------------------------------------------------------------------------------------------------


def test_lower_priority_value_goes_first_and_then_who_came_first() -> None:
    engine = Engine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("late", 5), ("a", 0), ("b", 0), ("urgent", -7), ("c", 0)):
        engine.add(name, priority=priority, max_tokens=1)
    order = [next(iter(engine.step())) for _ in range(5)]
    assert order == ["urgent", "a", "b", "c", "late"]


def test_fcfs_has_no_ear_for_priorities() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("first", priority=9, max_tokens=1)
    engine.add("second", priority=-9, max_tokens=1)
    assert [next(iter(engine.step())) for _ in range(2)] == ["first", "second"]


def test_lowest_priority_gives_way_and_of_these_the_last_to_come() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=6, block_size=4)
    engine.add("low", 8, priority=1, max_tokens=8)
    engine.add("high", 8, priority=0, max_tokens=8)
    engine.add("low-later", 8, priority=1, max_tokens=8)
    assert engine.step() == {"high": 8, "low": 8, "low-later": 8}
    scheduled = engine.step()
    assert scheduled == {"high": 1, "low": 1}
    assert names(engine.scheduler.waiting) == ["low-later"]
    assert engine.scheduler.requests["low-later"].status is RequestStatus.PREEMPTED


def test_late_but_urgent_request_runs_ahead_and_takes_blocks_from_those_that_ran_before() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=5, block_size=4)
    engine.add("low", 8, priority=1, max_tokens=8)
    engine.step()
    engine.add("urgent", 4, priority=0, max_tokens=12)
    engine.step()
    assert names(engine.scheduler.running) == ["urgent", "low"]
    urgent = engine.scheduler.requests["urgent"]
    while "urgent" not in engine.ended:
        engine.step()
    assert urgent.num_preemptions == 0
    assert engine.scheduler.num_preemptions > 0
    engine.run()
    assert engine.ended["low"].finish_reason is FinishReason.LENGTH


def test_preempted_requests_continue_exactly_under_priorities() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=7, block_size=4, max_num_batched_tokens=9)
    requests = [engine.add(f"r{i}", 7, priority=(i * 3) % 4, max_tokens=12) for i in range(7)]
    expected = {request.request_id: undisturbed_output(request)[0] for request in requests}
    engine.run()
    assert engine.scheduler.num_preemptions > 0, "nobody gave way, so this test shows nothing"
    assert engine.tokens == expected


def test_prefill_of_an_urgent_prompt_leaves_every_decode_its_token() -> None:
    engine = Engine(scheduling_policy="priority", num_blocks=64, max_num_batched_tokens=16)
    for i in range(3):
        engine.add(f"d{i}", 4, priority=1, max_tokens=20)
    engine.step()
    engine.add("urgent", 50, priority=0)
    engine.step()
    for num_tokens in (13, 13, 11):
        assert engine.step() == {"urgent": num_tokens, "d0": 1, "d1": 1, "d2": 1}


def test_priority_queue_keeps_its_order_when_requests_leave_from_the_middle() -> None:
    queue = PriorityRequestQueue()
    requests = [make_request([1], params=SamplingParams(priority=i % 3)) for i in range(60)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        queue.add(request)
    for request in requests[::2]:
        queue.remove(request)
        assert request not in queue
        with pytest.raises(ValueError, match="not in the queue"):
            queue.remove(request)
    assert len(queue) == 30
    queue.prepend(taken := queue.pop())
    assert queue.peek() is taken
    order = names(queue)
    assert [queue.pop().request_id for _ in range(30)] == order
    assert order == names(sorted(requests[1::2], key=lambda r: (r.sampling_params.priority, r.arrival)))
    assert not queue


# -- partial prefills ------------------------------------------------------------------------------------------------


def test_long_prompt_never_keeps_short_ones_from_starting() -> None:
    engine = Engine(num_blocks=300, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    engine.add("long", 1000)
    for i in range(20):
        engine.add(f"short{i}", 8, max_tokens=2)
        scheduled = engine.step()
        assert scheduled["long"] == 32
        assert scheduled[f"short{i}"] == 8
    assert all(f"short{i}" in engine.ended for i in range(19))


def test_second_long_prompt_waits_and_short_ones_pass_it_by() -> None:
    engine = Engine(num_blocks=300, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    for name, length in (("long", 80), ("longer", 90), ("short", 5), ("shorter", 3)):
        engine.add(name, length)
    assert engine.step() == {"long": 16, "short": 5, "shorter": 3}
    assert names(engine.scheduler.waiting) == ["longer"]
    while "long" not in engine.ended:
        engine.step()
    assert engine.scheduler.requests["longer"].num_computed_tokens > 0
    engine.run()


def test_one_prompt_at_a_time_is_computed_in_part() -> None:
    engine = Engine(num_blocks=600, max_num_batched_tokens=100, long_prefill_token_threshold=20)
    requests = [engine.add(f"r{i}", 30 + 13 * (i % 7)) for i in range(20)]
    most = 0
    while engine.scheduler.has_requests():
        engine.step()
        partial = [r for r in requests if r.request_id in engine.scheduler.requests and
                   r.status is RequestStatus.RUNNING and r.num_output_tokens == 0]  # fmt: skip
        most = max(most, len(partial))
    assert most == 1
    assert engine.tokens == {request.request_id: undisturbed_output(request)[0] for request in requests}


# -- queue bound and delay, deadlines ----------------------------------------------------------------------------------


def test_what_exceeds_the_queue_is_refused_at_once_and_the_rest_served() -> None:
    engine = Engine(max_num_seqs=2, max_queued_requests=3)
    for i in range(8):
        engine.add(f"r{i}")
    engine.step()
    assert sorted(engine.ended) == ["r5", "r6", "r7"]
    for output in engine.ended.values():
        assert output.finish_reason is FinishReason.ERROR
        assert output.error_code is ErrorCode.UNAVAILABLE
        assert output.refusal == "queue_full"
        assert output.retry_after_seconds is not None
        assert output.error is not None
        for part in ("max_queued_requests is 3", "3 requests are queued", "try again in about 1 s"):
            assert part in output.error
    engine.run()
    assert all(engine.ended[f"r{i}"].finish_reason is FinishReason.LENGTH for i in range(5))


def test_full_queue_keeps_the_urgent() -> None:
    engine = Engine(scheduling_policy="priority", max_num_seqs=1, max_queued_requests=1)
    for i, priority in enumerate([3, 2, 1, 0]):
        engine.add(f"r{i}", priority=priority)
    engine.step()
    assert sorted(engine.ended) == ["r0", "r1"]


def test_no_queue_at_all_takes_as_many_as_can_run() -> None:
    engine = Engine(max_num_seqs=2, max_queued_requests=0)
    for i in range(3):
        engine.add(f"r{i}")
    engine.step()
    assert list(engine.ended) == ["r2"]
    engine.run()


def test_preempted_request_is_never_refused_for_a_full_queue() -> None:
    engine = Engine(num_blocks=4, block_size=4, max_queued_requests=0)
    engine.add("old", 8, max_tokens=8)
    engine.add("young", 8, max_tokens=8)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert [engine.ended[name].error for name in ("old", "young")] == [None, None]


def test_replayed_requests_are_refused_for_no_want_of_room() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=1, max_queue_delay_ms=500)
    for i in range(5):
        engine.add(f"r{i}", max_tokens=3).is_replay = i != 4
    engine.step()
    assert list(engine.ended) == [], "the new one has the queue for itself"
    engine.clock.now += 1.0
    engine.run()
    refused = [name for name, output in engine.ended.items() if output.error_code is ErrorCode.UNAVAILABLE]
    assert refused == ["r4"], "the delay is for the new one alone"


def test_retry_estimate_follows_the_rate_at_which_requests_end() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=5)
    for i in range(6):
        engine.add(f"r{i}", max_tokens=1)
    for _ in range(3):
        engine.clock.now += 2.0
        engine.step()
    for i in range(6, 12):
        engine.add(f"r{i}", max_tokens=1)
    engine.step()
    refused = [output for output in engine.ended.values() if output.error_code is not None]
    assert refused, "the queue was not full"
    # One request ends every 2 s, and five wait ahead.
    assert {output.retry_after_seconds for output in refused} == {12.0}


def test_who_waits_too_long_is_refused_and_who_runs_is_not() -> None:
    engine = Engine(max_num_seqs=1, max_queue_delay_ms=500)
    engine.add("running", max_tokens=20)
    engine.add("waiting")
    engine.step()
    engine.clock.now += 0.499
    engine.step()
    assert engine.ended == {}
    engine.clock.now += 0.001
    engine.step()
    output = engine.ended["waiting"]
    assert output.error_code is ErrorCode.UNAVAILABLE
    assert output.refusal == "queue_delay"
    assert output.error is not None
    assert "waited 500 ms" in output.error
    assert "max_queue_delay_ms is 500" in output.error
    engine.clock.now += 100
    engine.run()
    assert engine.ended["running"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_deadline_ends_a_request_wherever_it_is(num_steps: int) -> None:
    engine = Engine(max_num_seqs=1, num_blocks=16)
    if num_steps == 0:
        engine.add("other", max_tokens=20)
        engine.step()
    request = engine.add("r", max_tokens=20, deadline_ms=250)
    for _ in range(num_steps):
        engine.step()
    engine.clock.now += 0.25
    engine.step()
    output = engine.ended["r"]
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, ErrorCode.DEADLINE)
    assert output.error is not None
    assert ("while it waited" if num_steps == 0 else f"after {num_steps} tokens") in output.error
    assert request.status is RequestStatus.FINISHED
    assert engine.scheduler.kv_cache.get_block_ids("r") == []
    assert engine.tokens["r"] == undisturbed_output(request)[0][:num_steps]
    engine.run()


def test_deadline_of_the_only_request_leaves_an_empty_step_that_tells() -> None:
    engine = Engine()
    engine.add("r", max_tokens=20, deadline_ms=10)
    engine.clock.now += 1
    assert engine.scheduler.has_requests()
    assert engine.step() == {}
    assert engine.ended["r"].error_code is ErrorCode.DEADLINE
    assert not engine.scheduler.has_requests()


def test_deadline_belongs_to_the_request_and_not_to_its_id() -> None:
    engine = Engine()
    engine.add("r", max_tokens=1, deadline_ms=100)
    engine.run()
    del engine.ended["r"]
    engine.add("r", max_tokens=3)
    engine.step()
    engine.clock.now += 1
    engine.run()
    assert engine.ended["r"].finish_reason is FinishReason.LENGTH


def test_timers_of_ended_requests_do_not_pile_up() -> None:
    engine = Engine(max_queue_delay_ms=1e9)
    for i in range(500):
        engine.add(f"r{i}", max_tokens=1, deadline_ms=1e9)
        engine.run()
    assert len(engine.scheduler._limits._timers) < 100


def test_failed_step_still_tells_who_ran_out_of_time() -> None:
    engine = Engine(max_num_seqs=4)
    engine.runner = FakeModelRunner.for_scheduler(engine.scheduler, lambda name, n: name == "poison" and n == 1)
    engine.add("poison", max_tokens=9)
    engine.add("late", max_tokens=9, deadline_ms=100)
    run_step(engine.scheduler, engine.runner)
    engine.clock.now += 1
    outputs = run_step(engine.scheduler, engine.runner)
    assert {output.request_id: output.error_code for output in outputs} == {"late": ErrorCode.DEADLINE, "poison": None}


def test_scheduler_without_limits_keeps_no_timers() -> None:
    scheduler: Scheduler = make_scheduler()
    scheduler.add_request(make_request([1, 2]))
    assert scheduler._limits._timers == []


def test_prompts_that_were_passed_by_keep_their_order() -> None:
    engine = Engine(num_blocks=300, max_num_batched_tokens=64, long_prefill_token_threshold=16)
    for name in ("first", "second", "third", "fourth"):
        engine.add(name, 40)
    engine.step()
    assert names(engine.scheduler.waiting) == ["second", "third", "fourth"]


def test_idle_time_does_not_count_into_the_retry_estimate() -> None:
    engine = Engine(max_num_seqs=1, max_queued_requests=1)
    engine.add("before", max_tokens=1)
    engine.run()
    engine.clock.now += 1e6
    for i in range(5):
        engine.add(f"r{i}", max_tokens=1)
    for _ in range(2):
        engine.clock.now += 1.0
        engine.step()
        engine.add(f"more{engine.clock.now}", max_tokens=1)
    engine.step()
    assert max(output.retry_after_seconds or 0.0 for output in engine.ended.values()) < 10


def test_priority_queue_tells_requests_of_one_id_apart() -> None:
    queue = PriorityRequestQueue()
    gone, stays = (make_request([1], request_id="same", params=SamplingParams(priority=p)) for p in (-5, 5))
    queue.add(gone)
    queue.remove(gone)
    queue.add(stays)
    assert gone not in queue
    assert queue.pop() is stays
    assert not queue


def test_running_request_needs_the_kv_cache_manager_only_when_a_block_is_full_or_missing() -> None:
    scheduler = make_scheduler(block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    request = make_request(range(5), params=SamplingParams(max_tokens=20))
    scheduler.add_request(request)
    settled = []
    for _ in range(6):
        run_step(scheduler, runner)
        settled.append((request.num_computed_tokens, request.no_allocation_until))
    # At 8 tokens the second block is full and goes into the cache; at 9 a third one is needed.
    assert settled == [(5, 7), (6, 7), (7, 7), (8, 8), (9, 11), (10, 11)]
    scheduler.finish_request(request.request_id)
    assert request.no_allocation_until == 0
