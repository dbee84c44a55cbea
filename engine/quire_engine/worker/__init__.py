"""One rank: the model, its KV cache, and the batch that it keeps from step to step."""

from quire_engine.worker.worker import Worker

__all__ = ["Worker"]
