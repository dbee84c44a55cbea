"""Which policy a name stands for."""

from collections.abc import Callable

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.scheduler.policy import PriorityPolicy, SchedulingPolicy
from quire_engine.scheduler.slo_policy import SLOPolicy


def make_policy(config: SchedulerConfig, kv_cache: KVCacheManager, clock: Callable[[], float]) -> SchedulingPolicy:
    """The policy of the setting `scheduling_policy`.

    Args:
        config: has the setting, and the limits of a step.
        kv_cache: the scheduler's.
        clock: the scheduler's.
    """
    match config.scheduling_policy:
        case "priority":
            return PriorityPolicy()
        case "slo":
            return SLOPolicy(config, kv_cache, clock)
    return SchedulingPolicy()
