"""Worker: loads the model, sizes and owns the KV cache, executes steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from quire_kernels import cpu
from quire_kernels.cpu import status as kernel_status
from quire_kernels.dispatch import uses_triton
from quire_kernels.kv_cache import is_tiled, new_kv_cache

from quire_engine.config import EngineCoreConfig
from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.errors import EngineError
from quire_engine.kv_cache import KVCacheGroups
from quire_engine.kv_connector.board import TransferBoard
from quire_engine.messages import (
    CachedRequestData,
    ConnectKV,
    DescribeKV,
    DetermineNumBlocks,
    InitializeCache,
    ModelRunnerOutput,
    MoveExperts,
    NewRequestData,
    PlaceExperts,
    SchedulerOutput,
    Sleep,
    UseCores,
    UsesGpu,
    WakeUp,
    WorkerCall,
)
from quire_engine.models.base import AttentionSpec, CausalLM, KVCaches
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.draft_checkpoint import draft_target
from quire_engine.models.loader import load_model
from quire_engine.models.mapped import mapped_zeros
from quire_engine.models.served import ServedCheckpoint
from quire_engine.models.transformers_checkpoint import TransformersCheckpoint
from quire_engine.sampling_params import SamplingParams
from quire_engine.system.memory import return_freed_memory
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.cache_layout import CacheLayout
from quire_engine.worker.cache_memory import CpuCacheMemory, GpuCacheMemory, check_tables
from quire_engine.worker.cache_sizing import block_bytes, num_blocks_for
from quire_engine.worker.drafting.drafting import Drafting
from quire_engine.worker.drafting.make import make_draft_method
from quire_engine.worker.expert_load import ExpertCounters, ExpertLoad
from quire_engine.worker.expert_moves import ExpertMoves
from quire_engine.worker.fault_injection import FaultInjection
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions
from quire_engine.worker.forward.decode_graphs import DecodeGraphs
from quire_engine.worker.forward.graph_capture import CudaCapture, capture_sizes, run_as_captured
from quire_engine.worker.model_runner import ModelRunner
from quire_engine.worker.submitted_step import SubmittedStep
from quire_engine.worker.threads import configure_threads, threads_to_catch_up

__all__ = ["Worker"]

if TYPE_CHECKING:
    from quire_engine.kv_connector.connector_worker import ConnectorWorker

logger = logging.getLogger(__name__)

MOST_DRAFTED_ROWS = 256
"""Rows of the largest step with drafts that is captured, if `max_num_seqs` is not above that: in larger ones the
kernels take so long that launching them one by one hardly matters."""
SUFFIX_TOKENS = 64
"""Tokens of a suffix after a cached prefix: about the most for which attention keeps partial results in memory."""
QUANTIZED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the setting `quantization`."""


