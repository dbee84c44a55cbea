"""How fast KV blocks are kept and found again, by one thread, next to memcpy of the same blocks.

    python tests/benchmarks/kv_block_rates.py [--kib 48 128 1024] [--rounds 5] [--folder /dev/shm]

GB/s of blocks, the median of the rounds, and what share of memcpy that is; the ways take turns. In shared memory
(`MemoryStore`) and in files of a folder (`FolderStore`), with digests: blocks that are new, in slots or files whose
room others had before, then the same read again. And what they are made of: digests alone, and the order of the CPU's
cache to that of a row and back (12 layers of bfloat16). What the system's first touch of memory costs comes last.
"""

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.kv_cache import AttentionSpec
from quire_engine.kv_connector.block_file import MOST_TOGETHER
from quire_engine.kv_connector.block_store import BlockStore
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.kv_connector.memory_store import MemoryStore
from quire_engine.kv_connector.pages import Pages
from quire_kernels.cpu import set_num_threads
from quire_kernels.kv_cache import new_kv_cache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.shared_blocks import copy_digest

TOTAL_BYTES = 128 << 20
"""Of the blocks of a round: much more than caches hold."""
LAYERS = 12
BLOCK_SIZE = 16


def hashes(number: int, round_number: int) -> list[bytes]:
    """New ones in each round."""
    return [hashlib.sha256(f"{round_number} {i}".encode()).digest() for i in range(number)]


def in_parts(
    call: Callable[[list[tuple[bytes, memoryview]]], int], names: list[bytes], rows: npt.NDArray[np.uint8]
) -> None:
    """As a connector's threads do it."""
    for first in range(0, len(rows), MOST_TOGETHER):
        some = slice(first, first + MOST_TOGETHER)
        blocks = list(zip(names[some], (row.data for row in rows[some]), strict=True))
        assert call(blocks) == len(blocks)


def measure(block_bytes: int, rounds: int, folder: Path) -> None:
    """One size of blocks."""
    number = TOTAL_BYTES // block_bytes
    source = np.random.default_rng(1).integers(0, 256, (number, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    heads = block_bytes // (LAYERS * 2 * BLOCK_SIZE * 64 * 2)
    shape = (number, heads, BLOCK_SIZE, 64, torch.bfloat16)
    caches = [(new_kv_cache(*shape), new_kv_cache(*shape)) for _ in range(LAYERS if heads else 0)]
    for keys, values in caches:
        keys.fill_(1.0)
        values.fill_(2.0)
    pages = Pages(lambda: caches, [AttentionSpec(heads, heads, 64)] * LAYERS) if caches else None
    descriptor = SharedMemory.create("benchmark-blocks", 2 * TOTAL_BYTES)
    memory = MemoryStore(descriptor, bytes(32), 0)
    memory.divide(block_bytes)
    files = FolderStore(folder, bytes(32), 0, 2 * TOTAL_BYTES)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], object]) -> None:
        began_at = time.perf_counter()
        run()
        seconds.setdefault(name, []).append(time.perf_counter() - began_at)

    def copy() -> None:
        for i in range(number):
            target[i] = source[i]

    def digest() -> None:
        copy_digest(source.reshape(-1), None)

    stores: dict[str, BlockStore] = {"memory": memory, "files": files}
    for round_number in range(-3, rounds):
        names = hashes(number, round_number)
        if round_number == 0:
            seconds.clear()  # until here room was made for the first time
        timed("memcpy", copy)
        timed("digest alone", digest)
        for name, store in stores.items():
            timed(f"{name}: write", partial(in_parts, store.write, names, source))
            timed(f"{name}: read", partial(in_parts, store.read, names, target))
            assert np.array_equal(target, source)
        ids = list(range(number))
        for first in range(0, number, MOST_TOGETHER) if pages is not None else ():
            some = ids[first : first + MOST_TOGETHER]
            began_at = time.perf_counter()
            rows = pages.read(some)
            middle = time.perf_counter()
            pages.write(some, rows)
            for name, one in (("cache to rows", middle - began_at), ("rows to cache", time.perf_counter() - middle)):
                seconds.setdefault(name, []).append(one)
    print(f"blocks of {block_bytes >> 10} KiB:")
    memcpy = number * block_bytes / statistics.median(seconds["memcpy"]) / 1e9
    for name, found in seconds.items():
        num_bytes = number * block_bytes
        if name in ("cache to rows", "rows to cache"):
            num_bytes = MOST_TOGETHER * block_bytes
        rate = num_bytes / statistics.median(found) / 1e9
        print(f"  {name:14} {rate:6.2f} GB/s  {rate / memcpy:5.0%} of memcpy")
    memory.close()
    os.close(descriptor)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[48, 128, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    arguments = parser.parse_args()
    set_num_threads(1)
    for kib in arguments.kib:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="quire-kv-") as folder:
            measure(kib << 10, arguments.rounds, Path(folder))
    descriptor = SharedMemory.create("benchmark-blocks", TOTAL_BYTES)
    memory = np.frombuffer(SharedMemory(descriptor).view, dtype=np.uint8)
    source = np.ones(TOTAL_BYTES, dtype=np.uint8)
    began_at = time.perf_counter()
    memory[:] = source
    print(f"memory that was never written before: {TOTAL_BYTES / (time.perf_counter() - began_at) / 1e9:.2f} GB/s")
    os.close(descriptor)


if __name__ == "__main__":
    main()
