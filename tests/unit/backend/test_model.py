"""The calls of the server's stub, settings, and the completion of config.pbtxt."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_backend import completion, triton_api
from quire_backend import model as model_module
from quire_backend.completion import offered_tasks
from quire_backend.model import TritonPythonModel
from quire_backend.model_config import (
    INPUTS,
    OUTPUTS,
    RETURN_FLAGS,
    SAMPLING_INPUTS,
    TYPED_INPUTS,
    complete,
    num_instances,
)
from quire_backend.settings import load_engine_config
from quire_backend.status_page import StubState, ask_to_end, read_status_pages
from quire_engine.errors import CheckpointError, ScalingError
from quire_engine.pooling import NO_POOLING_INFO
from quire_engine.stats import IterationStats
from quire_monitoring import triton
from quire_monitoring.definitions import METRICS, MetricKind
from quire_monitoring.triton import TritonStatLogger
from support.serving import wait_until


class Config:
    """As much of pb_utils.ModelConfig as matters: it refuses another type or another policy."""

    def __init__(self, **declared):
        self.values = {"max_batch_size": 0, "input": [], "output": [], **declared}

    def as_dict(self):
        return self.values

    def _add(self, kind, item):
        for known in self.values[kind]:
            if known["name"] == item["name"]:
                for name, value in item.items():
                    if known.get(name) not in (None, [], value):
                        raise ValueError(f"{item['name']}: {name}")
                known.update(item)
                return
        self.values[kind].append(item)

    def add_input(self, input):
        self._add("input", input)

    def add_output(self, output):
        self._add("output", output)

    def set_max_batch_size(self, size):
        self.values["max_batch_size"] = size

    def set_model_transaction_policy(self, policy):
        if self.values.get("model_transaction_policy", policy) != policy:
            raise ValueError("policy")
        self.values["model_transaction_policy"] = policy


# -- config.pbtxt -----------------------------------------------------------------------------------------------------


def test_completes_an_empty_configuration() -> None:
    config = Config()
    assert completion.TritonPythonModel.auto_complete_config(config) is config
    inputs = {item["name"]: item for item in config.values["input"]}
    outputs = {item["name"]: item for item in config.values["output"]}
    assert inputs["text_input"] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": True}
    assert inputs["stop_words"]["data_type"] == "TYPE_STRING"
    # tritonserver's generate would take nothing but numbers for it, and cut them to 32 bits.
    assert "max_tokens" not in inputs
    assert outputs["text_output"] == {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]}
    assert outputs["num_input_tokens"]["dims"] == [1]
    assert config.values["model_transaction_policy"] == {"decoupled": True}
    assert config.values["max_batch_size"] == 0


def test_the_configuration_is_completed_by_what_the_checkpoint_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_api.pb_utils, "get_model_dir", lambda: str(tmp_path), raising=False)
    assert offered_tasks() is None  # there is no model.json
    (tmp_path / "model.json").write_text("[]")
    assert offered_tasks() == NO_POOLING_INFO
    (tmp_path / "model.json").write_text(json.dumps({"model": "nowhere/to-be-found"}))
    assert offered_tasks() == NO_POOLING_INFO
    checkpoint = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
    (tmp_path / "model.json").write_text(json.dumps({"model": str(checkpoint)}))
    offered = offered_tasks()
    assert offered is not None
    assert "embed" in offered.tasks
    config = Config()
    completion.TritonPythonModel.auto_complete_config(config)
    assert "embeddings" in {item["name"] for item in config.values["output"]}


def test_the_stub_that_completes_a_configuration_imports_neither_an_engine_nor_metrics() -> None:
    script = (
        "import sys, types; name = 'triton_python_backend_utils'; sys.modules[name] = types.ModuleType(name)\n"
        "import quire_backend.completion\n"
        "print(sorted({'quire_engine.async_llm', 'quire_backend.serving', 'zmq', 'asyncio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[]", "")


def test_the_stub_that_serves_makes_the_model_that_serves() -> None:
    assert type(completion.TritonPythonModel()) is TritonPythonModel


def test_tables_agree() -> None:
    inputs = [spec.name for spec in (*INPUTS, *TYPED_INPUTS)]
    assert len(set(inputs)) == len(inputs)
    assert set(RETURN_FLAGS) | set(SAMPLING_INPUTS) <= set(inputs)
    assert set(RETURN_FLAGS.values()) | {"text_output"} == {spec.name for spec in OUTPUTS}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 1),
        ({"instance_group": [{"count": 2, "kind": "KIND_MODEL", "gpus": []}, {"count": 1}]}, 3),
        ({"instance_group": [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 1]}]}, 4),
    ],
)
def test_instances_are_counted(config: dict[str, Any], count: int) -> None:
    assert num_instances(config) == count


def test_what_is_declared_stays() -> None:
    declared = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": False}
    config = Config(input=[declared], output=[{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}])
    complete(config)
    assert config.values["input"][0] == {
        "name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": False,
    }  # fmt: skip
    assert config.values["output"][0]["dims"] == [1]


def asks_for_typed_inputs(value: str) -> dict[str, Any]:
    return {"parameters": {"typed_inputs": {"string_value": value}}}


def test_typed_inputs_are_there_where_the_configuration_asks_for_them() -> None:
    every, one = Config(**asks_for_typed_inputs("true")), Config(
        input=[{"name": "max_tokens", "data_type": "TYPE_INT32", "dims": [1]}], **asks_for_typed_inputs("false")
    )  # fmt: skip
    complete(every)
    types = {item["name"]: item["data_type"] for item in every.values["input"]}
    assert (types["max_tokens"], types["temperature"], types["seed"]) == ("TYPE_INT32", "TYPE_FP32", "TYPE_UINT64")
    complete(one)
    inputs = {item["name"]: item for item in one.values["input"]}
    assert inputs["max_tokens"]["optional"] is True
    assert "temperature" not in inputs


@pytest.mark.parametrize(
    "declared",
    [
        {"input": [{"name": "stream", "data_type": "TYPE_INT32", "dims": [1]}]},
        {"input": [{"name": "temperature", "data_type": "TYPE_INT32", "dims": [1]}]},
        asks_for_typed_inputs("yes"),
        {"max_batch_size": 8},
        {"model_transaction_policy": {"decoupled": False}},
    ],
)
def test_contradictions_are_refused(declared: Any) -> None:
    with pytest.raises(ValueError, match=r"stream|temperature|typed_inputs is 'yes'|max_batch_size|policy"):
        complete(Config(**declared))


# -- model.json -------------------------------------------------------------------------------------------------------


def test_settings_are_relative_to_the_version_folder(tmp_path: Any) -> None:
    (tmp_path / "model.json").write_text('{"model": "weights", "stream_interval": 3}')
    config = load_engine_config(tmp_path)
    assert config.model.model == str(tmp_path / "weights")
    assert config.frontend.stream_interval == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing"),
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object of settings, not a list"),
        ("\xff", "is not JSON"),
        ("{}", "model is missing"),
        ('{"model": "m", "max_num_seq": 3}', "did you mean 'max_num_seqs'"),
        ('{"model": "m", "block_size": "x"}', "block_size is 'x'"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path: Any, text: Any, message: Any) -> None:
    if text is not None:
        (tmp_path / "model.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        load_engine_config(tmp_path)
    assert "model.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPU", {"device": "cpu"}),
        ("GPU", {"gpu_device_ids": [0]}),
        ("GPU", {"gpu_device_ids": [1, 2], "tensor_parallel_size": 2}),
        ("GPU", {"tensor_parallel_size": 2}),
        ("GPU", {"pipeline_parallel_size": 2}),
        ("GPU", {"distributed_executor_backend": "ray"}),
        ("CPU", {"device": "cuda"}),
        ("CPU", {"gpu_device_ids": [1]}),
    ],
)
def test_settings_against_the_kind_of_the_instance_are_refused(tmp_path: Any, kind: str, settings: Any) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "m", **settings}))
    load_engine_config(tmp_path)
    with pytest.raises(
        ValueError, match=rf"but config\.pbtxt has an instance of KIND_{kind}.*; please specify KIND_MODEL"
    ) as error:
        load_engine_config(tmp_path, kind, 1)
    name, value = next(iter(settings.items()))
    assert str(error.value).startswith(f"{tmp_path / 'model.json'}: {name} is {value!r}, but ")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPU", {"device": "auto", "gpu_device_ids": [1], "tensor_parallel_size": 1}),
        ("GPU", {"device": "cuda", "distributed_executor_backend": "mp"}),
        ("CPU", {"device": "auto", "tensor_parallel_size": 2}),
        ("CPU", {"device": "cpu", "distributed_executor_backend": "ray"}),
    ],
)
def test_settings_may_say_what_the_kind_says(tmp_path: Any, kind: str, settings: Any) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "m", **settings}))
    parallel = load_engine_config(tmp_path, kind, 1).parallel
    assert (parallel.device, parallel.gpu_device_ids) == (("cuda", [1]) if kind == "GPU" else ("cpu", None))


# -- TritonPythonModel ------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.json").write_text(json.dumps({"model": "weights"}))
    return {
        "model_repository": str(tmp_path), "model_version": "1", "model_name": "m",
        "model_instance_kind": "MODEL", "model_instance_device_id": "0",
        "model_instance_name": "m_0_0", "model_config": "{}",
    }  # fmt: skip


def test_serves(engine: Any, request_of: Any, arguments: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_logger: engine)
    engine.on_add = lambda engine, request_id: engine.emit(request_id, "x", finish_reason="stop")
    model = TritonPythonModel()
    model.initialize(arguments)
    assert model.is_ready()
    request = request_of(text_input="Hi")
    assert model.execute([request]) is None
    assert request.sender.wait()[-1].text == "Hix"
    model.finalize()
    assert not model.is_ready()
    assert engine.events[-1] == "shutdown"


def test_the_engines_processes_do_not_inherit_the_token(engine: Any, arguments: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "a token of 16 characters")
    seen = []

    def make(config: Any, stat_loggers: Any) -> Any:
        seen.append((config.frontend.introspection_token, "QUIRE_INTROSPECTION_TOKEN" in os.environ))
        return engine

    monkeypatch.setattr(model_module, "make_engine", make)
    model = TritonPythonModel()
    model.initialize(arguments)
    model.finalize()
    assert seen == [("a token of 16 characters", False)]


@pytest.mark.parametrize(("policy", "said"), [("priority", True), ("fcfs", False)])
def test_who_schedules_by_priority_is_told_that_tritons_own_has_no_effect(
    engine: Any, arguments: Any, tmp_path: Any, monkeypatch: Any, capsys: Any, policy: str, said: bool
) -> None:
    (tmp_path / "1" / "model.json").write_text(json.dumps({"model": "weights", "scheduling_policy": policy}))
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    model = TritonPythonModel()
    model.initialize(arguments)
    model.finalize()
    assert ("Triton's own request priority does not reach a Python backend" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("kind", "device", "ids"), [("MODEL", "auto", None), ("CPU", "cpu", None), ("GPU", "cuda", [2])]
)
def test_kind_of_the_instance_says_where(
    kind: str, device: str, ids: Any, engine: Any, arguments: Any, monkeypatch: Any
) -> None:
    configs = []
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_logger: configs.append(config) or engine)
    model = TritonPythonModel()
    model.initialize({**arguments, "model_instance_kind": kind, "model_instance_device_id": "2"})
    model.finalize()
    assert (configs[0].parallel.device, configs[0].parallel.gpu_device_ids) == (device, ids)


def test_an_adapter_with_the_models_own_name_stops_the_load(arguments: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_logger: pytest.fail("it was started"))
    settings = {"model": "weights", "enable_lora": True, "lora_modules": {"m": "adapter"}}
    (Path(arguments["model_repository"]) / "1" / "model.json").write_text(json.dumps(settings))
    with pytest.raises(triton_api.pb_utils.TritonModelException, match="lora_modules has 'm', the model's own name"):
        TritonPythonModel().initialize(arguments)


def test_server_without_histograms_keeps_all_other_metrics(monkeypatch: Any) -> None:
    family = triton_api.pb_utils.MetricFamily
    monkeypatch.delattr(family, "HISTOGRAM")
    missing = {definition.kind for definition in METRICS if triton_api.metric_family(definition) is None}
    assert missing == {MetricKind.HISTOGRAM}
    stat_logger = TritonStatLogger(triton_api.metric_family, {})
    stat_logger.start(is_up=lambda: True)
    assert stat_logger.enabled
    stat_logger.stop()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("weights: config.json\nis missing"), "weights: config.json is missing"),
        (ZeroDivisionError("by design"), "ZeroDivisionError: by design"),
    ],
)
def test_load_error_is_one_line(arguments: Any, monkeypatch: Any, error: Any, message: Any) -> None:
    def fail(config, stat_logger):
        raise error

    monkeypatch.setattr(model_module, "make_engine", fail)
    with pytest.raises(Exception, match=message) as caught:
        TritonPythonModel().initialize(arguments)
    assert type(caught.value).__name__ == "TritonModelException"
    assert str(caught.value) == message
    assert caught.value.__context__ is None
    TritonPythonModel().finalize()


@pytest.fixture
def exporters(monkeypatch: Any) -> list[TritonStatLogger]:
    """Those to /metrics that models make."""
    made = []

    def make(*arguments: Any, **options: Any) -> TritonStatLogger:
        made.append(TritonStatLogger(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(model_module, "TritonStatLogger", make)
    return made


def test_a_model_has_metrics_once_it_is_loaded(
    engine: Any, arguments: Any, exporters: list[TritonStatLogger], monkeypatch: Any
) -> None:
    """While it loads, it would look like one whose engine is down; and nobody calls `finalize` if it cannot."""

    def load(config, stat_loggers):
        assert not exporters[0].enabled
        return engine

    monkeypatch.setattr(model_module, "make_engine", load)
    model = TritonPythonModel()
    model.initialize(arguments)
    assert exporters[0].enabled
    model.finalize()
    assert not exporters[0].enabled


def test_a_model_that_the_server_has_forgotten_ends_its_engine_and_takes_its_metrics_away(
    engine: Any, arguments: Any, exporters: list[TritonStatLogger], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    monkeypatch.setenv("QUIRE_RUN_ID", "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = TritonPythonModel()
    model.initialize(arguments)
    (page,) = read_status_pages(tmp_path)
    ask_to_end(tmp_path, page)
    wait_until(lambda: "shutdown" in engine.events and not exporters[0].enabled, "all of it is gone")
    (page,) = read_status_pages(tmp_path)
    assert page.state is StubState.RETIRED
    model.finalize()  # the server remembers it after all
    assert engine.events.count("shutdown") == 1
    assert read_status_pages(tmp_path) == []


def test_living_engines_of_a_model_have_numbers_of_their_own(engine: Any, arguments: Any, monkeypatch: Any) -> None:
    """Otherwise the server frees the series of one at the other's end, as at every reload."""
    numbers = []

    class Logger(TritonStatLogger):
        def __init__(self, make_family, labels, config, **options):
            numbers.append((labels["model"], labels["engine"]))
            super().__init__(make_family, labels, config, **options)

    def load(name="m"):
        model = TritonPythonModel()
        model.initialize({**arguments, "model_name": name})
        return model

    monkeypatch.setattr(model_module, "TritonStatLogger", Logger)
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    first, second, other = load(), load(), load("other")
    first.finalize()
    third = load()
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: 1 / 0)
    for _ in range(2):
        with pytest.raises(Exception, match="ZeroDivisionError"):
            load()
    assert numbers == [("m", "0"), ("m", "1"), ("other", "0"), ("m", "0"), ("m", "2"), ("m", "2")]
    for model in (second, third, other):
        model.finalize()


