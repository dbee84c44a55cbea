"""SharedMemoryCommunicator: ranks in their own processes compute what plain torch does, the same bits on each."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

import msgspec
import pytest
from quire_engine.distributed.shared_memory import AbortFlag, AbortFlagHandle, SharedMemoryGroup
from support.processes import ended, open_descriptors, start_forked

RANK = """
    import sys, msgspec, torch
    from quire_engine.distributed.shared_memory import (
        AbortedError, AbortFlag, AbortFlagHandle, SharedMemoryCommunicator, SharedMemoryGroup
    )
    torch.set_num_threads(1)
    group = msgspec.json.decode(sys.argv[1], type=SharedMemoryGroup)
    flag = AbortFlag(msgspec.json.decode(sys.argv[2], type=AbortFlagHandle))
    rank, size = int(sys.argv[3]), group.size
    communicator = SharedMemoryCommunicator(group, rank, flag)
    assert (communicator.rank, communicator.size) == (rank, size)
    generator = torch.Generator().manual_seed(0)

    def tensors(shape, dtype=torch.float32):  # of all ranks; each of them makes the same
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]

    def say(text):
        print(text, flush=True)

"""

SUMS = """
    shapes = [(), (1,), (0, 5), (3,), (7, 33), (64, 64), (1, 63), (1, 65), (129, 5)]
    for repetition in range(10):
        for shape in shapes:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                terms = tensors(shape, dtype)
                total = terms[0].float()
                for term in terms[1:]:
                    total = total + term.float()
                got = communicator.all_reduce(terms[rank].clone())
                assert torch.equal(got, total.to(dtype)), (shape, dtype)
                strided = tensors((6, 10), dtype)
                total = sum((term.float() for term in strided[1:]), strided[0].float())
                got = communicator.all_reduce(strided[rank].t().contiguous().t())
                assert torch.equal(got, total.to(dtype))
    say("sums")
"""

GATHERS = """
    for repetition in range(10):
        for shape in [(1, 1), (5, 7), (0, 4), (33, 65), (64, 64)]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                shards = tensors(shape, dtype)
                got = communicator.gather(shards[rank])
                assert (got is None) == (rank != 0)
                assert got is None or torch.equal(got, torch.cat(shards, dim=1))
    say("gathers")
"""

CHAIN = """
    for repetition in range(10):
        for shape in [(1, 1), (5, 7), (0, 4), (33, 65), (300, 64)]:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                (tensor, *_), (other, *_) = tensors(shape, dtype), tensors(shape, dtype)
                if rank > 0:
                    assert torch.equal(communicator.receive(shape, dtype, rank - 1), tensor)
                    assert torch.equal(communicator.receive(shape, dtype, rank - 1), other)
                if rank < size - 1:
                    communicator.send(tensor.t().contiguous().t(), rank + 1)
                    communicator.send(other, rank + 1)
    say("chain")
"""

ALL_TURNS = """
    for i in range(2000):  # ranks that are now faster, now slower than the others
        if (i * 7 + rank * 3) % 5 == 0:
            torch.randn(2000).sort()
        got = communicator.all_reduce(torch.full((3,), float(i + rank)))
        assert got.tolist() == [float(size * i + size * (size - 1) / 2)] * 3, i
    say("turns")
"""

ABORTS = """
    for operation in ("all_reduce", "gather", "receive", "send"):
        communicator.all_reduce(torch.ones(5))
        say("waiting")
        if rank == 0:
            sys.stdin.readline()  # fails instead of taking part
            flag.set()
        try:
            if operation == "receive":
                communicator.receive((3,), torch.float32, 0 if rank else 1)
            elif operation == "send":
                communicator.send(torch.ones(100 * group.piece_bytes), 0 if rank else 1)
            else:
                getattr(communicator, operation)(torch.ones(5, 5))
        except AbortedError:
            pass
        else:
            raise AssertionError(operation)
        communicator.forget()
        say("aborted")
        sys.stdin.readline()
        shards = tensors((5, 300))
        assert torch.equal(communicator.all_reduce(shards[rank].clone()), sum(shards[1:], shards[0]))
        if rank == 0:
            communicator.send(shards[0], 1)
        elif rank == 1:
            assert torch.equal(communicator.receive((5, 300), torch.float32, 0), shards[0])
        say("well again")
"""


@contextlib.contextmanager
def ranks(
    source: str, size: int, piece_bytes: int = 1024
) -> "Iterator[tuple[list[subprocess.Popen[bytes]], SharedMemoryGroup, AbortFlagHandle]]":
    descriptors = open_descriptors()
    group, flag = SharedMemoryGroup.create(size, piece_bytes), AbortFlagHandle.create()
    processes = [
        start_forked(
            RANK + source,
            msgspec.json.encode(group),
            msgspec.json.encode(flag),
            str(rank),
            pass_fds=[*group.descriptors(rank), *flag.descriptors()],
        )
        for rank in range(size)
    ]
    with ended(processes):
        yield processes, group, flag
    group.close()
    flag.close()
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_with_plain_torch(size: int) -> None:
    with ranks(SUMS + GATHERS + CHAIN + ALL_TURNS, size) as (processes, _, _):
        for process in processes:
            out, _ = process.communicate(timeout=120)
            assert (process.returncode, out) == (0, b"sums\ngathers\nchain\nturns\n")


def test_abort_frees_all_who_wait_and_a_reset_makes_everything_as_new() -> None:
    with ranks(ABORTS, 3) as (processes, group, handle):

        def all_say(text: bytes) -> None:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == text + b"\n"

        def tell(process: "subprocess.Popen[bytes]") -> None:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

        flag = AbortFlag(handle)
        for _ in range(4):
            all_say(b"waiting")
            tell(processes[0])
            all_say(b"aborted")
            group.reset()
            flag.reset()
            for process in processes:
                tell(process)
            all_say(b"well again")
        flag.close()
        assert [process.wait(60) for process in processes] == [0, 0, 0]


def test_memory_has_no_name() -> None:
    group = SharedMemoryGroup.create(2)
    assert os.readlink(f"/proc/self/fd/{group.memory}") == "/memfd:quire-group (deleted)"
    group.close()
