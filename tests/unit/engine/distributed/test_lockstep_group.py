"""Lockstep and its group: processes that hear the same, and go on with another in the place of one that dies."""

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import torch
from quire_engine.distributed.lockstep_group import LockstepGroup
from quire_engine.errors import AbortedError
from quire_engine.ipc.lockstep import GENERATION, Lockstep, LockstepHandle
from support.processes import ended, open_descriptors, start_forked

MEMBER = """
    import sys, msgspec, torch
    from quire_engine.distributed.lockstep_group import AbortedError, LockstepGroup
    from quire_engine.ipc.lockstep import LockstepHandle
    torch.set_num_threads(1)
    handle, member = msgspec.json.decode(sys.argv[1], type=LockstepHandle), int(sys.argv[2])
    group = LockstepGroup(handle, member)

    def content(who, turn):  # of any length, also none and more than a buffer holds
        length = (who * 7919 + turn * 104729) % 1000 * (turn % 3)
        return torch.full((length,), (who * 31 + turn) % 251, dtype=torch.uint8)

"""

TALKS = """
    for turn in range(600):
        if (turn * 7 + member * 3) % 5 == 0:
            torch.randn(2000).sort()
        heard = group.all_gather(content(member, turn))
        for who, got in enumerate(heard):
            assert torch.equal(got, content(who, turn)), (turn, who)
    print("talked")
"""

GOES_ON = """
    print("here", flush=True)
    while True:
        group.begin(group.present_generation)
        generation = group.generation
        try:
            for turn in range(300):
                heard = group.all_gather(content(member, generation + turn))
                for who, got in enumerate(heard):
                    assert torch.equal(got, content(who, generation + turn)), (turn, who)
            print(f"done {generation}", flush=True)
            sys.stdin.readline()
        except AbortedError:
            print(f"aborted {generation}", flush=True)
"""


def start(source: str, handle: LockstepHandle, member: int) -> "subprocess.Popen[bytes]":
    arguments = msgspec.json.encode(handle), str(member)
    return start_forked(MEMBER + source, *arguments, pass_fds=handle.descriptors())


@contextmanager
def group_of(size: int, buffer_bytes: int = 512) -> Iterator[LockstepHandle]:
    descriptors = open_descriptors()
    handle = LockstepHandle.create(size, buffer_bytes)
    yield handle
    handle.close()
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize("size", [2, 3])
def test_all_hear_the_same_of_any_length(size: int) -> None:
    with group_of(size) as handle:
        processes = [start(TALKS, handle, member) for member in range(size)]
        with ended(processes):
            for process in processes:
                out, _ = process.communicate(timeout=120)
                assert (process.returncode, out) == (0, b"talked\n")


def test_whoever_is_killed_is_replaced_and_nobody_hears_what_was_said_before() -> None:
    chance = random.Random(3)
    with group_of(3) as handle, ExitStack() as stack:
        owner = Lockstep(handle, None)
        stack.callback(owner.close)
        processes = [start(GOES_ON, handle, member) for member in range(3)]
        stack.callback(lambda: [stack.enter_context(ended([process])) for process in processes])

        def hears(member: int) -> bytes:
            out = processes[member].stdout
            assert out is not None
            return out.readline().strip()

        for member in range(3):
            assert hears(member) == b"here"
        for _ in range(4):
            victim, meetings = chance.randrange(3), chance.randrange(1, 300)
            generation = owner.present_generation
            while owner.positions()[victim] < generation * GENERATION + meetings:
                os.sched_yield()
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].communicate()
            owner.end()
            for member in {0, 1, 2} - {victim}:
                said = hears(member)
                if said == b"done %d" % generation:  # it was killed after the last of its turns
                    processes[member].stdin.write(b"\n")  # type: ignore[union-attr]
                    processes[member].stdin.flush()  # type: ignore[union-attr]
                else:
                    assert said == b"aborted %d" % generation
            processes[victim] = start(GOES_ON, handle, victim)
            assert hears(victim) == b"here"
        for member in range(3):
            assert hears(member) == b"done %d" % owner.present_generation
        for process in processes:
            process.kill()
            process.communicate()


def test_a_generation_ends_for_who_waits_and_who_comes_late_but_not_for_who_has_met() -> None:
    with group_of(2) as handle:
        one, other, owner = LockstepGroup(handle, 0), LockstepGroup(handle, 1), Lockstep(handle, None)
        one.arrive(5)
        assert other.is_called
        assert not one.is_called
        other.arrive(6)
        assert one.said() == other.said() == [5, 6]
        assert owner.end() == 1
        assert one.has_met, "what all have come to has been"
        with pytest.raises(AbortedError):
            one.all_gather(torch.zeros(1, dtype=torch.uint8))
        assert owner.end(0) == 1
        assert owner.present_generation == 1, "a generation ends once, however many say so"
        assert not other.is_called, "nobody has begun the next"
        one.begin(1)
        one.arrive(7)
        assert other.is_called
        other.begin(1)
        assert not other.has_met
        other.arrive(8)
        assert other.said() == [7, 8]
        for view in (one, other, owner):
            view.close()


def test_a_step_that_fails_on_one_rank_ends_on_all() -> None:
    with group_of(2) as handle:
        one, other = LockstepGroup(handle, 0), LockstepGroup(handle, 1)

        def fail() -> None:
            with one.step(0):
                assert one.is_in_step
                raise MemoryError

        with pytest.raises(MemoryError):
            fail()
        assert not one.is_in_step
        with pytest.raises(AbortedError), other.step(0):
            other.all_gather(torch.zeros(1, dtype=torch.uint8))
        assert one.present_generation == other.present_generation == 1
        for view in (one, other):
            view.close()
