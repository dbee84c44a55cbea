"""The engine's settings, and what is made of names that only vLLM has."""

from quire_engine.config.engine_config import (
    SECRETS,
    CacheConfig,
    EngineConfig,
    EngineCoreConfig,
    FrontendConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire_engine.config.speculative_config import SpeculativeConfig

__all__ = [
    "SECRETS",
    "CacheConfig",
    "EngineConfig",
    "EngineCoreConfig",
    "FrontendConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
]
