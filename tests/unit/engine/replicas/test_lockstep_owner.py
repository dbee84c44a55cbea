"""LockstepOwner: who is waited for when heartbeats stand still, and what a death ends."""

from collections.abc import Iterator

import pytest
from quire_engine.config import ParallelConfig
from quire_engine.ipc.lockstep import Lockstep
from quire_engine.replicas.lockstep import LockstepOwner
from support.processes import open_descriptors

PARALLEL = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True, device="cpu")


@pytest.fixture
def owner() -> Iterator[LockstepOwner]:
    before = open_descriptors()
    owner = LockstepOwner(PARALLEL)
    yield owner
    owner.close()
    owner.close()
    assert open_descriptors() <= before


def waited_for(owner: LockstepOwner) -> list[bool]:
    return [owner.is_waited_for(engine) for engine in range(2)]


def wait(owner: LockstepOwner) -> list[bool]:
    return [owner.waits(engine) for engine in range(2)]


def test_the_one_that_the_others_wait_for_is_the_one_that_hangs(owner: LockstepOwner) -> None:
    cores = [Lockstep(owner.arguments.cores, engine) for engine in range(2)]
    ranks = [Lockstep(owner.arguments.ranks, rank) for rank in range(4)]
    assert waited_for(owner) == wait(owner) == [False, False], "idle engines stand still"
    cores[0].arrive(1)
    assert (waited_for(owner), wait(owner)) == ([False, True], [False, False]), "the second has been called"
    cores[1].arrive(0)
    assert waited_for(owner) == wait(owner) == [False, False], "both compute, for all that is known"
    for rank in (0, 1, 2):
        ranks[rank].arrive(0)
    assert (waited_for(owner), wait(owner)) == ([False, True], [True, False]), "a rank of the second has not come"
    owner.end_generation()
    assert waited_for(owner) == wait(owner) == [False, False], "nobody waits for one that is dead"
    for rank in (2, 3):
        ranks[rank].begin(1)
        ranks[rank].arrive(0)
    assert (waited_for(owner), wait(owner)) == ([True, False], [False, True]), "whatever was computed before"
    for view in (*cores, *ranks):
        view.close()


def test_a_death_ends_what_cores_and_ranks_wait_for(owner: LockstepOwner) -> None:
    core, rank = Lockstep(owner.arguments.cores, 0), Lockstep(owner.arguments.ranks, 0)
    rank.end(0)  # a step has failed on a rank, and its core does not know yet
    owner.end_generation()
    assert core.present_generation == rank.present_generation == 1
    core.end(0)
    assert core.present_generation == 1
    owner.end_generation()
    assert core.present_generation == rank.present_generation == 2
    for view in (core, rank):
        view.close()
    owner.close()
    owner.end_generation()
    assert not owner.is_waited_for(0)
    assert not owner.waits(0)