class Worker:
    """One rank. Call `initialize_cache` first, then `execute_model` any number of times.

    With several ranks make each call on all of them, with the same arguments and in the same order: ranks wait for each
    other inside the calls.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        checkpoint: ServedCheckpoint,
        max_model_len: int,
        parallel: ParallelState = ParallelState(),
        device: torch.device = CPU,
        expert_load: ExpertLoad | None = None,
        transfer_board: TransferBoard | None = None,
    ) -> None:
        parallel = replace(
            parallel,
            enable_expert_parallel=config.parallel.enable_expert_parallel,
            num_redundant_experts=config.parallel.num_redundant_experts,
            expert_replica=config.parallel.data_parallel_rank if config.parallel.is_lockstep else 0,
            num_expert_replicas=config.parallel.data_parallel_size if config.parallel.is_lockstep else 1,
        )
        if config.parallel.is_lockstep and device.type != "cpu":
            raise ValueError(
                f"enable_expert_parallel is True with data_parallel_size={config.parallel.data_parallel_size} on "
                f"{device}; replicas share experts on the CPU alone: set device to 'cpu', or divide the experts among "
                "the tensor_parallel_size ranks of one replica"
            )
        checkpoint.check_parallel(
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel
        )
        if config.scheduler.draft_checkpoint is not None:
            draft_target(checkpoint, config.scheduler.draft_checkpoint[0])
        check_tables(config.scheduler.max_num_seqs, max_model_len, checkpoint.head_size)
        self.config = config
        self.parallel = parallel
        self.device = device
        self.checkpoint = checkpoint
        self.max_model_len = max_model_len
        name = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
        self.dtype: torch.dtype = getattr(torch, name)
        self.cache_dtype = torch.float8_e4m3fn if config.cache.kv_cache_dtype == "fp8" else self.dtype
        torch.manual_seed(config.model.seed)
        self._num_blocks = 0
        self._expert_load = expert_load
        self._expert_counters: ExpertCounters | None = None
        self._transfer_board = transfer_board
        self._connector: ConnectorWorker | None = None
        self._expert_moves: ExpertMoves | None = None
        """None of a model that transformers' code computes, and while the weights are discarded."""
        self._weights_discarded = False
        self._own_threads: int | None = None
        """How many threads compute with this rank's share of the cores; None where that must not change."""
        self._num_parameters = 0
        self._fault_injection = FaultInjection.from_environment(parallel.rank)
        self._gpu_memory: GpuCacheMemory | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._gpu_memory = GpuCacheMemory(config, device)
        model = self._load_model()
        parameters = model.num_parameters()
        spec = model.attention_specs[0]
        shape = (0, spec.num_kv_heads, config.cache.block_size, spec.head_size)
        cache = torch.empty(shape, dtype=self.cache_dtype, device=device)
        # Between stages the host transfers the hidden states, which a graph cannot contain.
        is_stage = parallel.pipeline_parallel_size > 1
        self._uses_triton = uses_triton(cache)
        is_captured = model.recordable is not None and not config.model.enforce_eager and not is_stage
        self._captures_graphs = self._uses_triton and is_captured
        logger.info(
            "%s: %.1f M parameters, %s, on %s, %s",
            config.model.model, parameters / 1e6, config.model.quantization or name, device,
            self._prepare_cpu(model, cache) if device.type == "cpu" else torch.cuda.get_device_name(device),
        )  # fmt: skip
        is_hybrid = not config.cache.disable_hybrid_kv_cache_manager
        self._groups = KVCacheGroups.of(checkpoint.windows, max_model_len, is_hybrid)
        self._check_drafter()
        batch = InputBatch(
            config.scheduler.max_num_seqs, max_model_len, config.cache.block_size, checkpoint.vocab_size,
            self._groups.num_groups,
        )  # fmt: skip
        self._runs_ahead = config.async_scheduling(uses_gpu=device.type == "cuda")
        self.runner = ModelRunner(model, batch, config.cache.block_size, parallel, device, self._runs_ahead)
        self._load_drafter()

    def _check_drafter(self) -> None:
        """Refuse models that draft if blocks are freed behind a window: they keep their own keys and values in them.

        Raises:
            ValueError: that is so.
        """
        drafts = self.config.scheduler.draft_checkpoint
        if drafts is not None and drafts[0] != "medusa" and not self._groups.keep_everything:
            raise ValueError(
                f"speculative_config: method {drafts[0]!r} needs a KV cache that keeps all tokens, and this model's "
                "layers with a sliding window free those behind it; set disable_hybrid_kv_cache_manager to true, or "
                "draft with 'ngram', 'suffix' or 'medusa'"
            )

    def _load_drafter(self) -> None:
        """Load the model that drafts, if there is one, on the rank that samples."""
        if self.config.scheduler.draft_checkpoint is None or not self.parallel.is_output_rank:
            return
        runner, model = self.runner, self.runner.model
        assert isinstance(model, Decoder)
        checkpoint = draft_target(self.checkpoint, self.config.scheduler.draft_checkpoint[0])
        method = make_draft_method(
            self.config, model, checkpoint, self._quantized_dtype, self.cache_dtype, runner.batch,
            self.max_model_len, self.device, self._allocate_caches,
        )  # fmt: skip
        logger.info("drafts: %s, %d bytes per KV block", self.config.scheduler.draft_checkpoint, method.bytes_per_block)
        spec = self.config.scheduler.speculative_config
        by_chance = spec is not None and spec.acceptance == "rejection"
        runner.drafting = Drafting(method, runner.batch, runner.lock, self.device, by_chance, self.clock)

    def _prepare_cpu(self, model: CausalLM, cache: torch.Tensor) -> str:
        """Set the number of threads; returns a description for the log."""
        parallel = self.config.parallel
        torch_computes = model.recordable is None or not is_tiled(cache)
        num_threads = configure_threads(
            model.num_parameters(), parallel.num_all_ranks, torch_computes, parallel.num_local_replicas
        )
        if kernel_status().instruction_set is not None and not torch_computes:  # torch's results depend on it
            self._own_threads, self._num_parameters = num_threads, model.num_parameters()
        if kernel_status().instruction_set is None:
            logger.warning("models are computed in plain torch, which is slow: %s", kernel_status().reason)
        return f"threads: {num_threads}, kernels: {kernel_status().instruction_set or 'plain torch'}"

    def determine_num_blocks(self) -> int:
        """Blocks that fit into `kv_cache_memory_bytes`, or into the memory that a profiling run leaves.

        Raises:
            ValueError: not even one block fits, or there is less memory than the setting says.
        """
        bytes_per_block = self._bytes_per_block()
        cpu_memory = CpuCacheMemory(self.config)
        (self._gpu_memory or cpu_memory).check_setting()
        if self._gpu_memory is not None:
            graph_bytes = self.config.cache.cuda_graph_memory_bytes if self._captures_graphs else 0
            memory = self._gpu_memory.measure(self._profile_run, graph_bytes)
        else:
            memory = cpu_memory.measure(self._profile_run, lambda: self._recorded_bytes)
        available_bytes = self.config.cache.kv_cache_memory_bytes
        if available_bytes is None:
            available_bytes, on_cpu = memory.available_bytes, self._gpu_memory is None
            if available_bytes < bytes_per_block:
                raise ValueError(
                    f"gpu_memory_utilization is {self.config.cache.gpu_memory_utilization}: that is "
                    f"{memory.planned_bytes} bytes of {'the memory that is free now' if on_cpu else self.device}, "
                    f"activations take {memory.activation_bytes} and one KV block {bytes_per_block}"
                    f"{'' if on_cpu else ', beside the weights'}; raise it, or set kv_cache_memory_bytes"
                )
        num_blocks = num_blocks_for(
            available_bytes=available_bytes,
            bytes_per_block=bytes_per_block,
            block_size=self.config.cache.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            groups=self._groups,
        )
        logger.info(
            "KV cache: %d blocks of %d tokens, %.1f MiB; activations at their peak: %.1f MiB",
            num_blocks, self.config.cache.block_size, num_blocks * bytes_per_block / 2**20,
            memory.activation_bytes / 2**20,
        )  # fmt: skip
        return num_blocks

    def _bytes_per_block(self) -> int:
        """Of the model's cache, and of that of what drafts."""
        specs = self._layout().tensor_specs
        drafting = 0 if self.runner.drafting is None else self.runner.drafting.method.bytes_per_block
        return block_bytes(specs, self.config.cache.block_size, self.cache_dtype.itemsize) + drafting

    def initialize_cache(self, num_blocks: int) -> int:
        """Allocate the cache, and capture CUDA graphs. On the CPU pages take memory only when first written.

        Returns:
            The bytes of the machine's memory that it takes once all pages are written; 0 on a GPU.
        """
        self._num_blocks = num_blocks
        # One more block, for graphs' rows of padding; no request ever gets it.
        self._allocate(num_blocks + self._captures_graphs)
        if self._captures_graphs:
            self._capture_graphs()
        if self._expert_counters is not None:
            self._expert_counters.reset()  # until now, no request was computed
        return num_blocks * self._bytes_per_block() if self._gpu_memory is None else 0

    def _allocate(self, num_blocks: int) -> None:
        """Allocate keys and values for so many blocks, of the model and of what drafts; 0 frees them."""
        kv_caches: KVCaches = []
        if num_blocks:
            layout = self._layout()
            self.runner.group_ids = layout.group_ids
            tensors = self._allocate_caches(layout.tensor_specs, num_blocks)
            kv_caches = [tensors[i] for i in layout.tensor_ids]
        self.runner.kv_caches = kv_caches
        if self.runner.drafting is not None:
            self.runner.drafting.initialize_cache(num_blocks)

    def _capture_graphs(self) -> None:
        memory, runner = self._gpu_memory, self.runner
        model = runner.model.recordable
        assert model is not None
        graphs = DecodeGraphs(
            model, runner.kv_caches, runner.batch, runner.last_token_ids, self.max_model_len,
            (lambda: run_as_captured) if memory is None else partial(CudaCapture, self.device),
            samples=self.parallel.tensor_parallel_size == 1,
            group_ids=runner.group_ids,
        )  # fmt: skip
        scheduler = self.config.scheduler
        sizes = capture_sizes(max(scheduler.max_num_seqs, min(scheduler.max_num_sampled_rows, MOST_DRAFTED_ROWS)))
        used_bytes = (lambda: 0) if memory is None else lambda: -memory.free_bytes()
        graphs.capture(sizes, used_bytes, self.config.cache.cuda_graph_memory_bytes)
        runner.graphs = graphs

    @property
    def clock(self) -> Callable[[], float]:
        """See `Executor.clock`. Of several ranks, others wait for the slowest, whose thread is not theirs; and steps
        that are slowed down for a test sleep."""
        computes_all = self.device.type == "cpu" and self.parallel.world_size == 1 and self._fault_injection is None
        return time.thread_time if computes_all else time.perf_counter

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, and wait for it."""
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> SubmittedStep:
        """Begin one step; on a GPU this returns while the GPU still computes."""
        if scheduler_output.kv_connector_metadata is not None:
            assert self._connector is not None
            self._connector.begin_step(scheduler_output.kv_connector_metadata)
        step = self._submit(scheduler_output)
        if self._expert_counters is not None:
            self._expert_counters.publish()
        if self._fault_injection is not None:
            step.on_result = partial(self._fault_injection.strike, batch=self.runner.batch)
        return step

    def _submit(self, scheduler_output: SchedulerOutput) -> SubmittedStep:
        if scheduler_output.generation is None:
            return self.runner.submit(scheduler_output)
        group, model = self.parallel.expert_group, self.runner.model
        assert group is not None
        assert isinstance(model, Decoder)
        with group.step(scheduler_output.generation):
            step = self.runner.submit(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                with torch.inference_mode():
                    model.serve_experts()
        return step

    def sleep(self, level: int) -> None:
        """Free the KV cache's memory, and with level 2 the weights' as well."""
        self._allocate(0)
        if level == 2:
            del self.runner.model
            self._expert_moves = None
            self.runner.drafting = None
            self._weights_discarded = True
        return_freed_memory()
        if self._gpu_memory is not None:
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Load the weights again if they are gone, and allocate an empty KV cache of the same size."""
        if self._weights_discarded:
            self.runner.model = self._load_model()
            self._load_drafter()
            self._weights_discarded = False
        self.initialize_cache(self._num_blocks)

    def use_cores(self, num_engines: int) -> int:
        """Compute as if the cores of this host were for so many engines; 0: as at the start.

        Returns:
            How many threads do that; 0 where their number does not change.
        """
        if self._own_threads is None:
            return 0
        num_threads = self._own_threads
        if num_engines:
            num_ranks = num_engines * self.config.parallel.world_size
            num_threads = threads_to_catch_up(num_threads, self._num_parameters, num_ranks)
        cpu.set_num_threads(num_threads)
        return num_threads

    def call(self, call: WorkerCall) -> int:
        """Make one of the calls above between two steps; returns a number, 0 if there is none to return."""
        match call:
            case DetermineNumBlocks():
                return self.determine_num_blocks()
            case MoveExperts(moves=moves):
                assert self._expert_moves is not None
                self._expert_moves.fetch(moves)
                return 0
            case PlaceExperts():
                assert self._expert_moves is not None
                self._expert_moves.place()
                return 0
            case DescribeKV():
                return self._describe_kv()
            case ConnectKV(namespace=namespace):
                return self._connect_kv(namespace)
            case UsesGpu():
                return int(self.device.type == "cuda")
            case InitializeCache(num_blocks=num_blocks):
                return self.initialize_cache(num_blocks)
            case Sleep(level=level):
                self.sleep(level)
                return 0
            case WakeUp():
                self.wake_up()
                return 0
            case UseCores(num_engines=num_engines):
                return self.use_cores(num_engines)

    def _describe_kv(self) -> int:
        """See `DescribeKV`."""
        from quire_engine.kv_connector.namespace import number_of

        if self.device.type == "cuda":
            return number_of([torch.cuda.get_device_name(self.device), self.config.model.enforce_eager])
        kernels = kernel_status()
        return number_of([kernels.instruction_set, kernels.interprets_triton, torch.get_num_threads()])

    def _connect_kv(self, namespace: bytes) -> int:
        """See `ConnectKV`."""
        from quire_engine.kv_connector.block_store import BlockStore, open_store
        from quire_engine.kv_connector.connector_worker import ConnectorWorker

        transfer, board, rank = self.config.cache.kv_transfer_config, self._transfer_board, self.parallel.rank
        assert transfer is not None
        assert board is not None
        store: BlockStore
        stores = [open_store(tier, self.config.cache.kv_memory, namespace, rank) for tier in transfer.tiers]
        if len(stores) == 1:
            store = stores[0]
        else:
            from quire_engine.kv_connector.tiered_store import TieredStore

            store = TieredStore(stores, partial(board.count_tier, rank), transfer.saves)
        staging_bytes = transfer.kv_connector_extra_config.staging_bytes
        self._connector = ConnectorWorker(partial(getattr, self.runner, "kv_caches"), store, board, rank, staging_bytes)
        return self._connector.block_bytes

    def close(self) -> None:
        """End what runs beside the steps. None follows."""
        if self._connector is not None:
            self._connector.close()

    @property
    def _quantized_dtype(self) -> torch.dtype | None:
        """Of the matrices; None if they are not quantised."""
        quantization = self.config.model.quantization
        return None if quantization is None else QUANTIZED_DTYPES[quantization]

    def _load_model(self) -> CausalLM:
        folder = Path(self.config.model.model)
        if isinstance(self.checkpoint, TransformersCheckpoint):
            from quire_engine.models.transformers_model import load_transformers_model  # imports all of transformers

            if self.config.model.quantization is not None:
                raise ValueError(
                    f"quantization is {self.config.model.quantization!r}; it must be unset, as "
                    f"{self.checkpoint.architecture} runs with transformers' own code"
                )
            return load_transformers_model(
                folder, self.checkpoint, self.dtype, self.max_model_len, self.device, self.config.model.load_format
            )
        assert isinstance(self.checkpoint, CheckpointConfig)
        model = load_model(
            folder, self.checkpoint, self.dtype, self.max_model_len, self.parallel, self._quantized_dtype, self.device,
            self.config.model.load_format,
        )  # fmt: skip
        # All ranks of a stage route the same tokens in the same way: one of them counts.
        if self._expert_load is not None and self.parallel.tensor_rank == 0:
            self._expert_counters = ExpertCounters(self._expert_load, model, self.device)
        self._expert_moves = ExpertMoves(model)
        return model

    def _layout(self) -> CacheLayout:
        """Where the layers that the model has now keep their keys and values."""
        model = self.runner.model
        return CacheLayout.of(model.attention_specs, model.layer_numbers, self._groups)

    def _allocate_caches(self, specs: Sequence[AttentionSpec], num_blocks: int) -> KVCaches:
        """The caches of each of these; on the CPU in huge pages, as a step's reads are scattered."""

        def cache(spec: AttentionSpec) -> torch.Tensor:
            shape = (num_blocks, spec.num_kv_heads, self.config.cache.block_size, spec.head_size)
            if self.device.type == "cpu":
                return mapped_zeros(shape, self.cache_dtype, huge_pages=True)
            return new_kv_cache(*shape, self.cache_dtype, self.device)

        return [tuple(cache(spec) for _ in range(spec.num_caches)) for spec in specs]

    def _profile_run(self) -> None:
        """Run the largest possible step, on a cache of its own, to measure its memory and warm up every op.

        It runs one layer of each kind, which needs as much memory as all layers in a fraction of the time. Kernels in
        the Triton language are compiled when first used. For those, the requests also decode, and there is another step
        of one prompt: the prompts of many requests may be so short that they are computed like decodes.
        """
        scheduler, block_size = self.config.scheduler, self.config.cache.block_size
        num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        # The same on all ranks, of which one drafts: they compute the same steps.
        max_wanted = 0
        if scheduler.draft_checkpoint is not None:
            max_wanted = min(scheduler.max_draft_tokens, self.max_model_len - 2)
        # The last token that fits into the context is never computed.
        longest = max(self.max_model_len - 1 - max_wanted, 1)
        num_tokens = min(scheduler.max_num_batched_tokens // num_seqs, longest)
        num_drafts = min(scheduler.max_num_sampled_rows // num_seqs, num_tokens) - 1
        num_wanted = max(min(max_wanted, self.max_model_len - num_tokens - 1), 0)
        blocks_each = -(-min(num_tokens + 1 + num_wanted, self.max_model_len) // block_size)
        many = [
            self._profile_request(num_tokens, range(i * blocks_each, (i + 1) * blocks_each), f"profile-{i}")
            for i in range(num_seqs)
        ]
        batches, model = [many], self.runner.model
        if self._uses_triton:
            num_tokens = min(num_seqs * num_tokens, longest)
            blocks = range(-(-min(num_tokens + 1, self.max_model_len) // block_size))
            batches.append([self._profile_request(num_tokens, blocks)])
        num_layers = len(model.attention_specs)
        with model.one_layer_of_each_kind():
            self._allocate(num_seqs * blocks_each)
            # For the longest sequences attention keeps partial results in memory; these short ones have none.
            parts = self._plan_longest(num_seqs) if self._uses_triton else None
            for requests in batches:
                self._profile_batch(requests, *((num_drafts, num_wanted) if requests is many else (0, 0)))
            del parts
        self._recorded_bytes = self.runner.recorded_bytes(num_layers)  # an upper bound if there are several kinds
        if self.runner.drafting is not None:
            self._recorded_bytes += self.runner.drafting.method.recorded_bytes
        self._allocate(0)

    def _plan_longest(self, num_seqs: int) -> object:
        """Plans of the longest possible sequences, which hold their memory: decodes, and a short suffix."""
        query_lens = torch.ones(num_seqs + 1, dtype=torch.int64)
        query_lens[-1] = min(SUFFIX_TOKENS, self.max_model_len)
        query_start_loc = torch.cat((query_lens.new_zeros(1), query_lens.cumsum(0)))
        seq_lens = torch.full_like(query_lens, self.max_model_len)
        table = torch.zeros(num_seqs + 1, 1, dtype=torch.int64)
        key_caches = key_caches_by_kind(self.runner.model.attention_specs, self.runner.kv_caches)
        return plan_attentions(key_caches, table, query_start_loc, seq_lens)

    def _profile_batch(self, requests: list[NewRequestData], num_drafts: int, num_wanted: int) -> None:
        """Compute the requests' prompts in one step, and if kernels are compiled, one more token in another.

        Args:
            requests: each with a prompt.
            num_drafts: how many of each prompt's last tokens are given as drafts, so that the step samples more rows.
            num_wanted: how many tokens are drafted after each of them, if a model drafts.
        """
        lengths = {request.request_id: request.num_prompt_tokens for request in requests}
        drafts = {}
        if num_drafts:
            drafts = {request_id: [0] * num_drafts for request_id in lengths}
            for request in requests:
                request.num_prompt_tokens -= num_drafts
                del request.token_ids[request.num_prompt_tokens :]
        wanted = dict.fromkeys(lengths, num_wanted) if num_wanted else {}
        output = self.execute_model(
            SchedulerOutput(lengths, new_requests=requests, draft_token_ids=drafts, num_drafts_wanted=wanted)
        )
        if wanted and self.runner.drafting is not None and not output.drafts:
            raise EngineError("no tokens could be drafted in the largest step; the log above says why")
        if self._uses_triton:
            # For ranks that do not sample; if they run ahead, they have the tokens of requests without drafts.
            token_ids = [] if self._runs_ahead and not drafts else [[0] for _ in requests]
            known = [request.num_prompt_tokens for request in requests]
            columns = CachedRequestData(list(lengths), [[] for _ in requests], known, token_ids)
            self.execute_model(SchedulerOutput(dict.fromkeys(lengths, 1), cached_requests=columns))
        for request_id in lengths:
            self.runner.batch.remove(request_id)

    def _profile_request(self, num_tokens: int, blocks: range, request_id: str = "profile") -> NewRequestData:
        """A prompt in these blocks. All groups of layers use the same, one after the other: what they compute does not
        matter."""
        return NewRequestData(
            request_id=request_id,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(temperature=1.0, top_p=0.9, seed=0),
            stop_token_ids=[],
            block_ids=[block for block in blocks for _ in range(self._groups.num_groups)],
            num_computed_tokens=0,
        )
