"""Each engine's statistics go to its own series, and a request's end waits for all of them."""

from types import SimpleNamespace
from typing import Any

from quire_engine.stats import IterationStats, SchedulerStats
from quire_monitoring import ReplicaStatLoggers, TritonStatLogger
from support.serving import wait_until


class Metric:
    def __init__(self, values: dict[Any, float], key: Any) -> None:
        self._values, self._key = values, key

    def set(self, value: float) -> None:
        self._values[self._key] = value

    def increment(self, value: float) -> None:
        self._values[self._key] = self._values.get(self._key, 0.0) + value

    observe = increment


def loggers_of(number: int, values: dict[Any, float]) -> ReplicaStatLoggers:
    def make_family(definition: Any) -> Any:
        def make(labels: dict[str, str], buckets: Any = None) -> Metric:
            return Metric(values, (definition.name, labels["engine"], labels.get("rank")))

        return SimpleNamespace(Metric=make)

    return ReplicaStatLoggers(
        [TritonStatLogger(make_family, {"engine": str(index)}, aliases=False) for index in range(number)]
    )


def test_engines_have_series_of_their_own() -> None:
    values: dict[Any, float] = {}
    loggers = loggers_of(2, values)
    up = [True, True]
    loggers.start(lambda index: up[index], lambda index: [up[index]])
    loggers.record(SchedulerStats(num_running=3, prefix_cache_queries=10), IterationStats())
    loggers.record(SchedulerStats(num_running=5, prefix_cache_queries=4), IterationStats(engine_index=1))
    loggers.record(SchedulerStats(num_running=3, prefix_cache_queries=12), IterationStats(num_generation_tokens=7))
    loggers.record_rejection()
    written: list[bool] = []
    loggers.when_written(lambda: written.append(True))
    wait_until(lambda: written == [True], "it is called once")
    assert values["quire_prefix_cache_queries_total", "0", None] == 12
    assert values["quire_prefix_cache_queries_total", "1", None] == 4
    assert values["quire_generation_tokens_total", "0", None] == 7
    assert ("quire_generation_tokens_total", "1", None) not in values
    up[1] = False
    wait_until(lambda: values["quire_engine_up", "1", None] == 0, "one is down")
    assert values["quire_engine_up", "0", None] == 1
    wait_until(lambda: values["quire_requests_running", "0", None] == 3, "the other is not")
    wait_until(lambda: values["quire_requests_running", "1", None] == 0, "and what was there is not any more")
    assert loggers.stop()
    assert values["quire_engine_up", "0", None] == 0
