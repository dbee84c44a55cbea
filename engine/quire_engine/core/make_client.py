"""The client for as many engines as the settings say, and of their kind."""

from quire_engine.config import EngineConfig
from quire_engine.core.data_parallel_client import DataParallelClient
from quire_engine.core.engine_client import EngineClient
from quire_engine.core.supervised_client import OnRecovery, SupervisedClient

__all__ = ["make_engine_client"]


def make_engine_client(config: EngineConfig, on_recovery: OnRecovery) -> EngineClient:
    """The client for `data_parallel_size` engines; one has nothing between it and the frontend."""
    if config.parallel.has_remote_replicas:
        from quire_engine.core.remote.remote_replica import RemoteReplicas

        return DataParallelClient(config, on_recovery, RemoteReplicas(config).make)
    if config.parallel.data_parallel_size == 1:
        return SupervisedClient(config, on_recovery)
    if config.parallel.is_lockstep:
        from quire_engine.core.lockstep.client import LockstepClient

        return LockstepClient(config, on_recovery)
    return DataParallelClient(config, on_recovery)
