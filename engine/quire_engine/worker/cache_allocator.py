"""CacheAllocator: sizes and allocates the KV cache of a rank, for its model and for the model that drafts; CacheLayout:
where the layers of a stage keep their states."""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from quire_kernels.kv_cache import new_kv_cache, scale_bytes

from quire_engine.config import EngineCoreConfig
from quire_engine.kv_cache import STATE, TOKENS, KVCacheGroups, StateSpec, StateTensor, block_bytes
from quire_engine.models.mapped import mapped_zeros
from quire_engine.models.step_context import KVCaches
from quire_engine.worker.cache_memory import CpuCacheMemory, GpuCacheMemory
from quire_engine.worker.forward.decode_graphs import (
    GRAPH_MEMORY_BYTES,
    CudaCapture,
    DecodeGraphs,
    capture_sizes,
    run_as_captured,
)
from quire_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MOST_DRAFTED_ROWS = 256
"""Rows of the largest step with drafts that is captured, if `max_num_seqs` is not above that: in larger ones the
kernels take so long that launching them one by one hardly matters."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The tensors of a stage's KV cache (`kv_cache/groups.py`).

    Attributes:
        group_ids: by layer, its group.
        tensor_ids: by layer, the index of the tensors that it uses. No two layers of a group use the same ones, unless
            they need them in no later step, or one reads the cache of the other.
        tensor_specs: by tensor, one of its layers, which all keep the same in it.
    """

    group_ids: list[int]
    tensor_ids: list[int]
    tensor_specs: list[StateSpec]

    @classmethod
    def of(cls, specs: Sequence[StateSpec], layer_numbers: Sequence[int], groups: KVCacheGroups) -> "CacheLayout":
        """Lay out a stage, of whose layers the specs and the numbers are given."""
        group_of = {number: group for group, numbers in enumerate(groups.layers) for number in numbers}
        owners = [
            number if spec.cache_of is None else spec.cache_of
            for number, spec in zip(layer_numbers, specs, strict=True)
        ]
        layout = cls([group_of[owner] for owner in owners], [], [])
        index = {number: i for i, number in enumerate(layer_numbers)}
        shared: dict[tuple[tuple[StateTensor, ...], int], int] = {}
        num_before: Counter[tuple[tuple[StateTensor, ...], int]] = Counter()
        for number, spec, group, owner in zip(layer_numbers, specs, layout.group_ids, owners, strict=True):
            if owner != number:
                layout.tensor_ids.append(layout.tensor_ids[index[owner]])
                continue
            tensors = spec.tensors
            place = num_before[tensors, group] if spec.is_lasting else -1
            num_before[tensors, group] += 1
            if (tensors, place) not in shared:
                shared[tensors, place] = len(layout.tensor_specs)
                layout.tensor_specs.append(spec)
            layout.tensor_ids.append(shared[tensors, place])
        return layout


def num_blocks_for(
    *,
    available_bytes: int,
    cache_bytes: Callable[[int], int],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    groups: KVCacheGroups,
) -> int:
    """Blocks that fit, and no more than `max_num_seqs` requests of full length could ever use, with the snapshots of
    their states; but so many that there are states for all of these (`KVCacheGroups.num_states`). With several groups
    of layers a block is one of any of them, so a request needs more of them, which are smaller. `cache_bytes` is the
    size of a cache of so many blocks. Raises ValueError if not even one fits."""
    per_request = groups.max_blocks(max_model_len, block_size, max_num_batched_tokens)
    if groups.windows == (STATE,):
        per_request += max_model_len // (block_size * groups.snapshot_blocks)
    elif groups.has_states:
        per_request = max(per_request, 2 * groups.snapshot_blocks)
    num_blocks = bisect_right(range(per_request * max_num_seqs + 1), available_bytes, key=cache_bytes) - 1
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory_bytes: one block of {block_size} tokens takes {cache_bytes(1)} bytes and only "
            f"{available_bytes} are available; one request of max_model_len={max_model_len} takes "
            f"{cache_bytes(per_request)}"
        )
    return num_blocks


