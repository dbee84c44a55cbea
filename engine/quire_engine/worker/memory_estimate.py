"""MemoryEstimate: what a rank will take of the memory, before its weights are loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from quire_engine.adapters.adaptable import adaptable_layers, planned_bytes
from quire_engine.config import EngineCoreConfig
from quire_engine.kv_cache import STATE, StateSpec, block_bytes
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.layers.parallel import packed_bytes
from quire_engine.models.linear import linear_methods
from quire_engine.models.loader import META, build, check_weights, new_model
from quire_engine.worker.arguments import rank_state
from quire_engine.worker.cache_allocator import CacheLayout, cache_bytes, num_blocks_for
from quire_engine.worker.cache_memory import CpuCacheMemory, GpuCacheMemory
from quire_engine.worker.model_loader import ModelLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The memory of the first rank; without a model that drafts, and without the largest step's activations."""

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Bytes of a token that all layers keep."""
    available_bytes: int
    """What is left for the KV cache."""
    num_kv_cache_tokens: int
    """Tokens of the longest request that fits into the cache alone, or of all requests where all layers keep all
    tokens: as `EngineCoreReady.num_kv_cache_tokens`."""
    state_bytes: int = 0
    """Bytes of a block of recurrent layers' states; 0 without these."""
    num_states: int = 0
    """How many such blocks the cache has."""

    @classmethod
    def of(
        cls, config: EngineCoreConfig, checkpoint: CheckpointConfig, max_model_len: int, device: torch.device
    ) -> "MemoryEstimate":
        """Estimate from the headers of the weight files; with the load format `dummy` from the configuration alone.

        Raises:
            ValueError: the weights, or one KV block, do not fit into the memory that is free now.
            CheckpointError: a file is broken, or a tensor is missing or of the wrong shape.
        """
        parallel = rank_state(config.parallel)
        folder, is_dummy = Path(config.model.model), config.model.load_format == "dummy"
        loader = ModelLoader(config, checkpoint, max_model_len, parallel, device)
        tensors = None if is_dummy else check_weights(folder, checkpoint)
        weight_format = checkpoint.weight_format
        if is_dummy and weight_format.method == "gguf":
            weight_format = WeightFormat()
        methods = linear_methods(weight_format, config.model.quantization, tensors)
        dtype: torch.dtype = getattr(torch, loader.dtype_name)
        model = build(lambda: new_model(checkpoint, 1, parallel), dtype, META, methods)
        weight_bytes = packed_bytes(model, torch.empty(0, dtype=dtype, device=device))

        cache = config.cache
        groups = checkpoint.kv_cache_groups(max_model_len, cache.block_size, not cache.disable_hybrid_kv_cache_manager)
        if device.type == "cpu":
            available_bytes = CpuCacheMemory(config).planned_bytes(weight_bytes)
        else:
            available_bytes = GpuCacheMemory(config, device).planned_bytes - weight_bytes
        if available_bytes <= 0:
            raise ValueError(
                f"its weights take {weight_bytes} bytes on each rank, and what is free on this "
                f"{'machine' if device.type == 'cpu' else 'GPU'} leaves no room for a KV cache; divide the model by "
                "tensor_parallel_size, or set quantization"
            )
        if config.lora.enable_lora:
            layers, like = adaptable_layers(model), torch.empty(0, dtype=dtype, device=device)
            available_bytes -= planned_bytes(config.lora, layers, like)
        available_bytes = cache.kv_cache_memory_bytes or available_bytes
        layout = CacheLayout.of(model.state_specs, model.layer_numbers, groups)
        num_blocks = num_blocks_for(
            available_bytes=available_bytes,
            cache_bytes=cache_bytes(config, layout.tensor_specs, loader.cache_dtype, groups),
            block_size=cache.block_size, max_model_len=max_model_len, max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens, groups=groups,
        )  # fmt: skip
        specs: list[StateSpec] = [spec for spec in model.state_specs if spec.is_lasting and spec.window != STATE]
        specs += [spec for spec in layout.tensor_specs if not spec.is_lasting]
        states = [spec for spec in layout.tensor_specs if spec.window == STATE]
        return cls(
            num_parameters=model.num_parameters(),
            weight_bytes=weight_bytes,
            kv_bytes_per_token=cache_bytes(config, specs, loader.cache_dtype, groups)(1) // cache.block_size,
            available_bytes=available_bytes,
            num_kv_cache_tokens=groups.max_tokens(
                num_blocks, cache.block_size, config.scheduler.max_num_batched_tokens, max_model_len
            ),
            state_bytes=block_bytes(states, cache.block_size, 4, config.scheduler.max_draft_tokens),
            num_states=groups.num_states(num_blocks, config.scheduler.max_num_seqs),
        )
