"""One rank: the model, its KV cache, and the persistent batch."""

from quire_engine.worker.worker import Worker

__all__ = ["Worker"]
