"""A lock that tells of its holder's death."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from quire_engine.ipc.owner_lock import LOCK_BYTES, OwnerLock
from quire_engine.ipc.semaphore import SharedMemory

HOLDER = """
import sys, threading
from quire_engine.ipc.owner_lock import OwnerLock
from quire_engine.ipc.semaphore import SharedMemory
lock = OwnerLock(SharedMemory(int(sys.argv[1])).view, 16, is_new=False)
if sys.argv[2] == "thread":
    holding = threading.Thread(target=lock.hold)
    holding.start()
    holding.join()
else:
    lock.hold()
    del lock
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(descriptor: int, by: str = "process") -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-c", HOLDER, str(descriptor), by]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process
        process.kill()


@pytest.fixture
def memory() -> Iterator[tuple[int, SharedMemory]]:
    descriptor = SharedMemory.create("quire-test", 16 + LOCK_BYTES)
    memory = SharedMemory(descriptor)
    yield descriptor, memory
    memory.close()
    os.close(descriptor)


def test_whoever_waits_learns_that_the_holder_was_killed(memory: tuple[int, SharedMemory]) -> None:
    lock = OwnerLock(memory[1].view, 16, is_new=True)
    with held(memory[0]) as process:
        assert lock.wait(0) is False
        answers: list[bool | None] = []
        waiting = threading.Thread(target=lambda: answers.append(lock.wait(60)))
        waiting.start()
        process.kill()
        waiting.join()
    assert answers == [True]
    assert lock.wait(60) is None, "it was told"
    lock.close()


@pytest.mark.parametrize("by", ["process", "thread"])
def test_or_that_it_has_ended_by_itself(memory: tuple[int, SharedMemory], by: str) -> None:
    lock = OwnerLock(memory[1].view, 16, is_new=True)
    with held(memory[0], by) as process:
        if by == "thread":
            assert lock.wait(60) is True, "join() returns before the kernel has ended the thread"
        else:
            assert lock.wait(0) is False
            assert process.stdin is not None
            process.stdin.close()
            assert lock.wait(60) is True
    lock.close()


def test_without_a_holder_there_is_nothing_to_learn(memory: tuple[int, SharedMemory]) -> None:
    lock = OwnerLock(memory[1].view, 16, is_new=True)
    assert lock.wait(60) is None
    with held(memory[0]), pytest.raises(OSError, match="pthread_mutex_trylock: EBUSY"):
        lock.hold()
    lock.close()
