"""Executors: how a step reaches the workers, wherever they run."""

from quire_engine.config import EngineCoreConfig
from quire_engine.executor.base import Executor
from quire_engine.executor.uniproc import UniProcExecutor
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.models import ServedCheckpoint

__all__ = ["Executor", "UniProcExecutor", "make_executor"]


def make_executor(
    config: EngineCoreConfig,
    checkpoint: ServedCheckpoint,
    max_model_len: int,
    expert_group: LockstepHandle | None = None,
) -> Executor:
    """The executor for `distributed_executor_backend`, with its workers started and their models loaded.

    Args:
        config: the engine core's.
        checkpoint: the model.
        max_model_len: the longest sequence.
        expert_group: where the ranks meet those of other engines, if they share the experts.

    Raises:
        EngineError: a worker could not start.
        ValueError: a setting does not fit this machine.
    """
    backend = config.parallel.executor_backend
    if backend == "uni":
        return UniProcExecutor(config, checkpoint, max_model_len, expert_group)
    if backend == "mp":
        # Not above: a worker's process imports this package only for the queue.
        from quire_engine.executor.multiproc import MultiProcExecutor

        return MultiProcExecutor(config, max_model_len, checkpoint.expert_shape, expert_group)
    from quire_engine.executor.ray import RayExecutor  # needs the `ray` extra

    return RayExecutor(config, max_model_len)
