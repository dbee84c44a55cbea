"""build_engine: makes the parts of an engine core from its settings and its model, and wires them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire_engine.config import EngineCoreConfig
from quire_engine.config.speculative_config import WITHOUT_CACHE
from quire_engine.core.engine_core import EngineCore
from quire_engine.core.experts import ExpertBalancer, ExpertLoadReport
from quire_engine.executor import Executor, make_executor
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.kv_cache import KVCacheManager
from quire_engine.lora import AdaptableModules
from quire_engine.messages import EngineCoreReady
from quire_engine.models import CheckpointConfig, ServedCheckpoint, read_checkpoint
from quire_engine.models.layers.expert_placement import check_redundancy
from quire_engine.scheduler.adapters import AdapterScheduler
from quire_engine.scheduler.drafter import Drafter
from quire_engine.scheduler.kv_connector import KVConnector
from quire_engine.scheduler.scheduler import FillBitmask, Scheduler
from quire_engine.spec_decode import make_proposer
from quire_engine.structured_output.compiler_messages import CompilerArguments
from quire_engine.structured_output.manager import StructuredOutputManager
from quire_engine.tasks.reading import read_pooling_info


def build_engine(
    config: EngineCoreConfig,
    num_blocks: int | None = None,
    structured_output: StructuredOutputManager | None = None,
    expert_group: LockstepHandle | None = None,
    on_begin: Callable[[int], None] = lambda message_number: None,
    on_failed_step: Callable[[], None] = lambda: None,
) -> EngineCore:
    """An engine core with its workers started and its model loaded.

    Args:
        config: its settings.
        num_blocks: size of the KV cache; unset: determined by the settings and the memory.
        structured_output: compiles the grammars of requests; unset: a new one, which starts when it is needed.
        expert_group: where its ranks meet those of the engines that it shares the experts with.
        on_begin, on_failed_step: as of `EngineCore`.

    Raises:
        EngineError: a worker could not start.
        ValueError: the settings do not suit the model or the machine.
    """
    checkpoint = read_checkpoint(Path(config.model.model), config.model.model_impl)
    max_model_len = config.model.max_model_len or checkpoint.max_position_embeddings
    check_settings(config, checkpoint, max_model_len)
    if not checkpoint.is_causal:
        config = with_whole_prompts(config, max_model_len)
    pooling = read_pooling_info(Path(config.model.model), checkpoint)
    executor = make_executor(config, checkpoint, max_model_len, expert_group)
    try:
        num_blocks = num_blocks or executor.determine_num_blocks()
        cpu_cache_bytes = executor.initialize_cache(num_blocks)
        structured_output = structured_output or StructuredOutputManager(
            CompilerArguments.for_model(config.model.tokenizer_path, checkpoint.vocab_size, checkpoint.eos_token_ids)
        )
        scheduler, kv_namespace, connect_again = _build_scheduler(
            config, checkpoint, max_model_len, num_blocks, executor, structured_output.grammar_bitmask, on_begin
        )
        ready = EngineCoreReady(
            vocab_size=checkpoint.vocab_size,
            hidden_size=checkpoint.hidden_size,
            num_deepstack_layers=checkpoint.num_deepstack_layers,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            eos_token_ids=[i for i in checkpoint.eos_token_ids if i < checkpoint.vocab_size],
            scheduling_policy=config.scheduler.scheduling_policy,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            worker_pids=executor.worker_pids,
            num_kv_cache_tokens=scheduler.kv_cache.groups.max_tokens(
                num_blocks, config.cache.block_size, config.scheduler.max_num_batched_tokens, max_model_len
            ),
            cpu_cache_bytes=0 if config.parallel.executor_backend == "ray" else cpu_cache_bytes,
            kv_namespace=kv_namespace,
            pooling=pooling,
            adaptable=_adaptable(config, checkpoint),
        )
        balancer, expert_load = _watch_experts(config, checkpoint, executor)
        structured_output.imports_are_done()
    except BaseException:
        executor.shutdown()
        raise
    return EngineCore(
        executor, scheduler, structured_output, ready, config.parallel.world_size, balancer, expert_load, on_begin,
        on_failed_step, connect_again,
    )  # fmt: skip


def _build_scheduler(
    config: EngineCoreConfig,
    checkpoint: ServedCheckpoint,
    max_model_len: int,
    num_blocks: int,
    executor: Executor,
    fill_bitmask: FillBitmask,
    on_begin: Callable[[int], None],
) -> tuple[Scheduler, str, Callable[[str], None]]:
    """The scheduler; what the KV blocks depend on that it keeps elsewhere, in JSON, empty if it keeps none; and a
    function that has it keep those of the weights of another folder."""
    cache = config.cache
    groups = checkpoint.kv_cache_groups(max_model_len, cache.block_size, not cache.disable_hybrid_kv_cache_manager)
    num_states = groups.num_states(num_blocks, config.scheduler.max_num_seqs)
    kv_cache = KVCacheManager(num_blocks, cache.block_size, cache.enable_prefix_caching, groups, num_states)
    if config.parallel.routes_by_prefix:
        kv_cache.block_pool.report_events()
    drafter: Drafter | None = None
    if config.scheduler.speculative_config is not None:
        drafter = Drafter(
            make_proposer(config.scheduler.speculative_config), checkpoint.vocab_size,
            config.scheduler.max_draft_tokens, config.scheduler.max_num_sampled_rows,
            reads_prompts=config.scheduler.speculative_config.method not in WITHOUT_CACHE,
        )  # fmt: skip
    connector: KVConnector | None = None
    namespace = ""

    def connect_again(folder: str) -> None:
        """Nothing is kept elsewhere."""

    if config.cache.kv_transfer_config is not None:
        from quire_engine.kv_connector.connect import connect

        assert executor.board is not None
        board = executor.board.transfers
        assert board is not None
        connector, namespace = connect(config, max_model_len, kv_cache, board, executor.collective_rpc)
        present = connector

        def connect_again(folder: str) -> None:
            nonlocal present
            its_config = replace(config, model=replace(config.model, model=folder))
            present, _ = connect(its_config, max_model_len, kv_cache, board, executor.collective_rpc, present.num_loads)
            scheduler.use_connector(present)

    adapters: AdapterScheduler | None = None
    if config.lora.enable_lora:
        assert executor.board is not None
        assert executor.board.adapters is not None
        adapters = AdapterScheduler(
            config.lora.max_loras, config.lora.num_ready, config.scheduler.max_num_seqs, executor.board.adapters
        )
    scheduler = Scheduler(
        config.scheduler,
        kv_cache,
        drafter=drafter,
        connector=connector,
        adapters=adapters,
        fill_bitmask=fill_bitmask,
        on_begin=on_begin,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        async_scheduling=executor.async_scheduling,
        sends_new_token_ids=config.parallel.world_size > 1,
        computes_whole_prompts=not checkpoint.is_causal,
    )
    return scheduler, namespace, connect_again


def _adaptable(config: EngineCoreConfig, checkpoint: ServedCheckpoint) -> AdaptableModules | None:
    if not config.lora.enable_lora:
        return None
    from quire_engine.adapters.adaptable import adaptable_modules  # imports torch

    assert isinstance(checkpoint, CheckpointConfig)
    return adaptable_modules(checkpoint, config)


def _watch_experts(
    config: EngineCoreConfig, checkpoint: ServedCheckpoint, executor: Executor
) -> tuple[ExpertBalancer | None, ExpertLoadReport | None]:
    if checkpoint.expert_shape is None:
        return None, None
    if not config.parallel.enable_eplb:
        return None, ExpertLoadReport(config.parallel)
    balancer = ExpertBalancer(executor, config.parallel, checkpoint.expert_shape, checkpoint.expert_bytes)
    return balancer, ExpertLoadReport(config.parallel, shares=lambda: balancer.shares)


def with_whole_prompts(config: EngineCoreConfig, max_model_len: int) -> EngineCoreConfig:
    """The settings of a model that computes each prompt in one step, and reuses no prefix of it."""
    scheduler = replace(
        config.scheduler, max_num_batched_tokens=max(config.scheduler.max_num_batched_tokens, max_model_len),
        long_prefill_token_threshold=0,
    )  # fmt: skip
    return replace(config, scheduler=scheduler, cache=replace(config.cache, enable_prefix_caching=False))


def check_settings(config: EngineCoreConfig, checkpoint: ServedCheckpoint, max_model_len: int) -> None:
    """Check that the settings suit the model, before anything is started.

    Raises:
        ValueError: they do not.
    """
    parallel = config.parallel
    if max_model_len > checkpoint.longest_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}; the checkpoint's positions end at {checkpoint.longest_model_len} "
            "(max_position_embeddings, what rope_parameters extend it to, or index_topk of sparse attention)"
        )
    checkpoint.check_parallel(
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel
    )
    if config.lora.enable_lora and not isinstance(checkpoint, CheckpointConfig):
        raise ValueError(
            f"enable_lora is true, and {checkpoint.architecture} runs with transformers' own code, which takes no "
            "adapters; merge the adapter into the checkpoint (merge_and_unload), and serve that"
        )
    if not checkpoint.is_causal:
        for name, value in (
            ("speculative_config", config.scheduler.speculative_config),
            ("kv_transfer_config", config.cache.kv_transfer_config),
        ):
            if value is not None:
                raise ValueError(f"{name} is set; a {checkpoint.architecture} generates nothing and keeps no KV blocks")
    if checkpoint.expert_shape is None:
        return
    num_experts, num_ranks = checkpoint.expert_shape[1], parallel.data_parallel_size * parallel.tensor_parallel_size
    if parallel.is_lockstep and num_experts < num_ranks:
        raise ValueError(
            f"data_parallel_size is {parallel.data_parallel_size}; with enable_expert_parallel the model's "
            f"{num_experts} experts are divided among the {num_ranks} ranks of all replicas, and each has to have one: "
            "lower it, or leave enable_expert_parallel out"
        )
    if parallel.num_redundant_experts is not None:
        check_redundancy(num_experts, parallel.num_redundant_experts, parallel.tensor_parallel_size)
