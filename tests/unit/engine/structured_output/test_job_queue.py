"""The order in which grammars are compiled, in simulated time: who is quick does not wait for who is slow."""

import pytest
from quire_engine.structured_output.compiler_messages import COMPILE_SECONDS, CompileRequest
from quire_engine.structured_output.compiler_process import PLACES, TRY_SECONDS, Job, next_job

FIRST_TRY = TRY_SECONDS[0]
ALL_TRIES = sum(TRY_SECONDS[:-1])
MAX_JOBS = sum(PLACES)


class Machine:
    """Runs what the queue gives it, as the compiler's process does, with a core for each job."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
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
        self.jobs[job_id] = Job(CompileRequest(job_id, "regex", "a"))
        self.dispatch()

    def dispatch(self) -> None:
        while (job := next_job(self.jobs.values())) is not None:
            job_id, job.descriptor = job.request.job_id, 0
            self.ends[job_id] = self.now + min(self.seconds[job_id], TRY_SECONDS[job.round], COMPILE_SECONDS)
            self.order.append(job_id)
        assert len(self.ends) <= MAX_JOBS

    def run(self, seconds: float = 1e9) -> None:
        """Let time pass until all is quiet, or for so long."""
        until = self.now + seconds
        while True:
            moment = min(self.ends.values(), default=1e12)
            if moment > until:
                self.now = until if seconds < 1e9 else self.now
                return
            self.now = moment
            for job_id in [job_id for job_id, end in self.ends.items() if end <= moment]:
                del self.ends[job_id]
                job = self.jobs.pop(job_id)
                if self.seconds[job_id] > TRY_SECONDS[job.round]:
                    self.jobs[job_id] = Job(job.request, round=job.round + 1)
                else:
                    self.ended[job_id] = moment
            self.dispatch()


@pytest.mark.parametrize("head_start", [0.0, 0.1, 1.0, 4.9, 17.0, 100.0])
def test_one_clients_slow_grammars_delay_anothers_by_little(head_start: float) -> None:
    machine = Machine()
    for job_id in range(200):
        machine.add(job_id, COMPILE_SECONDS)
    machine.run(head_start)
    came_at = machine.now
    machine.add(1000, 0.02)
    machine.add(1001, 0.3)
    machine.run()
    assert machine.ended[1000] - came_at <= 200 / PLACES[0] * FIRST_TRY + 0.05, "in arrival order it was up to 250 s"
    assert machine.ended[1001] - came_at <= 200 * ALL_TRIES / PLACES[1] + 1, "of a large vocabulary"
    assert machine.ended.keys() == {*range(200), 1000, 1001}


def test_a_quick_one_waits_for_nobody_once_the_others_are_known_as_slow() -> None:
    machine = Machine()
    for job_id in range(200):
        machine.add(job_id, COMPILE_SECONDS)
    machine.run(200 * FIRST_TRY)
    came_at = machine.now
    machine.add(1000, 0.02)
    machine.run()
    assert machine.ended[1000] - came_at <= TRY_SECONDS[1] + 0.02


def test_slow_ones_go_on_under_a_stream_of_quick_ones() -> None:
    machine = Machine()
    for job_id in range(4):
        machine.add(job_id, COMPILE_SECONDS)
    for job_id in range(10, 1010):
        machine.add(job_id, 0.05)
        machine.run(0.03)
    assert machine.ended.keys() >= set(range(4)), "within 30 s, one after the other"
    waits = [machine.ended[job_id] - 1000.0 - 0.03 * (job_id - 10) for job_id in range(10, 1000)]
    assert max(waits) < 0.3


def test_no_round_starves_another() -> None:
    machine = Machine()
    machine.add(0, COMPILE_SECONDS)
    for job_id in range(10, 2010):
        machine.add(job_id, 0.4 if job_id % 2 else 0.05)
        machine.run(0.01)
    assert 0 in machine.ended, "within 20 s, though the other two rounds have more than they can do"
    assert any(job_id % 2 and job_id in machine.ended for job_id in range(10, 2010))


def test_slow_ones_have_their_places_and_no_others() -> None:
    machine = Machine()
    for job_id in range(2 * MAX_JOBS):
        machine.add(job_id, 2.0)
    machine.run(2.5)
    assert len(machine.ends) == PLACES[-1]
    machine.run()
    assert max(machine.ended.values()) - 1000.0 <= 2 * MAX_JOBS * 2.0 / PLACES[-1] + MAX_JOBS * ALL_TRIES


def test_quick_ones_keep_their_order() -> None:
    machine = Machine()
    for job_id in range(20):
        machine.add(job_id, 0.01)
    machine.run()
    assert machine.order == list(range(20))