def test_an_engine_has_metrics_while_it_is_there(
    engine: Any, arguments: Any, request_of: Any, monkeypatch: Any
) -> None:
    """One that is being started or could not be, or has left, is not shown as one that is down."""
    series: weakref.WeakSet[Any] = weakref.WeakSet()
    meanwhile = []

    class Metric:
        def __init__(self, labels, buckets=None):
            self.engine = labels["engine"]
            self.set = self.increment = self.observe = lambda value: None
            series.add(self)

    def shown():
        return "".join(sorted({metric.engine for metric in series}))

    async def scale(num_replicas):
        meanwhile.append(shown())
        if num_replicas == 4:
            raise ScalingError("it cannot start")
        engine.num_replicas = num_replicas

    def command(number):
        request = request_of({"introspect": "scale", "replicas": number, "introspection_token": "a token of the test"})
        model.execute([request])
        return request.sender.wait()[-1]

    engine.scale = scale
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "a token of the test")
    monkeypatch.setattr(triton_api, "metric_family", lambda definition: SimpleNamespace(Metric=Metric))
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    model = TritonPythonModel()
    model.initialize(arguments)
    assert json.loads(command(3).text) == {"replicas": 3, "before": 1}
    assert shown() == "012"
    assert command(4).error.message == "it cannot start"
    assert shown() == "012"
    command(1)
    assert shown() == "0"
    command(2)
    assert (meanwhile, shown()) == (["0", "012", "012", "0"], "01")
    model.finalize()
    assert not shown()


