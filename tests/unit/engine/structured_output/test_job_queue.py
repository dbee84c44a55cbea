"""The order in which grammars are compiled, in simulated time: who is quick does not wait for who is slow."""

import pytest
from quire_engine.structured_output.compiler import COMPILE_SECONDS
from quire_engine.structured_output.job_queue import MAX_JOBS, MAX_SLOW_JOBS, QUICK_SECONDS, JobQueue
from quire_engine.structured_output.protocol import CompileRequest


class Machine:
    """Runs what the queue gives it, as the compiler's process does."""

    def __init__(self) -> None:
        self.queue = JobQueue()
        self.now = 1000.0
        self.seconds: dict[int, float] = {}
        """What each job takes, by itself."""
        self.ends: dict[int, float] = {}
        """Of those that run."""
        self.ended: dict[int, float] = {}
        self.order: list[int] = []
        """In which they were started."""

    def add(self, job_id: int, seconds: float) -> None:
        self.seconds[job_id] = seconds
        self.queue.add(CompileRequest(job_id, "regex", "a"))
        self.dispatch()

    def dispatch(self) -> None:
        for job_id in self.queue.make_way(self.now):
            del self.ends[job_id]
        while (request := self.queue.take_next(self.now)) is not None:
            self.ends[request.job_id] = self.now + self.seconds[request.job_id]
            self.order.append(request.job_id)
        assert len(self.ends) <= MAX_JOBS

    def run(self, seconds: float = 1e9) -> None:
        """Let time pass until all is quiet, or for so long."""
        until = self.now + seconds
        while True:
            due = self.queue.seconds_until_due(self.now)
            moments = list(self.ends.values()) + ([] if due is None else [self.now + due])
            if min(moments, default=1e12) > until:
                self.now = until if seconds < 1e9 else self.now
                return
            self.now = min(moments)
            for job_id in [job_id for job_id, end in self.ends.items() if end <= self.now]:
                del self.ends[job_id]
                self.ended[job_id] = self.now
                self.queue.remove(job_id)
            self.dispatch()


@pytest.mark.parametrize("head_start", [0.0, 0.1, 1.0, 4.9, 17.0])
def test_one_clients_slow_grammars_delay_anothers_by_little(head_start: float) -> None:
    machine = Machine()
    for job_id in range(24):
        machine.add(job_id, COMPILE_SECONDS)
    machine.run(head_start)
    came_at = machine.now
    machine.add(100, 0.02)
    machine.run()
    waited = machine.ended[100] - came_at
    assert waited <= 24 / (MAX_JOBS - MAX_SLOW_JOBS) * QUICK_SECONDS + 0.05, "in arrival order it was up to 30 s"
    assert machine.ended.keys() == {*range(24), 100}
    total = max(machine.ended.values()) - 1000.0
    assert total <= 24 / MAX_SLOW_JOBS * COMPILE_SECONDS + 24 * QUICK_SECONDS, "they keep places of their own"


def test_slow_ones_go_on_under_a_stream_of_quick_ones() -> None:
    machine = Machine()
    for job_id in range(4):
        machine.add(job_id, COMPILE_SECONDS)
    for job_id in range(10, 1010):
        machine.add(job_id, 0.05)
        machine.run(0.03)
    assert machine.ended.keys() >= set(range(4)), "within 30 s, each two side by side"
    waits = [machine.ended[job_id] - 1000.0 - 0.03 * (job_id - 10) for job_id in range(10, 1000)]
    assert max(waits) < 2 * QUICK_SECONDS + 0.1


def test_without_others_slow_ones_have_all_places() -> None:
    machine = Machine()
    for job_id in range(2 * MAX_JOBS):
        machine.add(job_id, 2.0)
    machine.run()
    assert max(machine.ended.values()) - 1000.0 <= 2 * 2.0 + 2 * QUICK_SECONDS


def test_quick_ones_keep_their_order() -> None:
    machine = Machine()
    for job_id in range(20):
        machine.add(job_id, 0.01)
    machine.run()
    assert machine.order == list(range(20))


def test_what_is_removed_is_forgotten_wherever_it_was() -> None:
    queue = JobQueue()
    for job_id in range(6):
        queue.add(CompileRequest(job_id, "regex", "a"))
    assert [queue.take_next(0.0) for _ in range(5)][-1] is None
    assert queue.make_way(QUICK_SECONDS) == [2, 3]
    assert queue.remove(0)
    assert not queue.remove(2), "it waits among the slow"
    assert not queue.remove(5), "it has not been tried"
    started = []
    while (request := queue.take_next(1.0)) is not None:
        started.append(request.job_id)
    assert started == [3, 4]
    assert queue.seconds_until_due(1.0) is None, "nobody waits"
