"""KVMemory: memory that keeps KV blocks when engines are restarted. The process that starts the engines owns it.

::

    frontend, owner of the memory ─ descriptor, inherited ─┬─► engine core 0 ─┬─► rank 0     all map the same memory:
                                                           │                  └─► rank 1     `MemoryStore`
                                                           └─► engine core 1 …

An engine that is killed leaves the memory as it is, and the next one inherits it. When the frontend ends, its engines
end, and with the last process the memory is freed. Pages are allocated as they are filled. There is no file in
/dev/shm, whose size is no limit; the machine's memory and the container's limit are. This module never imports torch.
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
"""The default size, as a share of the memory that is free at the start."""
MAX_DEFAULT_BYTES = 16 << 30
PAGE_BYTES = 4096
LEAST_BYTES = 1 << 20
"""Room for the index and a block."""


class KVMemory:
    """The memory of one model on this host, if its settings say so. It is closed when this object is dropped.

    Args:
        config: all settings.

    Raises:
        ValueError: there is not enough memory.
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
        """The settings for the engines, with the memory's descriptor."""
        return self._config

    def close(self) -> None:
        """Close it. Engines that still run keep it until they end. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _allocate(max_bytes: int | None) -> int:
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