def test_engines_of_other_hosts_have_metrics_while_they_are_there(
    engine: Any, arguments: Any, request_of: Any, monkeypatch: Any
) -> None:
    """Each has its rank as its number, whoever came before it; what it does from its first step on is counted."""
    values: dict[str, float] = {}
    series: weakref.WeakSet[Any] = weakref.WeakSet()
    present, watching, loggers = [0], [], []

    class Metric:
        def __init__(self, definition, labels):
            self.definition, self.engine = definition, labels["engine"]
            series.add(self)

        def increment(self, value):
            if self.definition.name == "quire_generation_tokens_total":
                values[self.engine] = values.get(self.engine, 0) + value

        set = observe = lambda self, value: None

    def shown():
        return "".join(sorted({metric.engine for metric in series}))

    def make_engine(config, stat_loggers):
        loggers.extend(stat_loggers)
        return engine

    def change(*indices, computes=None):
        present[:] = indices
        watching[0]()
        if computes is not None:
            loggers[0].record(None, IterationStats(engine_index=computes, num_generation_tokens=7))

    hosts = {"data_parallel_max_size": 4, "data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 29550,
             "data_parallel_key_file": "keys"}  # fmt: skip
    path = f"{arguments['model_repository']}/1/model.json"
    with open(path, "w") as file:
        json.dump({"model": "weights", **hosts}, file)
    engine.num_remote_replicas = 2
    monkeypatch.setattr(type(engine), "replica_indices", property(lambda self: list(present)))
    engine.watch_replicas = lambda on_change: (watching.append(on_change), on_change())
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "a token of the test")
    monkeypatch.setattr(
        triton_api,
        "metric_family",
        lambda definition: SimpleNamespace(Metric=lambda labels, buckets=None: Metric(definition, labels)),
    )
    monkeypatch.setattr(model_module, "make_engine", make_engine)
    model = TritonPythonModel()
    model.initialize(arguments)
    wait_until(lambda: shown() == "0", "it is alone")
    change(0, 3, computes=3)
    wait_until(lambda: shown() == "03", "one has come")
    change(0, 1, 3)
    wait_until(lambda: shown() == "013", "another one has")
    change(0, 1)
    wait_until(lambda: shown() == "01", "the first has gone")
    assert values["3"] == 7
    change(0, 3, computes=3)
    wait_until(lambda: shown() == "03", "and has come again")
    request = request_of({"introspect": "scale", "replicas": 1, "introspection_token": "a token of the test"})
    model.execute([request])
    assert json.loads(request.sender.wait()[-1].text) == {"replicas": 1, "before": 1, "of_other_hosts": 2}
    model.finalize()
    assert not shown()


