"""RankBoard: what the ranks of an engine post for its core, in shared memory that all of them map.

::

    busy time    │ ns of rank 0  │ ns of rank 1  │ …                 a cache line each, written by its rank alone
    transfers    │ row of rank 0 │ row of rank 1 │ …                 with a KV connector: `TransferBoard`
    adapters     │ row of rank 0 │ row of rank 1 │ …                 with LoRA adapters: `AdapterBoard`
    experts      │ layer 0: tokens of expert 0, 1, … │ layer 1 │ …   with experts: written by one rank of each stage

All numbers are int64. They are in memory rather than in messages: no step waits for them, and they can be read even if
a rank hangs. The parts that an engine has follow from its settings and its model, so its descriptor suffices.
"""

import os

import numpy as np
import numpy.typing as npt

from quire_engine.adapters.board import AdapterBoard, row_length
from quire_engine.config import EngineCoreConfig
from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.kv_connector.board import ROW, TransferBoard

_BUSY_ROW = 8
"""A cache line."""


class RankBoard:
    """One process's view of the memory: inherited by its descriptor, or new. `expert_shape` is layers and experts of
    the model; None without experts."""

    def __init__(
        self, config: EngineCoreConfig, expert_shape: tuple[int, int] | None, descriptor: int | None = None
    ) -> None:
        num_ranks = config.parallel.world_size
        has_connector = config.cache.kv_transfer_config is not None
        adapter_row = row_length(config.lora.num_ready) if config.lora.enable_lora else 0
        sizes = (
            num_ranks * _BUSY_ROW, num_ranks * ROW * has_connector, num_ranks * adapter_row,
            int(np.prod(expert_shape or 0)),
        )  # fmt: skip
        if descriptor is None:
            descriptor = SharedMemory.create("quire-rank-board", 8 * sum(sizes))
        self.descriptor = descriptor
        cells: npt.NDArray[np.int64] = np.frombuffer(SharedMemory(descriptor).view, dtype=np.int64)
        busy, transfers, adapters, experts = np.split(cells, np.cumsum(sizes[:-1]))
        self._busy_nanoseconds = busy.reshape(num_ranks, _BUSY_ROW)[:, 0]
        self.transfers = TransferBoard(transfers.reshape(num_ranks, ROW)) if has_connector else None
        self.adapters = AdapterBoard(adapters.reshape(num_ranks, adapter_row)) if adapter_row else None
        self.expert_tokens = None if expert_shape is None else experts.reshape(expert_shape)
        """[layers, experts], the tokens that each was sent; a token counts once for each of its experts."""

    def add_busy(self, rank: int, nanoseconds: int) -> None:
        """Add to the time that a rank has computed. Waits for other ranks are left out, except on GPUs, which wait
        inside kernels: all ranks' steps end together, and these times show which rank is the slowest."""
        self._busy_nanoseconds[rank] += nanoseconds

    def busy_seconds(self) -> list[float]:
        """How long each rank has computed so far."""
        seconds: list[float] = (self._busy_nanoseconds / 1e9).tolist()
        return seconds

    def close(self) -> None:
        """Close this process's descriptor; the memory stays mapped as long as something refers to it."""
        os.close(self.descriptor)
