"""TorchDistributedCommunicator: ranks on several machines, or on GPUs, over torch.distributed's process groups.

gloo transfers CPU tensors and NCCL GPU tensors. For CPU ranks on one machine, shared memory is faster.
"""

import os
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from quire_engine.distributed.communicator import ParallelState

_Sending: TypeAlias = tuple[dist.Work, torch.Tensor]


class TorchDistributedCommunicator:
    """A process group of torch.distributed as a `Communicator`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sending: _Sending | None = None
        """The last `send`; keeps its tensor alive until it has completed."""

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def size(self) -> int:
        return self._group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each part is summed on one rank and sent to the others, so all get the same bits.

        Works in place. NCCL runs on the current stream without a wait, so this can be part of a CUDA graph.
        """
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor, parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=-1)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Waits for the previous `send`, so at most one is in flight."""
        if self._sending is not None:
            self._sending[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=rank)
        assert work is not None
        self._sending = work, tensor

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(tensor, group=self._group, group_src=rank)
        return tensor


def initialize_parallel_state(
    *,
    rank: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    init_method: str,
    device: torch.device | None = None,
    interface: str | None = "lo",
    timeout_seconds: float = 300.0,
) -> ParallelState:
    """Meet the other ranks, and form this one's groups. Every rank of the engine calls it once, in its own process.

    Args:
        rank: this rank, from 0; see `ParallelState` for the order.
        tensor_parallel_size: ranks of a stage.
        pipeline_parallel_size: stages.
        init_method: where the ranks meet: `file://PATH` of a file that does not exist yet, on one machine;
            `tcp://HOST:PORT` on several.
        device: where this rank computes; unset: the CPU.
        interface: the network interface that gloo and NCCL listen on: loopback, unless there are several machines.
            None: they choose it themselves.
        timeout_seconds: how long a rank waits for the others, in each operation.

    Raises:
        RuntimeError: the other ranks did not join in time.
    """
    device = device or torch.device("cpu")
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME" if device.type == "cpu" else "NCCL_SOCKET_IFNAME"] = interface
    os.environ["NCCL_RAS_ENABLE"] = "0"  # it opens a port for diagnostic queries
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=init_method,
        rank=rank,
        world_size=tensor_parallel_size * pipeline_parallel_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=None if device.type == "cpu" else device,
    )
    ranks = torch.arange(tensor_parallel_size * pipeline_parallel_size).view(-1, tensor_parallel_size)
    return ParallelState(
        rank=rank,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        tensor_group=_own_group(ranks.tolist(), rank, device),
        pipeline_group=_own_group(ranks.T.tolist(), rank, device),
    )


def shutdown_parallel_state() -> None:
    """Leave all groups. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_group(groups: list[list[int]], rank: int, device: torch.device) -> TorchDistributedCommunicator | None:
    """Form all groups, as every rank has to call `new_group` for each of them; returns this rank's own.

    Returns None if each group has only one rank.
    """
    if len(groups[0]) == 1:
        return None
    formed = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    own = next(group for ranks, group in formed.items() if rank in ranks)
    return TorchDistributedCommunicator(own, device)
