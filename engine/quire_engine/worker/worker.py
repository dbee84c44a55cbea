"""Worker: answers the calls to one rank, and executes its steps."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from quire_kernels.cpu import status as kernel_status
from quire_kernels.cpu import uses_triton
from quire_kernels.kv_cache import is_tiled, scale_bytes

from quire_engine.adapters.adaptable import adaptable_modules
from quire_engine.adapters.store import AdapterStore
from quire_engine.config import EngineCoreConfig
from quire_engine.config.speculative_config import WITHOUT_CACHE
from quire_engine.device.transfer import CPU
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE, AttentionSpec, KVCacheGroups, RecurrentSpec
from quire_engine.messages import (
    ConnectKV,
    CountStateParts,
    DescribeKV,
    DetermineNumBlocks,
    InitializeCache,
    LoadWeights,
    ModelRunnerOutput,
    MoveExperts,
    PlaceExperts,
    SchedulerOutput,
    Sleep,
    UsesGpu,
    UseWeights,
    WakeUp,
    WorkerCall,
)
from quire_engine.models import ServedCheckpoint
from quire_engine.models.base import CausalLM
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.step_context import KVCaches
from quire_engine.system.memory import available_memory_bytes, release_code_pages, return_freed_memory
from quire_engine.tasks.pooler import Pooler
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.cache_allocator import CacheAllocator, new_caches
from quire_engine.worker.cache_memory import GpuCacheMemory, check_tables
from quire_engine.worker.drafting.drafting import Drafting
from quire_engine.worker.experts import ExpertCounters, ExpertMoves
from quire_engine.worker.fault_injection import FaultInjection
from quire_engine.worker.model_loader import ModelLoader
from quire_engine.worker.model_runner import ModelRunner
from quire_engine.worker.offload import HostWeights, weight_storages
from quire_engine.worker.profiler import Profiler
from quire_engine.worker.rank_board import RankBoard
from quire_engine.worker.submitted_step import SubmittedStep
from quire_engine.worker.threads import configure_threads

if TYPE_CHECKING:
    from quire_engine.kv_connector.connector_worker import ConnectorWorker

logger = logging.getLogger(__name__)


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
        board: RankBoard | None = None,
    ) -> None:
        parallel = replace(
            parallel,
            enable_expert_parallel=config.parallel.enable_expert_parallel,
            num_redundant_experts=config.parallel.num_redundant_experts,
            expert_replica=config.parallel.data_parallel_rank if config.parallel.is_lockstep else 0,
            num_expert_replicas=config.parallel.data_parallel_size if config.parallel.is_lockstep else 1,
        )
        is_hybrid = not config.cache.disable_hybrid_kv_cache_manager
        groups = checkpoint.kv_cache_groups(max_model_len, config.cache.block_size, is_hybrid)
        _check(config, checkpoint, max_model_len, device, groups)
        self.config = config
        self.parallel = parallel
        self.device = device
        self._board = board
        self._loader = ModelLoader(config, checkpoint, max_model_len, parallel, device)
        torch.manual_seed(config.model.seed)
        self._num_blocks = 0
        self._expert_counters: ExpertCounters | None = None
        self._connector: ConnectorWorker | None = None
        self._expert_moves: ExpertMoves | None = None
        """None for a model that transformers' code computes, and while the weights are discarded."""
        self._discarded_bytes: int | None = None
        """The size of the weights while they are discarded."""
        self._host_weights: HostWeights | None = None
        """The weights of a GPU while it sleeps with level 1."""
        self._next: _Weights | None = None
        """Between `load_weights` and `use_weights`."""
        self._adapters: AdapterStore | None = None
        """None unless requests may have LoRA adapters."""
        if config.lora.enable_lora:
            assert board is not None
            assert board.adapters is not None
            assert isinstance(checkpoint, CheckpointConfig)
            modules = adaptable_modules(checkpoint, config)
            self._adapters = AdapterStore(config.lora, modules, board.adapters, parallel)
        self._fault_injection = FaultInjection.from_environment(parallel.rank)
        self._gpu_memory: GpuCacheMemory | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._gpu_memory = GpuCacheMemory(config, device)
        model = self._loader.load()
        self._prepare(model)
        block_size, cache_dtype = config.cache.block_size, self._loader.cache_dtype
        kinds = [spec for spec in model.state_specs if isinstance(spec, AttentionSpec)]
        (keys, *_) = (kinds or [AttentionSpec(1, 1, 1)])[0].tensors
        shape = keys.block_shape(block_size, scale_size=scale_bytes(cache_dtype))
        cache = torch.empty((0, *shape), dtype=cache_dtype, device=device)
        logger.info(
            "%s: %.1f M parameters, %s, on %s, %s",
            config.model.model, model.num_parameters() / 1e6, config.model.quantization or self._loader.dtype_name,
            device,
            self._prepare_cpu(model, cache, checkpoint.can_generate) if device.type == "cpu"
            else torch.cuda.get_device_name(device),
        )  # fmt: skip
        batch = InputBatch(
            config.scheduler.max_num_seqs, max_model_len, block_size, checkpoint.vocab_size, groups.num_groups,
            model.row_columns, groups.has_states,
        )  # fmt: skip
        runs_ahead, compiles = config.async_scheduling(uses_gpu=device.type == "cuda"), uses_triton(cache)
        # Between stages the host transfers the hidden states, which a graph cannot contain.
        is_stage = parallel.pipeline_parallel_size > 1
        captures_graphs = (
            compiles and checkpoint.can_generate and model.recordable is not None
            and not config.model.enforce_eager and not is_stage
        )  # fmt: skip
        self._new_caches = partial(new_caches, config, cache_dtype, device)
        drafting = self._loader.load_drafting(model, batch, self._new_caches, self._target_caches, self.clock)
        pooler = self._loader.load_pooler()
        self.runner = ModelRunner(model, batch, parallel, device, runs_ahead, drafting, pooler)
        self._caches = CacheAllocator(
            config, self.runner, groups, cache_dtype, max_model_len, self._gpu_memory, captures_graphs,
            0 if self._adapters is None else self._adapters.planned_bytes,
        )  # fmt: skip
        self._profiler = Profiler(config, self.runner, self._caches, max_model_len, compiles, runs_ahead)

    def _prepare_cpu(self, model: CausalLM, cache: torch.Tensor, can_generate: bool) -> str:
        """Set the number of threads; returns a description for the log."""
        parallel = self.config.parallel
        torch_computes = model.recordable is None or not is_tiled(cache)
        num_threads = configure_threads(
            model.num_parameters(), parallel.num_all_ranks, torch_computes, parallel.num_local_replicas, can_generate
        )
        if kernel_status().instruction_set is None:
            logger.warning("models are computed in plain torch, which is slow: %s", kernel_status().reason)
        return f"threads: {num_threads}, kernels: {kernel_status().instruction_set or 'plain torch'}"

    def determine_num_blocks(self) -> int:
        """`CacheAllocator.num_blocks`, measured by a profiling run."""
        cache = self._loader.weight_cache
        mapped_bytes = 0 if cache is None else cache.mapped_bytes
        return self._caches.num_blocks(self._profiler.run, lambda: self._profiler.recorded_bytes, mapped_bytes)

    def initialize_cache(self, num_blocks: int) -> int:
        """Allocate the cache, and capture CUDA graphs. On the CPU pages take memory only when first written. Returns
        the bytes of the machine's memory that it takes once all pages are written; 0 on a GPU."""
        self._num_blocks = num_blocks
        self._caches.initialize(num_blocks)
        if self._expert_counters is not None:
            self._expert_counters.reset()  # until now, no request was computed
        if self._gpu_memory is None:
            release_code_pages()
        model = self.runner.model
        if self._loader.weight_cache is not None and isinstance(model, torch.nn.Module):
            self._loader.weight_cache.start_background(model)
        return self._caches.cache_bytes(num_blocks) if self._gpu_memory is None else 0

    @property
    def clock(self) -> Callable[[], float]:
        """`Executor.clock`. With several ranks, all wait for the slowest, whose thread is another; and steps that are
        slowed down for a test sleep."""
        computes_all = self.device.type == "cpu" and self.parallel.world_size == 1 and self._fault_injection is None
        return time.thread_time if computes_all else time.perf_counter

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, and wait for it."""
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> SubmittedStep:
        """Begin one step; on a GPU this returns while the GPU still computes."""
        if scheduler_output.adapter_orders is not None:
            assert self._adapters is not None
            self._adapters.begin_step(scheduler_output.adapter_orders)
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
        """Free the KV cache's memory; on a GPU move the weights to host memory, and with level 2 discard them. Weights
        that are discarded already stay so."""
        self._free_caches()
        if self._discarded_bytes is None:
            if level == 2:
                self._discarded_bytes = sum(one.nbytes() for one in weight_storages(self.runner.model))
                self._host_weights = self._expert_moves = self.runner.drafting = None
                del self.runner.model
                if self._adapters is not None:
                    self._adapters.detach()
            elif self._gpu_memory is not None and self._host_weights is None:
                self._host_weights = HostWeights(self.runner.model)
        self._return_memory()

    def wake_up(self) -> None:
        """Have the weights where they were, and allocate an empty KV cache of the same size.

        Raises:
            ValueError: there is no memory for the weights. Call `sleep` again then, as after any other error.
        """
        if self._host_weights is not None:
            self._host_weights.restore()
            self._host_weights = None
        if self._discarded_bytes is not None:
            if self._gpu_memory is None and self._discarded_bytes > (free := available_memory_bytes()):
                raise ValueError(
                    f"the weights take {self._discarded_bytes >> 20} MiB, and {free >> 20} MiB of memory are free; end "
                    "what else uses it, and wake it up again"
                )
            self._take(self._load_weights(self._loader))
            self._discarded_bytes = None
        self.initialize_cache(self._num_blocks)

    def load_weights(self, folder: str) -> None:
        """Load the weights of another folder, in the place of the KV cache's memory. `use_weights` has to follow, also
        after an error.

        Raises:
            CheckpointError: they are not of the same shapes, or damaged.
        """
        self._free_caches()
        self._return_memory()
        self._next = self._load_weights(self._loader.of(folder))

    def use_weights(self, is_accepted: bool) -> None:
        """Compute with the weights of `load_weights` from now on, or drop them; with an empty KV cache.

        Raises:
            ValueError: none were loaded.
        """
        following, self._next = self._next, None
        if is_accepted:
            if following is None:
                raise ValueError("no weights were loaded")
            self._take(following)
        del following
        self._return_memory()
        self.initialize_cache(self._num_blocks)

    def _target_caches(self) -> tuple[KVCaches, Sequence[int]]:
        return self.runner.kv_caches, self.runner.group_ids

    def _load_weights(self, loader: ModelLoader) -> "_Weights":
        model = loader.load()
        drafting = loader.load_drafting(model, self.runner.batch, self._new_caches, self._target_caches, self.clock)
        return _Weights(loader, model, drafting, loader.load_pooler())

    def _take(self, weights: "_Weights") -> None:
        self._loader, self.runner.model, self.runner.drafting, self.runner.pooler = weights
        self._prepare(weights.model)

    def _free_caches(self) -> None:
        self._caches.allocate(0)
        if self._adapters is not None:
            self._adapters.drop_all()

    def _return_memory(self) -> None:
        return_freed_memory()
        if self._gpu_memory is not None:
            torch.cuda.empty_cache()

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
            case CountStateParts():
                from quire_engine.kv_connector.connector_worker import num_state_parts

                return num_state_parts(self.runner.kv_caches, self.runner.model.state_specs, self.runner.group_ids)
            case ConnectKV(namespace=namespace, num_state_parts=num_parts):
                return self._connect_kv(namespace, num_parts)
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
            case LoadWeights(folder=folder):
                self.load_weights(folder)
                return 0
            case UseWeights(is_accepted=is_accepted):
                self.use_weights(is_accepted)
                return 0

    def _describe_kv(self) -> int:
        from quire_engine.kv_connector.namespace import number_of

        # How large the ring of a block of states is depends on the drafts.
        has_states = any(isinstance(spec, RecurrentSpec) for spec in self.runner.model.state_specs)
        words: list[object] = [self.config.scheduler.max_draft_tokens] if has_states else []
        if self.device.type == "cuda":
            return number_of([torch.cuda.get_device_name(self.device), self.config.model.enforce_eager, *words])
        kernels = kernel_status()
        return number_of([kernels.instruction_set, kernels.interprets_triton, torch.get_num_threads(), *words])

    def _connect_kv(self, namespace: bytes, num_state_parts: int) -> int:
        from quire_engine.kv_connector.connector_worker import ConnectorWorker
        from quire_engine.kv_connector.tiered_store import TieredStore

        transfer, rank = self.config.cache.kv_transfer_config, self.parallel.rank
        board = None if self._board is None else self._board.transfers
        assert transfer is not None
        assert board is not None
        store = TieredStore.open(transfer, self.config.cache.kv_memory, namespace, rank, board)
        staging_bytes = transfer.kv_connector_extra_config.staging_bytes
        runner = self.runner
        if self._connector is not None:  # other weights have another namespace
            self._connector.close()
        self._connector = ConnectorWorker(
            partial(getattr, runner, "kv_caches"), runner.model.state_specs, runner.group_ids, store, board, rank,
            staging_bytes, num_state_parts,
        )  # fmt: skip
        return self._connector.block_bytes

    def close(self) -> None:
        """End all that runs beside the steps, and drop captured graphs: NCCL would wait for ever to leave a group that
        they refer to. No step follows."""
        if self._connector is not None:
            self._connector.close()
        if self._adapters is not None:
            self._adapters.close()
        self.runner.use_caches([])

    def _prepare(self, model: CausalLM) -> None:
        if isinstance(model, Decoder):
            tokens = None if self._board is None else self._board.expert_tokens
            # All ranks of a stage route the same tokens in the same way: one of them counts.
            if tokens is not None and self.parallel.tensor_rank == 0:
                self._expert_counters = ExpertCounters(tokens, model, self.device)
            self._expert_moves = ExpertMoves(model)
        if self._adapters is not None:
            self._adapters.attach(model, self.device)


class _Weights(NamedTuple):
    """What is loaded from a checkpoint."""

    loader: ModelLoader
    model: CausalLM
    drafting: Drafting | None
    pooler: Pooler


def _check(
    config: EngineCoreConfig,
    checkpoint: ServedCheckpoint,
    max_model_len: int,
    device: torch.device,
    groups: KVCacheGroups,
) -> None:
    if config.parallel.is_lockstep and device.type != "cpu":
        raise ValueError(
            f"enable_expert_parallel is True with data_parallel_size={config.parallel.data_parallel_size} on "
            f"{device}; replicas share experts on the CPU alone: set device to 'cpu', or divide the experts among "
            "the tensor_parallel_size ranks of one replica"
        )
    if config.cache.kv_cache_dtype == "int8" and (device.type != "cpu" or kernel_status().interprets_triton):
        raise ValueError(f"kv_cache_dtype is 'int8', which has no kernel for {device}; set it to 'fp8' or 'auto'")
    check_tables(config.scheduler.max_num_seqs, max_model_len, checkpoint.head_size)
    drafts = config.scheduler.draft_checkpoint
    if drafts is not None and drafts[0] not in WITHOUT_CACHE and groups.windows[0] not in (None, STATE):
        raise ValueError(
            f"speculative_config: method {drafts[0]!r} needs a KV cache that keeps all tokens, and all of this model's "
            "layers have a sliding window and free those behind it; set disable_hybrid_kv_cache_manager to true, or "
            "draft with 'ngram', 'suffix', 'medusa' or 'gemma4_assistant'"
        )
