"""How a step reaches the workers, wherever they run."""

from quire_engine.executor.base import Executor
from quire_engine.executor.uniproc import UniProcExecutor

__all__ = ["Executor", "UniProcExecutor"]
