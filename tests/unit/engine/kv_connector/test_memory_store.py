"""Blocks in memory that processes share: what is read is what was written, or nothing, whoever is killed when."""

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash
from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.kv_connector.block_file import BlockFileError
from quire_engine.kv_connector.memory_store import MemoryIndex, MemoryStore
from quire_engine.system.crash_loop import CircuitBreaker
from quire_kernels.cpu import INSTRUCTION_SETS, library
from support.processes import start_forked
from support.shared_blocks import BlockSteps, copy_digest

pytestmark = pytest.mark.skipif(library() is None, reason="needs the C++ kernels")

NAMESPACE = hashlib.sha256(b"a model").digest()
SIZE = 40_000
TESTS = str(Path(__file__).parents[3])
MUTEX_AT, BUCKETS_AT, SLOTS_AT, ORDER_AT = 16, 88, 96, 152
"""In `Header` of kernels/csrc/shared_blocks.h."""


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload_of(number: int, size: int = SIZE) -> memoryview:
    return memoryview(Random(number).randbytes(size))


class Memory:
    """A segment with room for some blocks, and stores in it."""

    def __init__(self, num_bytes: int, size: int = SIZE) -> None:
        self.size = size
        self.descriptor = SharedMemory.create("test-blocks", num_bytes)
        self.stores: list[MemoryStore] = []
        self.store = self.open()
        self.store.divide(size)
        self.num_slots = self.store.stats().num_slots
        self.steps = BlockSteps(self.store.blocks)

    def open(self, namespace: bytes = NAMESPACE, rank: int = 0) -> MemoryStore:
        self.stores.append(MemoryStore(self.descriptor, namespace, rank))
        return self.stores[-1]

    def write(self, *numbers: int, store: MemoryStore | None = None) -> int:
        return (store or self.store).write([(hash_of(number), payload_of(number, self.size)) for number in numbers])

    def read(self, number: int, store: MemoryStore | None = None) -> memoryview | None:
        room = memoryview(bytearray(self.size))
        return room if (store or self.store).read([(hash_of(number), room)]) else None

    def stored(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if self.store.num_stored([hash_of(number)])]

    def run(self, code: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Another process, with `store` open; it says that it is where it should be with one byte."""
        prelude = (
            "import os, signal, sys, ctypes, hashlib\nfrom quire_engine.kv_connector.memory_store import MemoryStore\n"
            f"sys.path.append({TESTS!r})\nfrom support.shared_blocks import BlockSteps\n"
            f"store = MemoryStore({self.descriptor}, {NAMESPACE!r}, 0)\nsteps = BlockSteps(store.blocks)\n"
            "hash_of = lambda number: hashlib.sha256(str(number).encode()).digest()\n"
            "def here():\n    os.write(1, b'!')\n"
            "def die():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        return start_forked(prelude + code, *map(str, arguments), pass_fds=[self.descriptor])

    def run_to_death(self, code: str) -> None:
        child = self.run(code)
        child.communicate()
        assert child.returncode == -signal.SIGKILL

    def close(self) -> None:
        for store in self.stores:
            store.close()
        os.close(self.descriptor)


@pytest.fixture
def memory() -> Iterator[Memory]:
    one = Memory(2 << 20)
    yield one
    one.close()


@contextlib.contextmanager
def running(memory: Memory, code: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has come where it should be, and waits there; killed in the end."""
    child = memory.run(code + "\nhere()\nsys.stdin.read()\n")
    assert child.stdout is not None
    assert child.stdout.read(1) == b"!"
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_digests_are_xxh3_and_copies_whole(instruction_set: str) -> None:
    handle = library()
    assert handle is not None
    from quire_kernels.cpu import status

    if not handle.quire_select(instruction_set.encode()):
        pytest.skip(f"this processor has no {instruction_set}")
    try:
        for size in (1, 63, 240, 241, 256, 1000, 1024, 1025, 1088, 2048, 5001, 49152):
            source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
            padded = source.tobytes() if size > 240 else source.tobytes().ljust(256, b"\0")
            for around in (False, True):
                target = np.zeros(size + 65, dtype=np.uint8)
                start = -target.ctypes.data % 64
                assert copy_digest(source, target[start : start + size], around) == xxhash.xxh3_128_intdigest(padded)
                assert np.array_equal(target[start : start + size], source)
                assert not target[start + size :].any()
            assert copy_digest(source, None) == xxhash.xxh3_128_intdigest(padded)
    finally:
        name = status().instruction_set
        assert name is not None
        handle.quire_select(name.encode())


def test_others_find_what_one_has_written(memory: Memory) -> None:
    assert memory.write(1, 2) == 2
    other = memory.open()
    assert memory.read(1, other) == payload_of(1)
    assert memory.read(3, other) is None
    assert other.num_stored([hash_of(1), hash_of(2), hash_of(3)]) == 2
    for stranger in (memory.open(rank=1), memory.open(namespace=bytes(32))):
        assert memory.read(1, stranger) is None
        assert memory.write(1, store=stranger) == 1
    assert memory.store.stats().num_blocks == 4
    assert set(memory.steps.hashes()) == {hash_of(1), hash_of(2)}


@pytest.mark.parametrize("size", [8, 200, 4096, 100_001])
def test_blocks_of_any_size(size: int) -> None:
    memory = Memory(8 << 20, size)
    try:
        assert memory.write(*range(20)) == 20
        assert memory.write(*range(20)) == 20, "they are there already"
        assert memory.store.stats().num_blocks == 20
        assert [memory.read(number) for number in range(20)] == [payload_of(number, size) for number in range(20)]
    finally:
        memory.close()


def test_memory_that_is_too_small_or_has_other_slots_is_refused(memory: Memory) -> None:
    with pytest.raises(OSError, match="slots for blocks of another size"):
        memory.open().divide(2 * SIZE)
    with pytest.raises(ValueError, match="another size"):
        memory.store.write([(hash_of(1), memoryview(bytes(3 * SIZE)))])
    with pytest.raises(OSError, match="raise max_bytes"):
        Memory(1 << 20, 2 << 20)


def test_what_was_not_used_for_longest_makes_room_for_all(memory: Memory) -> None:
    number = memory.num_slots
    other = memory.open()
    for one in range(number):
        assert memory.write(one, store=(memory.store, other)[one % 2])
    assert memory.stored(range(number)) == list(range(number))
    assert memory.read(0, other) is not None  # it is used now
    memory.write(number, number + 1)
    assert memory.stored(range(number + 2)) == [0, *range(3, number + 2)]
    for one in range(5 * number):
        assert memory.write(one) == 1
        stats = memory.store.stats()
        assert stats.num_blocks == stats.num_used == number
    assert memory.stored(range(5 * number)) == list(range(4 * number, 5 * number))


def flip_payload(memory: Memory, slot: int) -> None:
    memory.steps.slot(slot)[SIZE // 2] ^= 1


def other_block(memory: Memory, slot: int) -> None:
    memory.steps.slot(slot)[:] = memory.steps.slot(1 - slot)


@pytest.mark.parametrize("damage", [flip_payload, other_block])
def test_a_damaged_slot_is_found_and_can_be_written_again(
    memory: Memory, damage: Callable[[Memory, int], None]
) -> None:
    memory.write(1, 2)
    (slot,) = memory.steps.pin([hash_of(1)], SIZE)
    assert memory.steps.unpin([hash_of(1)], [slot], SIZE) == 1
    damage(memory, slot)
    with pytest.raises(BlockFileError, match="does not match its digest"):
        memory.read(1)
    assert memory.stored([1, 2]) == [2]
    assert memory.store.stats().num_damaged == 1
    assert memory.write(1) == 1
    assert memory.read(1) == payload_of(1)


def test_a_damaged_block_ends_a_read_of_several(memory: Memory) -> None:
    memory.write(*range(6))
    (slot,) = memory.steps.pin([hash_of(3)], SIZE)
    memory.steps.unpin([hash_of(3)], [slot], SIZE)
    flip_payload(memory, slot)
    rooms = [(hash_of(number), memoryview(bytearray(SIZE))) for number in range(6)]
    assert memory.store.read(rooms) == 3
    assert [room for _, room in rooms[:3]] == [payload_of(number) for number in range(3)]


def test_a_pinned_slot_is_not_given_away(memory: Memory) -> None:
    memory.write(1)
    (slot,) = memory.steps.pin([hash_of(1)], SIZE)
    for number in range(2, 5 * memory.num_slots):
        assert memory.write(number) == 1
    assert memory.steps.slot(slot)[:SIZE] == payload_of(1)
    assert memory.steps.unpin([hash_of(1)], [slot], SIZE) == 1


def test_a_block_that_is_found_damaged_stays_for_who_reads_it(memory: Memory) -> None:
    memory.write(1)
    (slot,) = memory.steps.pin([hash_of(1)], SIZE)
    flip_payload(memory, slot)
    with pytest.raises(BlockFileError):
        memory.read(1, memory.open())
    content = bytes(memory.steps.slot(slot))
    for number in range(2, 3 * memory.num_slots):
        memory.write(number)
    assert bytes(memory.steps.slot(slot)) == content
    assert memory.steps.unpin([hash_of(1)], [slot], SIZE) == 0
    memory.write(*range(1000, 1000 + memory.num_slots))
    assert memory.store.stats().num_blocks == memory.num_slots, "its slot is used again"


def test_a_writer_killed_in_the_middle_of_a_block_leaves_none(memory: Memory) -> None:
    memory.run_to_death(
        f"(slot,) = steps.reserve([hash_of(1)], {SIZE})\nsteps.slot(slot)[:1000] = bytes([7]) * 1000\ndie()"
    )
    assert memory.stored([1]) == []
    assert memory.read(1) is None
    assert memory.store.stats().num_used == 1
    assert memory.write(1) == 1, "whoever wants to keep it does not wait for the dead"
    assert memory.read(1) == payload_of(1)
    memory.write(*range(2, 2 + memory.num_slots))
    assert memory.store.stats().num_blocks == memory.num_slots


def test_a_block_that_another_is_writing_is_neither_read_nor_written_again(memory: Memory) -> None:
    with running(memory, f"steps.reserve([hash_of(1)], {SIZE})"):
        assert memory.read(1) is None
        assert memory.write(1) == 1
        assert memory.store.stats().num_blocks == 0
    assert memory.write(1) == 1
    assert memory.store.stats().num_blocks == 1


def test_the_pin_of_a_reader_that_was_killed_is_let_go(memory: Memory) -> None:
    memory.write(*range(memory.num_slots))
    hashes = f"[hash_of(n) for n in range({memory.num_slots})]"
    with running(memory, f"assert len(steps.pin({hashes}, {SIZE})) == {memory.num_slots}"):
        assert memory.write(1000) == 0, "all are being read"
        assert memory.read(5) == payload_of(5)
    assert memory.write(*range(1000, 1000 + memory.num_slots)) == memory.num_slots
    assert memory.stored(range(memory.num_slots)) == []


def test_the_lock_of_a_process_that_was_killed_with_it_is_free_and_the_books_are_made_anew(memory: Memory) -> None:
    memory.write(*range(10))
    (slot,) = memory.steps.pin([hash_of(4)], SIZE)
    memory.run_to_death(
        f"steps.reserve([hash_of(50)], {SIZE})\nsteps.pin([hash_of(1)], {SIZE})\n"
        "lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        f"assert lock(ctypes.c_void_p(steps.address + {MUTEX_AT})) == 0\n"
        # In the middle of a change: nothing that is filed is found, and the order has no beginning.
        "at = lambda place: ctypes.c_uint64.from_address(steps.address + place).value\n"
        f"begin, end = at({BUCKETS_AT}), at({SLOTS_AT})\n"
        "ctypes.memset(steps.address + begin, 0, end - begin)\n"
        f"ctypes.memset(steps.address + {ORDER_AT}, 0, 8)\n"
        "die()"
    )
    assert memory.stored(range(10)) == list(range(10))
    stats = memory.store.stats()
    assert (stats.num_repairs, stats.num_blocks, stats.num_used) == (1, 10, 10)
    for number in range(100, 100 + 3 * memory.num_slots):
        assert memory.write(number) == 1
    assert memory.steps.slot(slot)[:SIZE] == payload_of(4), "a living reader's pin holds"
    assert memory.steps.unpin([hash_of(4)], [slot], SIZE) == 1
    assert memory.store.stats().num_blocks == memory.num_slots


def test_a_lock_that_is_held_by_who_is_stopped_is_not_waited_for(memory: Memory) -> None:
    memory.write(1)
    code = (
        "lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        f"lock(ctypes.c_void_p(steps.address + {MUTEX_AT}))"
    )  # fmt: skip
    with running(memory, code):
        assert MemoryIndex(memory.store).num_stored([hash_of(1)]) == 0
        with pytest.raises(OSError, match="is it stopped"):
            memory.read(1)
    assert MemoryIndex(memory.store).num_stored([hash_of(1)]) == 1


def test_processes_that_write_and_are_killed_at_random_leave_sound_blocks_within_the_bound(memory: Memory) -> None:
    code = (
        "from random import Random\nrandom = Random(int(sys.argv[1]))\nhere()\n"
        "while True:\n"
        "    first = random.randrange(60)\n"
        "    numbers = range(first, first + 8)\n"
        f"    blocks = [(hash_of(n), memoryview(Random(n).randbytes({SIZE}))) for n in numbers]\n"
        "    store.write(blocks)\n"
        f"    room = memoryview(bytearray({SIZE}))\n"
        "    for n in numbers:\n"
        "        if store.read([(hash_of(n), room)]):\n"
        f"            assert bytes(room) == Random(n).randbytes({SIZE})\n"
    )
    random = Random(1)
    children = [memory.run(code, seed) for seed in range(2)]
    try:
        for turn in range(3):
            for _ in range(random.randrange(20, 100)):
                number = random.randrange(60)
                content = memory.read(number)
                assert content is None or content == payload_of(number)
                stats = memory.store.stats()
                assert stats.num_blocks <= stats.num_used <= stats.num_slots
            victim = turn % 2
            children[victim].kill()
            children[victim].communicate()
            assert children[victim].returncode == -signal.SIGKILL, "it ended by itself"
            children[victim] = memory.run(code, 10 + turn)
            out = children[victim].stdout
            assert out is not None
            assert out.read(1) == b"!"
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert memory.write(*range(100, 100 + memory.num_slots)) == memory.num_slots
    assert memory.store.stats().num_blocks == memory.num_slots
    assert memory.store.stats().num_damaged == 0


def test_a_store_that_is_closed_says_so(memory: Memory) -> None:
    other = memory.open()
    other.close()
    with pytest.raises(OSError, match="the engine ends"):
        memory.read(1, other)
    assert MemoryIndex(other).num_stored([hash_of(1)]) == 0


def test_the_index_forgets_what_could_not_be_loaded_until_it_is_saved_again(memory: Memory) -> None:
    memory.write(1, 2)
    index = MemoryIndex(memory.store)
    assert index.num_stored([hash_of(1), hash_of(2), hash_of(3)]) == 2
    index.forget(hash_of(2))
    assert index.num_stored([hash_of(1), hash_of(2), hash_of(3)]) == 1
    assert not index.is_kept(hash_of(2))
    index.add(hash_of(2))
    assert index.is_kept(hash_of(2))


def test_nothing_in_dev_shm_and_no_memory_before_it_is_written() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = Memory(1 << 30)
    memory.write(*range(4))
    assert set(os.listdir("/dev/shm")) == before
    assert os.fstat(memory.descriptor).st_blocks * 512 < 8 << 20
    memory.close()


def test_who_is_reading_while_the_memory_is_let_go_of_ends_in_peace() -> None:
    """In a process of its own: the memory is unmapped, and a fault would take all tests with it."""
    code = """
import threading
payloads = [(hash_of(i), memoryview(bytearray(4_000_000))) for i in range(4)]
store.divide(4_000_000)
assert store.write(payloads) == 4
is_reading, errors = threading.Event(), []

def read():
    try:
        while True:
            store.read(payloads)
            is_reading.set()
    except OSError as error:
        errors.append(str(error))

threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads:
    thread.start()
is_reading.wait()
store.close()
for thread in threads:
    thread.join()
assert errors == ["the engine ends"] * 2, errors
here()
"""
    memory = SharedMemory.create("test-blocks", 40_000_000)
    prelude = (
        "import os, hashlib\nfrom quire_engine.kv_connector.memory_store import MemoryStore\n"
        f"store = MemoryStore({memory}, {NAMESPACE!r}, 0)\n"
        "hash_of = lambda number: hashlib.sha256(str(number).encode()).digest()\n"
        "def here():\n    os.write(1, b'!')\n"
    )
    try:
        for _ in range(3):
            child = start_forked(prelude + code, pass_fds=[memory])
            assert (child.communicate()[0], child.returncode) == (b"!", 0)
    finally:
        os.close(memory)


def test_who_has_no_descriptors_left_takes_nobody_for_dead() -> None:
    code = """
import resource, sys
own = int(sys.argv[1])
slots = steps.reserve([hash_of(0)], 40_000)
here()
sys.stdin.read(1)
steps.commit([hash_of(0)], slots, 40_000)
here()
sys.stdin.read(1)
"""
    memory = Memory(1_000_000)
    other = memory.run(code, 0)
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.read(1) == b"!"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert memory.write(0) == 1, "the other one is writing it"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    other.stdin.write(b"!")
    other.stdin.flush()
    assert other.stdout.read(1) == b"!", "it was not taken for dead"
    assert memory.stored([0]) == [0]
    other.communicate(b"!")


def test_nobody_is_asked_for_a_while_after_the_lock_could_not_be_had() -> None:
    asked = []

    class Locked:
        def num_stored(self, block_hashes: Sequence[bytes]) -> int:
            asked.append(len(block_hashes))
            raise OSError("another process holds the lock")

    now = 100.0
    index = MemoryIndex(Locked())  # type: ignore[arg-type]
    index._breaker = CircuitBreaker(lambda: now)
    assert [index.num_stored([hash_of(i)]) for i in range(500)] == [0] * 500
    assert not index.is_kept(hash_of(1))
    assert len(asked) == 1
    now = 101.5
    assert index.num_stored([hash_of(0)]) == 0
    assert len(asked) == 2
