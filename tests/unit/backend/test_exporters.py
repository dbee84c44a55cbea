"""Each engine's statistics go to its own series, and a request's end waits for all of them."""

from types import SimpleNamespace
from typing import Any

from quire_backend.exporters import EngineExporters
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats
from quire_monitoring.definitions import MetricsConfig
from quire_monitoring.triton import TritonStatLogger
from support.serving import wait_until

REJECTED = FinishedRequestStats("rejected")


class Metric:
    def __init__(self, values: dict[Any, float], key: Any) -> None:
        self._values, self._key = values, key

    def set(self, value: float) -> None:
        self._values[self._key] = value

    def increment(self, value: float) -> None:
        self._values[self._key] = self._values.get(self._key, 0.0) + value

    observe = increment


def exporters_of(num_engines: int, values: dict[Any, float], released: list[str]) -> EngineExporters:
    def make_family(definition: Any) -> Any:
        def make(labels: dict[str, str], buckets: Any = None) -> Metric:
            return Metric(values, (definition.name, labels["engine"], labels.get("rank")))

        return SimpleNamespace(Metric=make)

    def make_number(index: int) -> Any:
        return SimpleNamespace(label=str(index), release=lambda: released.append(str(index)))

    return EngineExporters(
        make_number,
        lambda label: TritonStatLogger(make_family, {"engine": label}, MetricsConfig(aliases=False)),
        lambda label: None,
        sends_totals=False,
        num_engines=num_engines,
    )


def test_engines_have_series_of_their_own() -> None:
    values: dict[Any, float] = {}
    released: list[str] = []
    loggers = exporters_of(2, values, released)
    up = [True, True]
    loggers.start(lambda index: up[index], lambda index: [up[index]], lambda index: {"num_gpu_blocks": str(9 + index)})
    loggers.record(SchedulerStats(num_running=3, prefix_cache_queries=10), IterationStats())
    loggers.record(SchedulerStats(num_running=5, prefix_cache_queries=4), IterationStats(engine_index=1))
    loggers.record(SchedulerStats(num_running=3, prefix_cache_queries=12), IterationStats(num_generation_tokens=7))
    loggers.record_rejection(REJECTED)
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
    loggers.stop()
    assert released == ["0", "1"]
    assert values["quire_engine_up", "0", None] == 0


def test_one_that_comes_is_counted_from_its_first_step_and_one_that_leaves_is_never_down() -> None:
    values: dict[Any, float] = {}
    released: list[str] = []
    loggers = exporters_of(1, values, released)
    loggers.start(lambda index: True, lambda index: [True], lambda index: {})
    loggers.expect([1])
    loggers.record(None, IterationStats(engine_index=1, num_generation_tokens=7))
    assert not any(key[1] == "1" for key in values), "it is not up yet"
    loggers.match(lambda: [0, 1])
    loggers.record(None, IterationStats(engine_index=1, num_requests_moved=2))
    loggers.match(lambda: [0])
    assert released == ["1"]
    assert values["quire_generation_tokens_total", "1", None] == 7
    assert values["quire_requests_moved_total", "1", None] == 2
    assert values["quire_engine_up", "1", None] == values["quire_worker_up", "1", "0"] == 1
    loggers.record(None, IterationStats(engine_index=1, num_generation_tokens=7))  # was on its way
    written: list[bool] = []
    loggers.when_written(lambda: written.append(True))
    wait_until(lambda: written == [True], "nobody waits for it")
    loggers.stop()
    assert released == ["1", "0"]