def test_a_model_of_several_instances_is_not_scaled(
    engine: Any, arguments: Any, request_of: Any, monkeypatch: Any
) -> None:
    """The command would reach one of them, and the next one another."""
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "a token of the test")
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    model = TritonPythonModel()
    model.initialize({**arguments, "model_config": json.dumps({"instance_group": [{"count": 2}]})})
    for command in ({"introspect": "scale", "replicas": 2}, {"introspect": "sleep"}):
        request = request_of({**command, "introspection_token": "a token of the test"})
        model.execute([request])
        assert "the model has 2 instances" in request.sender.wait()[-1].error.message
    model.finalize()


def test_a_number_stays_taken_while_the_server_keeps_its_series(engine: Any, arguments: Any, monkeypatch: Any) -> None:
    """The next engine would write to series that this process may still take away."""
    labels, stuck, goes_on = [], threading.Event(), threading.Event()

    class Logger(TritonStatLogger):
        def __init__(self, make_family, own, config, **options):
            labels.append(own["engine"])
            super().__init__(make_family, own, config, **options)

    class Metric:
        def __init__(self, labels, buckets=None):
            self.increment = self.observe = lambda value: None
            self.is_stuck = labels["engine"] == "0"

        def set(self, value):
            if self.is_stuck:
                stuck.set()
                goes_on.wait()

    def load():
        model = TritonPythonModel()
        model.initialize(arguments)
        return model

    monkeypatch.setattr(triton, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(triton_api, "metric_family", lambda definition: SimpleNamespace(Metric=Metric))
    monkeypatch.setattr(model_module, "TritonStatLogger", Logger)
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    first = load()
    assert stuck.wait(60)
    first.finalize()
    second = load()
    second.finalize()
    goes_on.set()
    monkeypatch.setattr(triton, "STOP_SECONDS", 60.0)
    first.finalize()
    load().finalize()
    assert labels == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("settings", "parameter", "reason"),
    [
        ({}, None, None),
        ({"disable_log_stats": False}, "true", None),
        ({}, "YES", None),
        ({"metrics": False}, "true", "the setting metrics"),
        ({"disable_log_stats": True}, "true", "the setting disable_log_stats"),
        ({}, "false", "REPORT_CUSTOM_METRICS in config.pbtxt"),
        ({"metrics": True}, "no", "REPORT_CUSTOM_METRICS in config.pbtxt"),
    ],
)
def test_metrics_are_switched_off_as_in_vllm_backend_too(
    settings: Any,
    parameter: Any,
    reason: Any,
    engine: Any,
    arguments: Any,
    exporters: list[TritonStatLogger],
    monkeypatch: Any,
    caplog: Any,
    tmp_path: Any,
) -> None:
    (tmp_path / "1" / "model.json").write_text(json.dumps({"model": "weights", **settings}))
    pbtxt = {} if parameter is None else {"parameters": {"REPORT_CUSTOM_METRICS": {"string_value": parameter}}}
    monkeypatch.setattr(model_module, "make_engine", lambda config, stat_loggers: engine)
    monkeypatch.setattr(triton_api, "install_log_handler", lambda: None)
    model = TritonPythonModel()
    model.initialize({**arguments, "model_config": json.dumps(pbtxt)})
    assert exporters[0].enabled == (reason is None)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("quire_monitoring")]
    assert told == ([] if reason is None else [f"no custom metrics: they are switched off by {reason}"])
    model.finalize()


