"""KVMemory: memory that keeps KV blocks while engines come and go. It belongs to the process that starts these.

::

    frontend, owner of the memory ─ descriptor, inherited ─┬─► engine core 0 ─┬─► rank 0     all map the same memory:
            │                                              │                  └─► rank 1     `MemoryStore`
            │ one segment, without a name                  └─► engine core 1 …
            ▼
    an engine that is killed leaves it as it is, and the next one inherits it;
    when the frontend has gone, however it went, its engines end, and with the last process the memory is gone

It takes memory as it is filled, up to its size, and has no file: nothing is in /dev/shm, and the size of that does not
limit it; the machine's memory and the container's limit do. This module never imports torch.
"""

import contextlib
import fcntl
import os
import weakref
from dataclasses import replace

from quire_engine.config import EngineConfig
from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.system.memory import available_memory_bytes

DEFAULT_SHARE = 0.25
"""Of the memory that is free at the start, if the setting does not say how much."""
MAX_DEFAULT_BYTES = 16 << 30
PAGE_BYTES = 4096
LEAST_BYTES = 1 << 20
"""Less does not hold the index and a block."""


class KVMemory:
    """The memory of one model on this host, if its settings ask for it. When this object is dropped, it is let go.

    Args:
        config: all settings.

    Raises:
        ValueError: there is not as much memory.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._finalizer = None
        self._config = config
        transfer = config.cache.kv_transfer_config
        memory = None if transfer is None else transfer.memory
        if memory is None:
            return
        descriptor = _allocate(memory.max_bytes)
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._config = replace(config, cache=replace(config.cache, kv_memory=descriptor))

    @property
    def config(self) -> EngineConfig:
        """The settings, with which engines find it."""
        return self._config

    def close(self) -> None:
        """Let go of it. Engines that still run keep it until they end. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _allocate(max_bytes: int | None) -> int:
    """A descriptor of memory of fixed size."""
    free = available_memory_bytes()
    num_bytes = min(int(free * DEFAULT_SHARE), MAX_DEFAULT_BYTES) if max_bytes is None else max_bytes
    if not LEAST_BYTES <= num_bytes <= free:
        raise ValueError(
            f"kv_transfer_config: kv_connector_extra_config: max_bytes is {num_bytes}; it must be at least "
            f"{LEAST_BYTES}, and at most what is free of this machine's memory, or of the container's: {free} bytes"
        )
    descriptor = SharedMemory.create("quire-kv-blocks", num_bytes // PAGE_BYTES * PAGE_BYTES)
    with contextlib.suppress(OSError):  # a sandbox without seals: the size is not fixed there
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
