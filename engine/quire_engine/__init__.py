"""The LLM engine: continuous batching over a paged KV cache.

It knows nothing of Triton Inference Server, Prometheus or HTTP. `LLM` is for offline use, `AsyncLLM` for serving.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.async_llm import AsyncLLM
    from quire_engine.config import EngineConfig
    from quire_engine.frontend.beam_search import BeamSearchParams
    from quire_engine.llm import LLM
    from quire_engine.lora import AdapterInfo, LoRARequest
    from quire_engine.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
    )
    from quire_engine.pooling import PoolingInfo, PoolingParams
    from quire_engine.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AdapterInfo",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingInfo",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
]

_HOMES = {
    "LLM": "quire_engine.llm",
    "AdapterInfo": "quire_engine.lora",
    "AsyncLLM": "quire_engine.async_llm",
    "BeamSearchParams": "quire_engine.frontend.beam_search",
    "ClassificationOutput": "quire_engine.outputs",
    "CompletionOutput": "quire_engine.outputs",
    "EmbeddingOutput": "quire_engine.outputs",
    "EngineConfig": "quire_engine.config",
    "LoRARequest": "quire_engine.lora",
    "PoolingInfo": "quire_engine.pooling",
    "PoolingOutput": "quire_engine.outputs",
    "PoolingParams": "quire_engine.pooling",
    "PoolingRequestOutput": "quire_engine.outputs",
    "RequestOutput": "quire_engine.outputs",
    "RequestOutputKind": "quire_engine.sampling_params",
    "SamplingParams": "quire_engine.sampling_params",
    "ScoringOutput": "quire_engine.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a process that only needs one file of this package should not pay for the others."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