def test_report_custom_metrics_is_yes_or_no(arguments: Any) -> None:
    pbtxt = {"parameters": {"REPORT_CUSTOM_METRICS": {"string_value": "maybe"}}}
    with pytest.raises(Exception, match=r"REPORT_CUSTOM_METRICS of config.pbtxt is 'maybe'; it must be true or false"):
        TritonPythonModel().initialize({**arguments, "model_config": json.dumps(pbtxt)})


def test_missing_settings_are_a_load_error(arguments: Any, tmp_path: Any) -> None:
    (tmp_path / "1" / "model.json").unlink()
    with pytest.raises(Exception, match=r"model\.json is missing"):
        TritonPythonModel().initialize(arguments)


def test_otlp_without_its_packages_is_one_clear_line(monkeypatch: Any) -> None:
    from quire_backend.model import make_otel
    from quire_engine.config import EngineConfig

    monkeypatch.setitem(sys.modules, "quire_monitoring.otel", None)
    config = EngineConfig.from_settings({"model": "/m", "otlp_endpoint": "http://localhost:4317"})
    with pytest.raises(ValueError, match=r"^otlp_endpoint needs the extra otel .*pip install .*\[otel\]"):
        make_otel(config, {})
    assert make_otel(EngineConfig.from_settings({"model": "/m"}), {}) is None


