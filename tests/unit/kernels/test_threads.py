"""The kernels' pool of threads: one call's ranges are computed once each, whoever else computes at the time."""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from quire_kernels import cpu, linear, pack_linear
from quire_kernels.linear import LinearWeight
from support.processes import ended, start_python
from support.serving import wait_until

HELPERS = 7
"""More than there are cores, so that some do not come in time for their share."""


@pytest.fixture(autouse=True)
def _pool() -> Iterator[None]:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    before = cpu.get_num_threads()
    cpu.set_num_threads(HELPERS + 1)
    yield
    cpu.set_num_threads(before)


def make_weight(seed: int) -> tuple[torch.Tensor, LinearWeight]:
    """A matrix whose product is far beyond one thread's worth, in whole numbers: its sums are exact in any order."""
    matrix = torch.randint(-8, 9, (1000, 256), generator=torch.Generator().manual_seed(seed)).float()
    return matrix, pack_linear(matrix.clone())


def kernel_threads() -> list[Path]:
    """The folders of the helpers. Other threads may end meanwhile: join() returns before the kernel has ended one."""
    found = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (path / "comm").read_text() == "quire-kernels\n":
                found.append(path)
    return found


def test_every_range_is_computed_whoever_comes() -> None:
    matrix, weight = make_weight(0)
    for rows in (3, 17, 64, 200):
        x = torch.randint(-8, 9, (rows, 256)).float()
        expected = x @ matrix.T
        for _ in range(200):
            assert torch.equal(linear(x, weight), expected)
    assert len(kernel_threads()) >= HELPERS


def test_calls_at_the_same_time_do_not_disturb_each_other() -> None:
    start = threading.Barrier(4)

    def compute(seed: int) -> bool:
        matrix, weight = make_weight(seed)
        x = torch.randint(-8, 9, (40, 256)).float()
        expected = x @ matrix.T
        start.wait()
        return all(torch.equal(linear(x, weight), expected) for _ in range(300))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(compute, range(4)))


def wait_for_sleep() -> list[Path]:
    """The folders of all helpers, when none of them runs."""
    tasks = kernel_threads()
    while {(path / "stat").read_text().rpartition(")")[2].split()[0] for path in tasks} != {"S"}:
        os.sched_yield()  # ends by the test's own time limit, where one never sleeps
    return tasks


def times_woken(tasks: list[Path]) -> list[int]:
    status = [dict(line.split(":", 1) for line in (path / "status").read_text().splitlines()) for path in tasks]
    return [int(fields["voluntary_ctxt_switches"]) for fields in status]


def test_helpers_sleep_when_there_is_nothing_to_do() -> None:
    matrix, weight = make_weight(0)
    linear(torch.ones(64, 256), weight)
    assert len(wait_for_sleep()) >= HELPERS
    assert torch.equal(linear(torch.ones(64, 256), weight), (torch.ones(64, 256) @ matrix.T)), "and wake again"


def test_helpers_that_are_too_many_sleep_through_calls() -> None:
    matrix, weight = make_weight(0)
    linear(torch.ones(64, 256), weight)
    cpu.set_num_threads(2)
    linear(torch.ones(64, 256), weight)  # a helper that waited for a call finds itself unwanted after one more
    tasks = wait_for_sleep()
    before = times_woken(tasks)
    for _ in range(50):
        linear(torch.ones(64, 256), weight)
        wait_for_sleep()
    woken = [now - then for now, then in zip(times_woken(tasks), before, strict=True)]
    assert sum(count > 5 for count in woken) <= 1, woken
    cpu.set_num_threads(HELPERS + 1)
    for _ in range(20):
        assert torch.equal(linear(torch.ones(64, 256), weight), torch.ones(64, 256) @ matrix.T)
    wait_for_sleep()
    assert sum(now > then for now, then in zip(times_woken(tasks), before, strict=True)) >= HELPERS, "wanted again"


NO_THREADS = """
    import resource, sys
    import torch
    from quire_kernels import cpu, linear, pack_linear

    weight, x = pack_linear(torch.ones(4096, 256)), torch.ones(64, 256)
    cpu.set_num_threads(64)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (24 << 20)  # a thread's stack takes 8 MiB of addresses
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    assert torch.equal(linear(x, weight), torch.full((64, 4096), 256.0))
    assert 1 <= cpu.get_num_threads() < 8, cpu.get_num_threads()
    assert torch.equal(linear(x, weight), torch.full((64, 4096), 256.0))
    print("computed")
"""


def test_computes_with_the_threads_that_it_gets() -> None:
    process = start_python(NO_THREADS)
    with ended([process]):
        assert process.communicate()[0].split()[-1:] == [b"computed"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    matrix, weight = make_weight(0)
    x = torch.ones(64, 256)
    expected = x @ matrix.T
    linear(x, weight)
    child = os.fork()
    if child == 0:
        try:
            assert not kernel_threads()
            assert torch.equal(linear(x, weight), expected)
            wait_until(lambda: bool(kernel_threads()), "a thread names itself when it first runs")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
