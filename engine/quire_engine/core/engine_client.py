"""EngineClient: one engine or several, as the frontend sees them; the settings say which kind it is."""

from typing import TypeAlias

from quire_engine.config import EngineConfig
from quire_engine.core.data_parallel_client import DataParallelClient
from quire_engine.core.supervised_client import OnRecovery, SupervisedClient

EngineClient: TypeAlias = SupervisedClient | DataParallelClient


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