def test_the_backend_s_debug_lines_are_verbose_ones_of_the_server(monkeypatch: Any) -> None:
    """Whether those appear is the server's to say, by `--log-verbose`; the engine's are not sent at all."""
    lines: list[tuple[str, str]] = []
    for level in ("verbose", "info", "warn", "error"):
        say = lambda message, level=level: lines.append((level, message))  # noqa: E731
        monkeypatch.setattr(triton_api.pb_utils.Logger, f"log_{level}", say)
    triton_api.install_log_handler()
    for package in ("quire_backend", "quire_engine"):
        logging.getLogger(f"{package}.any").debug("%s whispers", package)
        logging.getLogger(f"{package}.any").info("%s speaks", package)
    assert lines == [
        ("verbose", "quire_backend whispers"),
        ("info", "quire_backend speaks"),
        ("info", "quire_engine speaks"),
    ]
    lines.clear()
    logging.getLogger("quire_engine.any").warning("of a store: %s", "\x1b[2J\nquire")
    assert lines == [("warn", "of a store: \\x1b[2J\n    quire")]
    assert logging.lastResort is not None
    record = logging.LogRecord("opentelemetry", logging.WARNING, "", 1, "a collector says \x1b[2J", None, None)
    assert logging.lastResort.format(record) == "a collector says \\x1b[2J"
