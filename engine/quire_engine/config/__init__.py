"""The engine's settings, and what is made of names that only vLLM has."""

from quire_engine.config.engine_config import (
    SECRETS,
    CacheConfig,
    EngineConfig,
    EngineCoreConfig,
    ModelConfig,
    SchedulerConfig,
)
from quire_engine.config.frontend_config import FrontendConfig
from quire_engine.config.kv_transfer_config import TIERS, KVTransferConfig, StorageConfig, TierConfig
from quire_engine.config.lora_config import LoRAConfig
from quire_engine.config.parallel_config import MAX_REPLICAS, DisaggregationConfig, ParallelConfig
from quire_engine.config.speculative_config import SpeculativeConfig, longest_suffix_drafts

__all__ = [
    "MAX_REPLICAS",
    "SECRETS",
    "TIERS",
    "CacheConfig",
    "DisaggregationConfig",
    "EngineConfig",
    "EngineCoreConfig",
    "FrontendConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StorageConfig",
    "TierConfig",
    "longest_suffix_drafts",
]
