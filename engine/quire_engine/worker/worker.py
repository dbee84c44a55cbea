"""Worker: loads the model, sizes and owns the KV cache, executes steps."""

import logging
from pathlib import Path

import torch
from quire_kernels.cpu import status as kernel_status
from quire_kernels.kv_cache import is_tiled

from quire_engine.config import EngineConfig
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache.sizing import block_bytes, num_blocks_for
from quire_engine.memory import available_memory_bytes, peak_memory_growth, return_freed_memory, trim_heap
from quire_engine.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.loader import load_model
from quire_engine.models.mapped import mapped_zeros
from quire_engine.models.parallel import num_parameters, shard, stage_layers
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.fault_injection import FaultInjection
from quire_engine.worker.input_batch import InputBatch
from quire_engine.worker.model_runner import ModelRunner
from quire_engine.worker.threads import configure_threads

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.5
"""On the CPU the cache shares memory with everything else on the machine, so it never plans with more than this, for
all ranks together."""


class Worker:
    """One rank. Built, then `initialize_cache`, then any number of `execute_model`.

    With several ranks each call is made on all of them with the same arguments, in the same order: they wait for each
    other within.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: CheckpointConfig,
        max_model_len: int,
        parallel: ParallelState = ParallelState(),
    ) -> None:
        checkpoint.check_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.config = config
        self.parallel = parallel
        self.checkpoint = checkpoint
        self.max_model_len = max_model_len
        name = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
        self.dtype: torch.dtype = getattr(torch, name)
        torch.manual_seed(config.model.seed)
        self._num_blocks = 0
        self._recorded_bytes = 0
        self._weights_discarded = False
        self._fault_injection = FaultInjection.from_environment(parallel.rank)
        model = self._load_model()
        parameters = num_parameters(model)
        cache = torch.empty(0, self.num_kv_heads, config.cache.block_size, checkpoint.head_size, dtype=self.dtype)
        num_threads = configure_threads(parameters, config.parallel.world_size, torch_computes=not is_tiled(cache))
        logger.info(
            "%s: %.1f M parameters, %s, threads: %d, kernels: %s",
            config.model.model, parameters / 1e6, config.model.quantization or name, num_threads,
            kernel_status().instruction_set or "plain torch",
        )  # fmt: skip
        if kernel_status().instruction_set is None:
            logger.warning("models are computed in plain torch, which is slow: %s", kernel_status().reason)
        batch = InputBatch(config.scheduler.max_num_seqs, max_model_len, config.cache.block_size, checkpoint.vocab_size)
        self.runner = ModelRunner(model, batch, config.cache.block_size, parallel)

    @property
    def num_layers(self) -> int:
        """Layers of this rank's stage."""
        return len(stage_layers(self.checkpoint.num_layers, self.parallel))

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank, in each layer."""
        heads = shard(self.checkpoint.num_kv_heads, self.parallel)
        return int(heads.stop - heads.start)

    def determine_num_blocks(self) -> int:
        """Blocks for `kv_cache_memory_bytes`, or for what a profiling run leaves of the memory.

        Raises:
            ValueError: not even one block fits.
        """
        bytes_per_block = block_bytes(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.checkpoint.head_size,
            block_size=self.config.cache.block_size,
            dtype_bytes=self.dtype.itemsize,
        )
        activation_bytes = peak_memory_growth(self._profile_run) + self._recorded_bytes
        trim_heap()  # of what the largest step took; the steps to come may be small
        available_bytes = self.config.cache.kv_cache_memory_bytes
        if available_bytes is None:
            share = CPU_MEMORY_SHARE * self.config.cache.gpu_memory_utilization / self.config.parallel.world_size
            planned_bytes = int(available_memory_bytes() * share)
            available_bytes = planned_bytes - activation_bytes
            if available_bytes < bytes_per_block:
                raise ValueError(
                    f"gpu_memory_utilization is {self.config.cache.gpu_memory_utilization}: that is {planned_bytes} "
                    f"bytes of the memory that is free now, activations take {activation_bytes} and one KV block "
                    f"{bytes_per_block}; raise it, or set kv_cache_memory_bytes"
                )
        num_blocks = num_blocks_for(
            available_bytes=available_bytes,
            bytes_per_block=bytes_per_block,
            block_size=self.config.cache.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
        )
        logger.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB; activations at their peak: %.1f MiB",
            num_blocks, self.config.cache.block_size, num_blocks * bytes_per_block / 2**20, activation_bytes / 2**20,
        )  # fmt: skip
        return num_blocks

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the cache tensors. The pages are zero, and become real memory only when first written."""
        self._num_blocks = num_blocks
        self.runner.kv_caches = self._allocate_caches(num_blocks, self.num_layers)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        output = self.runner.execute_model(scheduler_output)
        if self._fault_injection is not None:
            self._fault_injection.strike(output, self.runner.batch)
        return output

    def sleep(self, level: int) -> None:
        """Give the KV cache's memory back to the system, and with level 2 the weights' as well."""
        self.runner.kv_caches = []
        if level == 2:
            del self.runner.model
            self._weights_discarded = True
        return_freed_memory()

    def wake_up(self) -> None:
        """Load the weights again if they are gone, and allocate an empty KV cache of the same size."""
        if self._weights_discarded:
            self.runner.model = self._load_model()
            self._weights_discarded = False
        self.initialize_cache(self._num_blocks)

    def _load_model(self) -> LlamaForCausalLM:
        folder = Path(self.config.model.model)
        quantize = self.config.model.quantization == "int8"
        load_format = self.config.model.load_format
        return load_model(folder, self.checkpoint, self.dtype, self.max_model_len, self.parallel, quantize, load_format)

    def _allocate_caches(self, num_blocks: int, num_layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values, by layer; in huge pages, as a step reads all over them."""
        shape = (num_blocks, self.num_kv_heads, self.config.cache.block_size, self.checkpoint.head_size)
        return [
            (mapped_zeros(shape, self.dtype, huge_pages=True), mapped_zeros(shape, self.dtype, huge_pages=True))
            for _ in range(num_layers)
        ]

    def _profile_run(self) -> None:
        """The largest step there can be, on a cache of its own: shows its memory, and warms every op up.

        Through one layer, which shows as much as all of them, and takes a fraction of the time.
        """
        scheduler, block_size = self.config.scheduler, self.config.cache.block_size
        num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        num_tokens = min(scheduler.max_num_batched_tokens // num_seqs, self.max_model_len)
        blocks_each = -(-num_tokens // block_size)
        self.runner.kv_caches = self._allocate_caches(num_seqs * blocks_each, num_layers=1)
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        requests = [
            NewRequestData(
                request_id=f"profile-{i}",
                token_ids=[0] * num_tokens,
                num_prompt_tokens=num_tokens,
                sampling_params=params,
                stop_token_ids=[],
                block_ids=list(range(i * blocks_each, (i + 1) * blocks_each)),
                num_computed_tokens=0,
            )
            for i in range(num_seqs)
        ]
        with self.runner.model.first_layer_only():
            self.execute_model(
                SchedulerOutput({request.request_id: num_tokens for request in requests}, new_requests=requests)
            )
        self._recorded_bytes = self.num_layers * self.runner.recorded_bytes
        for request in requests:
            self.runner.batch.remove(request.request_id)
        self.runner.kv_caches = []