def new_caches(
    config: EngineCoreConfig,
    cache_dtype: torch.dtype,
    device: torch.device,
    specs: Sequence[StateSpec],
    num_blocks: int,
    num_states: int = 0,
) -> KVCaches:
    """The tensors of each of some layers; on the CPU in huge pages, as a step's reads are scattered."""

    def cache(tensor: StateTensor, num_blocks: int) -> torch.Tensor:
        dtype = cache_dtype if tensor.dtype is None else getattr(torch, tensor.dtype)
        sizes = config.cache.block_size, config.scheduler.max_draft_tokens, scale_bytes(cache_dtype)
        shape = (num_blocks, *tensor.block_shape(*sizes))
        if 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            return mapped_zeros(shape, dtype, huge_pages=True)
        if TOKENS in tensor.shape:
            _, num_heads, block_size, head_size = shape
            return new_kv_cache(num_blocks, num_heads, block_size, head_size, dtype, device)
        return torch.zeros(shape, dtype=dtype, device=device)

    return [
        tuple(cache(tensor, num_states if spec.window == STATE else num_blocks) for tensor in spec.tensors)
        for spec in specs
    ]


def cache_bytes(
    config: EngineCoreConfig, specs: Sequence[StateSpec], cache_dtype: torch.dtype, groups: KVCacheGroups
) -> Callable[[int], int]:
    """A function that returns the bytes of a cache of so many blocks, which has the tensors of these specs."""
    sizes = config.cache.block_size, cache_dtype.itemsize, config.scheduler.max_draft_tokens, scale_bytes(cache_dtype)
    own = block_bytes([spec for spec in specs if spec.window != STATE], *sizes)
    state = block_bytes([spec for spec in specs if spec.window == STATE], *sizes)
    max_num_seqs = config.scheduler.max_num_seqs
    return lambda num_blocks: num_blocks * own + groups.num_states(num_blocks, max_num_seqs) * state


