"""How much memory the KV cache can have: measured by a profiling run, on the CPU and on a GPU.

::

    a GPU's memory   │ others' │ weights │ largest step │ libraries │ CUDA graphs │ KV cache │ left free │
                               │◄──────────── gpu_memory_utilization of all memory ─────────►│
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.system.memory import available_memory_bytes, peak_memory_growth, total_memory_bytes, trim_heap

CPU_MEMORY_SHARE = 0.5
"""On the CPU the cache shares memory with everything else on the machine, so all ranks together plan with at most this
share of it."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Result of a profiling run, in bytes."""

    planned_bytes: int
    """The memory that `gpu_memory_utilization` allows."""
    activation_bytes: int
    """Peak of the largest step's activations."""
    available_bytes: int
    """What is left of `planned_bytes` for the cache; may be negative."""


def check_tables(max_num_seqs: int, max_model_len: int, head_size: int) -> None:
    """Raise ValueError unless the tables that grow with the context fit into the memory: angles per position, token ids
    per slot. `max_model_len` defaults to the checkpoint's `max_position_embeddings`, which may be any number."""
    angle_bytes = 10 * head_size  # cos and sin in float32, and what they are computed from
    slot_bytes = 16 * max_num_seqs  # token ids, and for penalties
    needed, available = max_model_len * (angle_bytes + slot_bytes), available_memory_bytes()
    if needed > available:
        raise ValueError(
            f"max_model_len is {max_model_len}: with max_num_seqs={max_num_seqs} its tables may take "
            f"{needed / 2**20:.0f} MiB, and {available / 2**20:.0f} MiB are free; set max_model_len to at most "
            f"{available // (angle_bytes + slot_bytes)}, or lower max_num_seqs"
        )


class CpuCacheMemory:
    """Measures the machine's memory that is free now."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config

    def check_setting(self) -> None:
        """Raise ValueError unless the machine has as much memory as `kv_cache_memory_bytes`. Other processes may hold
        some of it now: the cache takes its pages only as it uses them."""
        parallel = self._config.parallel
        ranks = 1 if parallel.executor_backend == "ray" else parallel.num_all_ranks  # Ray's may be on other machines
        where = "this machine" if ranks == 1 else f"this machine for each rank of {ranks}"
        _check_setting(self._config, total_memory_bytes() // ranks, where)

    def measure(
        self, profile_run: Callable[[], None], recorded_bytes: Callable[[], int], mapped_bytes: int
    ) -> CacheMemory:
        """Run the largest possible step; for the arguments see `CacheAllocator.num_blocks`."""
        activation_bytes = peak_memory_growth(profile_run) + recorded_bytes()
        trim_heap()  # free what the largest step allocated; later steps may be small
        planned_bytes = self.planned_bytes(mapped_bytes)
        return CacheMemory(planned_bytes, activation_bytes, planned_bytes - activation_bytes)

    def planned_bytes(self, unloaded_bytes: int) -> int:
        """The memory that a rank plans with now, if that many bytes of each rank's weights are not in it yet."""
        num_ranks = self._config.parallel.num_all_ranks
        share = CPU_MEMORY_SHARE * self._config.cache.gpu_memory_utilization / num_ranks
        return int((available_memory_bytes() - num_ranks * unloaded_bytes) * share)


class GpuCacheMemory:
    """Measures one GPU's memory. Must be created before the rank allocates any of it.

    Raises:
        ValueError: other processes hold so much of it that the rank's share is not free.
    """

    def __init__(self, config: EngineCoreConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._free_at_start, total = torch.cuda.mem_get_info(device)
        self._total = total
        share = config.cache.gpu_memory_utilization
        self.planned_bytes = int(total * share)
        if config.cache.kv_cache_memory_bytes is None and self.planned_bytes > self._free_at_start:
            raise ValueError(
                f"gpu_memory_utilization is {share}: that is {self.planned_bytes} bytes of {device}, of which "
                f"{self._free_at_start} are free; lower it, or end what else uses that GPU"
            )

    def check_setting(self) -> None:
        """Raise ValueError unless the GPU has as much memory as `kv_cache_memory_bytes`."""
        _check_setting(self._config, self._total, str(self._device))

    def measure(self, profile_run: Callable[[], None], graph_bytes: int) -> CacheMemory:
        """Run the largest possible step, after the weights are loaded; leave some memory for CUDA graphs."""
        weights = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        profile_run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        # Memory outside torch's allocator: libraries' workspaces, and kernels.
        outside = self._free_at_start - self.free_bytes() - torch.cuda.memory_reserved(self._device)
        available = self.planned_bytes - peak - max(outside, 0) - graph_bytes
        return CacheMemory(self.planned_bytes, peak - weights, available)

    def free_bytes(self) -> int:
        """Free memory of the GPU now, including what torch's allocator has cached."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


def _check_setting(config: EngineCoreConfig, total: int, where: str) -> None:
    limit = config.cache.kv_cache_memory_bytes
    if limit is not None and limit > total:
        raise ValueError(
            f"kv_cache_memory_bytes is {limit}, and {where} has {total} bytes of memory; lower it, or leave it unset"
        )