class CacheAllocator:
    """Gives a runner its KV cache, and CUDA graphs that refer to it."""

    def __init__(
        self,
        config: EngineCoreConfig,
        runner: ModelRunner,
        groups: KVCacheGroups,
        dtype: torch.dtype,
        max_model_len: int,
        gpu_memory: GpuCacheMemory | None,
        captures_graphs: bool,
        adapter_bytes: int = 0,
    ) -> None:
        self._adapter_bytes = adapter_bytes
        self._config, self._runner, self._groups, self._dtype = config, runner, groups, dtype
        self._max_model_len, self._gpu_memory, self._captures_graphs = max_model_len, gpu_memory, captures_graphs

    def cache_bytes(self, num_blocks: int) -> int:
        """Bytes of the model's cache of so many blocks, and of the draft model's."""
        drafting = 0 if self._runner.drafting is None else self._runner.drafting.method.bytes_per_block
        own = cache_bytes(self._config, self._layout().tensor_specs, self._dtype, self._groups)
        return own(num_blocks) + num_blocks * drafting

    def num_blocks(self, profile_run: Callable[[], None], recorded_bytes: Callable[[], int], mapped_bytes: int) -> int:
        """Blocks that fit into `kv_cache_memory_bytes`, or into the memory that a profiling run leaves.

        Args:
            profile_run: the largest step.
            recorded_bytes: called afterwards: memory that recordings take in addition.
            mapped_bytes: weights that are mapped from a file; the system still counts the memory that each rank moves
                them to as available.

        Raises:
            ValueError: not even one block fits, or there is less memory than the setting says.
        """
        config = self._config.cache
        cpu_memory = CpuCacheMemory(self._config)
        (self._gpu_memory or cpu_memory).check_setting()
        if self._gpu_memory is not None:
            graph_bytes = GRAPH_MEMORY_BYTES if self._captures_graphs else 0
            memory = self._gpu_memory.measure(profile_run, graph_bytes)
        else:
            memory = cpu_memory.measure(profile_run, recorded_bytes, mapped_bytes)
        available_bytes = config.kv_cache_memory_bytes
        if available_bytes is None:
            available_bytes, on_cpu = memory.available_bytes - self._adapter_bytes, self._gpu_memory is None
            logger.info("activations at their peak: %.1f MiB", memory.activation_bytes / 2**20)
            if self._adapter_bytes:
                logger.info("LoRA adapters: %.1f MiB are set aside", self._adapter_bytes / 2**20)
            if available_bytes < self.cache_bytes(1):
                raise ValueError(
                    f"gpu_memory_utilization is {config.gpu_memory_utilization}: that is {memory.planned_bytes} bytes "
                    f"of {'the memory that is free now' if on_cpu else self._runner.device}, activations take "
                    f"{memory.activation_bytes}{self._adapters_take} and one KV block {self.cache_bytes(1)}"
                    f"{'' if on_cpu else ', beside the weights'}; raise it, or set kv_cache_memory_bytes"
                )
        num_blocks = num_blocks_for(
            available_bytes=available_bytes, cache_bytes=self.cache_bytes, block_size=config.block_size,
            max_model_len=self._max_model_len, max_num_seqs=self._config.scheduler.max_num_seqs,
            max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens, groups=self._groups,
        )  # fmt: skip
        num_states = self._groups.num_states(num_blocks, self._config.scheduler.max_num_seqs)
        logger.info(
            "KV cache: %d blocks of %d tokens%s, %.1f MiB", num_blocks, config.block_size,
            f" and {num_states} of states" if num_states else "", self.cache_bytes(num_blocks) / 2**20,
        )  # fmt: skip
        return num_blocks

    @property
    def _adapters_take(self) -> str:
        if not self._adapter_bytes:
            return ""
        return f", LoRA adapters {self._adapter_bytes} (lower max_lora_rank, max_loras or max_cpu_loras)"

    def initialize(self, num_blocks: int) -> None:
        """Allocate so many blocks, and capture CUDA graphs. On the CPU pages take memory only when first written."""
        # One more block, for graphs' rows of padding; no request ever gets it.
        self.allocate(num_blocks + self._captures_graphs)
        if self._captures_graphs:
            self._capture_graphs()

    def allocate(self, num_blocks: int) -> None:
        """Allocate keys, values and states for so many blocks, of the model and of the draft model; 0 frees them."""
        runner = self._runner
        if num_blocks:
            layout = self._layout()
            # With graphs, one more for rows of padding.
            num_states = self._groups.num_states(num_blocks, self._config.scheduler.max_num_seqs)
            num_states += self._captures_graphs
            tensors = new_caches(self._config, self._dtype, runner.device, layout.tensor_specs, num_blocks, num_states)
            runner.use_caches([tensors[i] for i in layout.tensor_ids], layout.group_ids)
        else:
            runner.use_caches([])
        if runner.drafting is not None:
            runner.drafting.initialize_cache(num_blocks)

    def _layout(self) -> CacheLayout:
        model = self._runner.model
        return CacheLayout.of(model.state_specs, model.layer_numbers, self._groups)

    def _capture_graphs(self) -> None:
        memory, runner, scheduler = self._gpu_memory, self._runner, self._config.scheduler
        model = runner.model.recordable
        assert model is not None
        graphs = DecodeGraphs(
            model, runner.kv_caches, runner.batch, runner.last_token_ids, self._max_model_len,
            (lambda: run_as_captured) if memory is None else partial(CudaCapture, runner.device),
            samples=runner.parallel.tensor_parallel_size == 1,
            group_ids=runner.group_ids,
        )  # fmt: skip
        sizes = capture_sizes(max(scheduler.max_num_seqs, min(scheduler.max_num_sampled_rows, MOST_DRAFTED_ROWS)))
        used_bytes = (lambda: 0) if memory is None else lambda: -memory.free_bytes()
        graphs.capture(sizes, used_bytes, GRAPH_MEMORY_BYTES)
        runner.use_caches(runner.kv_caches, runner.group_ids, graphs)
