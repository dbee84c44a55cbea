"""EngineConfig: every setting finds its group, and every bad one is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine import LLM
from quire_engine.config import DisaggregationConfig, EngineConfig, KVTransferConfig, ModelConfig, SchedulerConfig
from quire_engine.config.engine_config import setting_names


def test_settings_are_sorted_into_their_groups() -> None:
    config = EngineConfig.from_settings(
        {
            "model": "/m",
            "dtype": "float32",
            "max_model_len": 100,
            "block_size": 8,
            "enable_prefix_caching": False,
            "max_num_seqs": 3,
            "long_prefill_token_threshold": 7,
            "tensor_parallel_size": 1,
            "stream_interval": 2,
            "stream_interval_ms": 0,
        }
    )
    assert (config.model.model, config.model.dtype, config.model.max_model_len) == ("/m", "float32", 100)
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (8, False)
    assert (config.scheduler.max_num_seqs, config.scheduler.long_prefill_token_threshold) == (3, 7)
    assert config.parallel.tensor_parallel_size == 1
    assert (config.frontend.stream_interval, config.frontend.stream_interval_ms) == (2, 0)


def test_unset_settings_keep_their_defaults() -> None:
    config = EngineConfig.from_settings({"model": "/m"})
    assert config == EngineConfig(model=ModelConfig(model="/m"))
    assert config.scheduler == SchedulerConfig()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model", "", "the path of a folder"),
        ("model", 5, "the path of a folder"),
        ("dtype", "int3", "one of auto, float32, bfloat16, float16"),
        ("dtype", None, "one of auto"),
        ("load_format", "gguf", "one of auto, dummy"),
        ("load_format", None, "one of auto, dummy"),
        ("max_model_len", 0, "an integer of at least 1"),
        ("max_model_len", 1.5, "an integer of at least 1"),
        ("max_model_len", True, "an integer of at least 1"),
        ("seed", -1, "an integer of at least 0"),
        ("block_size", 0, "an integer from 1 to 1024"),
        ("block_size", 1025, "an integer from 1 to 1024"),
        ("block_size", "16", "an integer from 1 to 1024"),
        ("kv_cache_dtype", "fp16", "one of auto, int8, fp8"),
        ("quantization", "int3", "unset or one of int8, int4, fp8"),
        ("kv_cache_memory_bytes", 0, "an integer of at least 1"),
        ("kv_cache_memory_bytes", "4GB", "an integer of at least 1"),
        ("gpu_memory_utilization", 0, "in (0, 1]"),
        ("gpu_memory_utilization", 1.01, "in (0, 1]"),
        ("gpu_memory_utilization", float("nan"), "in (0, 1]"),
        ("gpu_memory_utilization", "0.9", "in (0, 1]"),
        ("gpu_memory_utilization", True, "in (0, 1]"),
        ("enable_prefix_caching", 1, "true or false"),
        ("disable_hybrid_kv_cache_manager", "yes", "true or false"),
        ("enable_prefix_caching", "true", "true or false"),
        ("max_num_seqs", 0, "an integer from 1 to 4096"),
        ("max_num_seqs", 4097, "an integer from 1 to 4096"),
        ("max_num_batched_tokens", 0, "an integer of at least 1"),
        ("long_prefill_token_threshold", -1, "an integer of at least 0"),
        ("scheduling_policy", "lottery", "one of fcfs, priority, slo"),
        ("async_scheduling", 1, "true or false"),
        ("async_scheduling", "auto", "true or false"),
        ("tensor_parallel_size", 0, "an integer of at least 1"),
        ("data_parallel_size", 0, "an integer from 1 to 64"),
        ("data_parallel_size", True, "an integer from 1 to 64"),
        ("data_parallel_routing", "random", "one of prefix, least_loaded, round_robin"),
        ("pipeline_parallel_size", 0, "an integer of at least 1"),
        ("distributed_executor_backend", "processes", "one of uni, mp, ray"),
        ("device", "gpu", "one of auto, cpu, cuda"),
        ("device", None, "one of auto, cpu, cuda"),
        ("gpu_device_ids", 0, "a list of integers of at least 0"),
        ("gpu_device_ids", [-1], "a list of integers of at least 0"),
        ("gpu_device_ids", [True], "a list of integers of at least 0"),
        ("gpu_device_ids", ["0"], "a list of integers of at least 0"),
        ("gpu_device_ids", [], "of 1, one for each rank"),
        ("gpu_device_ids", [0, 1], "of 1, one for each rank"),
        ("gpu_device_ids", [1, 1], "without repetition"),
        ("replay_on_crash", 1, "true or false"),
        ("report_cached_tokens", "no", "true or false"),
        ("tool_call_parser", "pythonic", "unset or one of auto, hermes, llama3_json, mistral, openai"),
        ("reasoning_parser", 1, "unset or one of auto, deepseek_r1, qwen3, openai_gptoss"),
        ("step_timeout_s", 0, "a number of seconds above 0"),
        ("stream_interval", 0, "an integer of at least 1"),
        ("stream_interval_ms", -0.1, "from 0 to 1000"),
        ("stream_interval_ms", float("inf"), "from 0 to 1000"),
    ],
)
def test_bad_value_names_field_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        EngineConfig.from_settings({"model": "/m", name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r}; it must be ")
    assert allowed in message


@pytest.mark.parametrize(
    ("others", "allowed"),
    [
        ({"device": "cpu"}, "unset with device='cpu'"),
        ({"distributed_executor_backend": "ray"}, "unset with distributed_executor_backend='ray'"),
        ({"tensor_parallel_size": 2}, "of 2, one for each rank"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "of 4, one for each rank"),
    ],
)
def test_gpus_that_do_not_go_with_the_ranks_are_refused(others: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ValueError, match=r"^gpu_device_ids is \[3\]; it must be ") as error:
        EngineConfig.from_settings({"model": "/m", "gpu_device_ids": [3], **others})
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"distributed_executor_backend": "ray"}, r"^distributed_executor_backend is 'ray'; .*'uni' or 'mp'"),
        ({"gpu_device_ids": [0, 1]}, r"^gpu_device_ids is \[0, 1\]; it must be of 4, one for each rank"),
    ],
)
def test_what_replicas_cannot_do_is_refused(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_settings({"model": "/m", "data_parallel_size": 2, "tensor_parallel_size": 2, **others})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"data_parallel_size_local": 1, "data_parallel_address": "h", "data_parallel_rpc_port": 1,
             "data_parallel_key_file": "k"},
            "data_parallel_size_local is 1; it must be unset",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; it must be 1 with .*use tensor_parallel_size"),
        ({"enable_eplb": True}, "enable_eplb is True; it must be false with .*one replica alone"),
        ({"device": "cuda"}, "device is 'cuda'; it must be 'cpu' with"),
        ({"gpu_device_ids": [0, 1, 2, 3]}, r"gpu_device_ids is \[0, 1, 2, 3\]; it must be unset with"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend is 'ray'; it must be 'uni' or 'mp'"),
        ({"async_scheduling": True}, "async_scheduling is True; it must be unset with"),
        (
            {"kv_transfer_config": {"kv_connector": "SharedStorageConnector",
                                    "kv_connector_extra_config": {"shared_storage_path": "/x"}}},
            "kv_transfer_config is KVTransferConfig.*; it must be unset with",
        ),
        ({"disaggregation": {"prefill": 1, "decode": 1}}, "disaggregation is .*; it must be unset with .*no roles"),
    ],
)  # fmt: skip
def test_what_replicas_that_share_experts_cannot_do_is_refused(others: dict[str, Any], message: str) -> None:
    settings = {"model": "/m", "data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    assert EngineConfig.from_settings(settings).parallel.is_lockstep
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineConfig.from_settings({**settings, **others})


@pytest.mark.parametrize(("size", "wanted"), [(1, 2), (2, 1), (2, 3)])
def test_the_number_of_replicas_that_share_experts_stays(size: int, wanted: int) -> None:
    config = EngineConfig.from_settings(
        {"model": "/m", "data_parallel_size": size, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    )
    with pytest.raises(ValueError, match=r"^enable_expert_parallel is True .*change data_parallel_size in model.json"):
        config.for_replica(0, wanted)
    assert config.for_replica(0, size).parallel.data_parallel_size == size


def test_each_replica_knows_its_place_and_no_file_says_it() -> None:
    config = EngineConfig.from_settings({"model": "/m", "data_parallel_size": 2, "tensor_parallel_size": 2})
    second = config.for_replica(1)
    assert second.core.parallel.data_parallel_rank == 1
    assert second.parallel.num_all_ranks == 4
    assert config.settings()["data_parallel_size"] == 2
    assert "data_parallel_rank" not in config.settings()
    with pytest.raises(ValueError, match="data_parallel_rank is 1"):
        EngineConfig.from_settings({"model": "/m", "data_parallel_rank": 1})


HOSTS = {
    "data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_address": "10.0.0.1",
    "data_parallel_rpc_port": 29550, "data_parallel_key_file": "keys.json",
}  # fmt: skip


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"data_parallel_size_local": 5}, "data_parallel_size_local is 5; .*from 1 to 4"),
        ({"data_parallel_size_local": None}, "data_parallel_address is '10.0.0.1'; .*unset where all of "),
        ({"data_parallel_address": None}, "data_parallel_address is None; .*an address of the front's host with"),
        ({"data_parallel_rpc_port": 70000}, "data_parallel_rpc_port is 70000; .*a port from 1 to 65535"),
        ({"data_parallel_key_file": None}, "data_parallel_key_file is None; .*the path of a file"),
        ({"gpu_device_ids": [0, 1]}, "gpu_device_ids is .*of 1, one for each rank"),
    ],
)
def test_replicas_on_other_hosts_need_all_that_lets_them_join(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_settings({"model": "/m", **HOSTS, **others})


def test_a_host_without_a_front_knows_its_ranks_and_its_share(tmp_path: Path) -> None:
    front = EngineConfig.from_settings({"model": "/m", **HOSTS, "tensor_parallel_size": 2}, tmp_path)
    assert front.parallel.data_parallel_key_file == str(tmp_path / "keys.json")
    assert front.parallel.num_all_ranks == 2
    host = front.for_headless(2, data_parallel_size_local=2)
    assert host.parallel.num_all_ranks == 4
    assert host.for_replica(3).parallel.data_parallel_rank == 3
    for rank, size in ((0, 1), (3, 2), (4, 1)):
        with pytest.raises(ValueError, match=f"data_parallel_start_rank is {rank}; it must be from 1 to {4 - size}"):
            front.for_headless(rank, data_parallel_size_local=size)
    with pytest.raises(ValueError, match="data_parallel_size_local is 1; it must be less than data_parallel_size=1"):
        EngineConfig.from_settings({"model": "/m"}).for_headless(1, data_parallel_size_local=1)


def test_replicas_that_are_added_to_the_front_have_ranks_behind_those_of_other_hosts() -> None:
    front = EngineConfig.from_settings({"model": "/m", **HOSTS, "data_parallel_size_local": 2})
    assert [front.parallel.local_rank(number) for number in range(4)] == [0, 1, 4, 5]
    fourth = front.for_replica(5, 4).parallel
    assert (fourth.data_parallel_rank, fourth.data_parallel_rank - fourth.data_parallel_start_rank) == (5, 3)
    assert fourth.num_all_ranks == 4, "it has a share of four in this host"
    assert front.for_replica(0, 1).parallel.num_all_ranks == 1
    with pytest.raises(ValueError, match="data_parallel_size is 67; it must be an integer from 1 to 64"):
        front.for_replica(0, 65)


def test_other_hosts_may_have_ranks_that_nobody_misses(tmp_path: Path) -> None:
    settings = {**HOSTS, "data_parallel_size": 1, "data_parallel_size_local": None}
    config = EngineConfig.from_settings({"model": "/m", **settings, "data_parallel_max_size": 4})
    assert (config.parallel.remote_ranks, config.parallel.num_all_ranks) == (range(1, 4), 1)
    assert config.parallel.routes_by_prefix, "an engine that is alone at first tells what it has cached, too"
    host = config.for_headless(2, data_parallel_size_local=2)
    assert host.for_replica(3).parallel.num_all_ranks == 2
    with pytest.raises(ValueError, match=r"it must be from 1 to 2 for 2 of data_parallel_max_size=4 replicas"):
        config.for_headless(3, data_parallel_size_local=2)
    with pytest.raises(ValueError, match="data_parallel_max_size is 1; it must be an integer from 2 to 64"):
        EngineConfig.from_settings({"model": "/m", "data_parallel_size": 2, "data_parallel_max_size": 1})
    with pytest.raises(ValueError, match=r"data_parallel_address is None; .* 1 of 4 replicas on this host"):
        EngineConfig.from_settings({"model": "/m", "data_parallel_max_size": 4})
    with pytest.raises(ValueError, match="data_parallel_max_size is 2; LLM runs one engine in its own process"):
        LLM("/m", **{**settings, "data_parallel_max_size": 2})


TRANSFER = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}


def remote_store(address: str) -> dict[str, Any]:
    return {
        "kv_connector": "RemoteStorageConnector",
        "kv_connector_extra_config": {"address": address, "key_file": "k"},
    }


ROLES_ON_HOSTS = {
    **HOSTS, "model": "/m", "data_parallel_size": 1, "disaggregation": {"prefill": 1, "decode": 2},
    "kv_transfer_config": remote_store("10.0.0.5:29600"),
}  # fmt: skip


def test_roles_may_be_on_several_hosts_that_reach_the_same_blocks() -> None:
    config = EngineConfig.from_settings(ROLES_ON_HOSTS)
    assert (config.parallel.data_parallel_size, config.parallel.remote_ranks) == (3, range(1, 3))
    assert config.for_headless(1, 2).parallel.disaggregation == DisaggregationConfig(prefill=1, decode=2)
    with pytest.raises(ValueError, match="data_parallel_size is 4; it must be unset or 3 with disaggregation"):
        config.for_replica(3, 2)
    for own in (TRANSFER, remote_store("store:29600")):
        EngineConfig.from_settings({**ROLES_ON_HOSTS, "kv_transfer_config": own})
    for address in ("127.0.0.1", "[::1]", "localhost"):
        here = {"data_parallel_address": "127.0.0.1", "kv_transfer_config": remote_store(f"{address}:29600")}
        EngineConfig.from_settings({**ROLES_ON_HOSTS, **here})
        with pytest.raises(ValueError, match=r"address is .*:29600'; it must be an address that all of them reach .*"
                           "--listen"):  # fmt: skip
            EngineConfig.from_settings({**ROLES_ON_HOSTS, "kv_transfer_config": here["kv_transfer_config"]})
    memory = {**TRANSFER, "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/kv"}}
    with pytest.raises(ValueError, match=r"a folder that all hosts have mounted .* quire kv-store"):
        EngineConfig.from_settings({**ROLES_ON_HOSTS, "kv_transfer_config": memory})


def test_roles_of_replicas_are_counted() -> None:
    settings = {"model": "/m", "disaggregation": {"prefill": 2, "decode": 3}, "kv_transfer_config": TRANSFER}
    config = EngineConfig.from_settings(settings)
    assert config.parallel.data_parallel_size == 5
    assert config.parallel.disaggregation == DisaggregationConfig(prefill=2, decode=3)
    assert EngineConfig.from_settings({**settings, "data_parallel_size": 5}) == config
    assert config.for_replica(4).parallel.data_parallel_size == 5
    with pytest.raises(ValueError, match="data_parallel_size is 1; it must be unset or 5"):
        dataclasses.replace(config.parallel, data_parallel_size=1)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"disaggregation": 2}, r"disaggregation is 2; .*an object, such as"),
        ({"disaggregation": {"prefill": 1}}, r"disaggregation is \{'prefill': 1\}; .*prefill and decode, both"),
        ({"disaggregation": {"prefill": 0, "decode": 1}}, "disaggregation: prefill is 0; .*at least 1"),
        ({"data_parallel_size": 3}, "data_parallel_size is 3; .*unset or 2 with disaggregation"),
        ({"kv_transfer_config": None, "enable_prefix_caching": False}, "enable_prefix_caching is False"),
        ({"kv_transfer_config": {**TRANSFER, "kv_role": "kv_producer"}}, "kv_transfer_config is 'kv_producer'"),
    ],
)
def test_roles_that_cannot_work_are_refused(others: dict[str, Any], message: str) -> None:
    settings = {"model": "/m", "disaggregation": {"prefill": 1, "decode": 1}, "kv_transfer_config": TRANSFER}
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_settings({**settings, **others})


def test_roles_share_memory_unless_something_else_is_said() -> None:
    settings = {"model": "/m", "disaggregation": {"prefill": 1, "decode": 1}}
    transfer = EngineConfig.from_settings(settings).cache.kv_transfer_config
    assert transfer is not None
    assert (transfer.kv_connector, transfer.memory is None) == ("SharedMemoryConnector", False)
    assert EngineConfig.from_settings({"model": "/m"}).cache.kv_transfer_config is None


MEMORY = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"max_bytes": 1 << 30}}


def test_several_connectors_are_asked_in_their_order() -> None:
    extra = {"connectors": [MEMORY, {**TRANSFER, "kv_ip": "127.0.0.1"}], "load_timeout_s": 3}
    transfer = KVTransferConfig.from_value({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra})
    assert [tier.tier for tier in transfer.tiers] == ["memory", "files"]
    assert transfer.memory is not None
    assert transfer.memory.max_bytes == 1 << 30
    assert transfer.kv_connector_extra_config.load_timeout_s == 3
    assert [tier.tier for tier in KVTransferConfig.from_value(TRANSFER).tiers] == ["files"]
    decoded = msgspec.json.decode(msgspec.json.encode(transfer), type=KVTransferConfig)
    assert decoded == transfer
    relative = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "kv"}}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [MEMORY, relative]}}
    config = EngineConfig.from_settings({"model": "m", "kv_transfer_config": outer}, Path("/base"))
    assert config.cache.kv_transfer_config is not None
    assert config.cache.kv_transfer_config.tiers[1].kv_connector_extra_config.shared_storage_path == "/base/kv"


@pytest.mark.parametrize(
    ("connectors", "message"),
    [
        (None, "connectors is None; it must be a list of at least two objects"),
        ([MEMORY], "connectors is .*at least two"),
        ([MEMORY, MEMORY], "connectors is 'SharedMemoryConnector'; it must be each connector once"),
        ([MEMORY, {**TRANSFER, "kv_role": "kv_both"}], "kv_role and all else is said once"),
        ([MEMORY, {"kv_connector": "SharedStorageConnector"}], "shared_storage_path is None"),
        ([MEMORY, {"kv_connector": "MultiConnector"}], "kv_connector is 'MultiConnector'; it must be one of Shared"),
        (
            [TRANSFER, {**MEMORY, "kv_connector_extra_config": {"staging_bytes": 1}}],
            "of SharedMemoryConnector is .*staging_bytes.*of max_bytes",
        ),
    ],
)
def test_several_connectors_that_make_no_sense_are_refused(connectors: Any, message: str) -> None:
    extra = {} if connectors is None else {"connectors": connectors}
    with pytest.raises(ValueError, match=message):
        KVTransferConfig.from_value({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"cpu_bytes_to_use": 1 << 30}, r"of SharedMemoryConnector is \{'cpu_bytes_to_use'.*of max_bytes"),
        ({"shared_storage_path": "/kv"}, "of max_bytes, staging_bytes, load_timeout_s"),
    ],
)
def test_memory_with_settings_that_it_does_not_have_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVTransferConfig.from_value({"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": extra})


def test_no_file_says_where_memory_is() -> None:
    with pytest.raises(ValueError, match="unknown setting 'kv_memory'"):
        EngineConfig.from_settings({"model": "/m", "kv_memory": 3})
    assert "kv_memory" not in EngineConfig.from_settings({"model": "/m"}).settings()


def test_halves_of_gpt_oss_s_format_go_together() -> None:
    with pytest.raises(ValueError, match=r"tool_call_parser is 'openai' with reasoning_parser='auto'"):
        EngineConfig.from_settings({"model": "/m", "tool_call_parser": "openai"})
    settings = {"model": "/m", "tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    assert EngineConfig.from_settings(settings).frontend.tool_call_parser == "openai"
    assert EngineConfig.from_settings({"model": "/m", "tool_call_parser": None}).frontend.tool_call_parser is None


def test_devices_reach_other_processes() -> None:
    settings = {"model": "/m", "device": "cuda", "gpu_device_ids": [3, 1], "tensor_parallel_size": 2}
    config = EngineConfig.from_settings(settings)
    assert (config.parallel.device, config.parallel.gpu_device_ids) == ("cuda", [3, 1])
    assert config.settings().items() >= settings.items()
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("block_size", 1024),
        ("gpu_memory_utilization", 1),
        ("max_model_len", 1),
        ("max_num_batched_tokens", 1),
        ("seed", 0),
        ("stream_interval_ms", 1000),
    ],
)
def test_values_at_the_edge_are_allowed(name: str, value: Any) -> None:
    config = EngineConfig.from_settings({"model": "/m", name: value})
    groups = (config.model, config.cache, config.scheduler, config.frontend)
    assert [getattr(group, name) for group in groups if hasattr(group, name)] == [value]


@pytest.mark.parametrize(
    ("wanted", "num_stages", "on_cpu", "on_gpu"),
    [(None, 1, False, True), (True, 1, True, True), (False, 1, False, False), (None, 2, False, False)],
)
def test_async_scheduling_is_on_where_it_is_wanted_or_of_use(
    wanted: bool | None, num_stages: int, on_cpu: bool, on_gpu: bool
) -> None:
    config = EngineConfig.from_settings(
        {"model": "/m", "async_scheduling": wanted, "pipeline_parallel_size": num_stages}
    )
    assert [config.async_scheduling(uses_gpu) for uses_gpu in (False, True)] == [on_cpu, on_gpu]


def test_async_scheduling_of_a_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"async_scheduling is True with pipeline_parallel_size=2, .* unset$"):
        EngineConfig.from_settings({"model": "/m", "async_scheduling": True, "pipeline_parallel_size": 2})
    EngineConfig.from_settings({"model": "/m", "async_scheduling": False, "pipeline_parallel_size": 2})


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("blocksize", "block_size"),
        ("Model", "model"),
        ("max_model_length", "max_model_len"),
    ],
)
def test_unknown_setting_names_the_nearest_known_one(unknown: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown setting '{unknown}'; did you mean '{nearest}'\\?$"):
        EngineConfig.from_settings({"model": "/m", unknown: 1})


def test_a_removed_setting_is_rejected_with_what_holds_instead() -> None:
    with pytest.raises(ValueError, match=r"^the setting 'max_response_bytes' was removed: an answer may have 256 MiB"):
        EngineConfig.from_settings({"model": "/m", "max_response_bytes": 1 << 20})


def test_unknown_setting_with_nothing_near_lists_all_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown setting 'zzz'; known are ") as error:
        EngineConfig.from_settings({"model": "/m", "zzz": 1})
    assert all(name in str(error.value) for name in setting_names())


def test_missing_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model is missing; it must be the path of a checkpoint folder$"):
        EngineConfig.from_settings({"block_size": 16})


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
@pytest.mark.parametrize("name", ["model", "tokenizer", "generation_config", "data_parallel_key_file"])
def test_what_can_be_no_path_is_named(name: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a path: "):
        EngineConfig.from_settings({"model": "weights", name: path}, base_dir=tmp_path)


def test_relative_paths_are_relative_to_the_base_folder(tmp_path: Path) -> None:
    config = EngineConfig.from_settings({"model": "../weights", "tokenizer": "tok"}, base_dir=tmp_path / "1")
    assert config.model.model == str(tmp_path.resolve() / "weights")
    assert config.model.tokenizer == str(tmp_path.resolve() / "1" / "tok")
    assert config.model.tokenizer_path == config.model.tokenizer


def test_absolute_paths_do_not_care_for_the_base_folder(tmp_path: Path) -> None:
    config = EngineConfig.from_settings({"model": "/weights"}, base_dir=tmp_path)
    assert config.model.model == str(Path("/weights").resolve())


def test_relative_paths_without_base_folder_stay_as_they_are() -> None:
    config = EngineConfig.from_settings({"model": "weights"})
    assert config.model.model == "weights"
    assert config.model.tokenizer is None
    assert config.model.tokenizer_path == "weights"


def test_bad_model_path_is_refused_with_a_base_folder_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model is ''"):
        EngineConfig.from_settings({"model": ""}, base_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^model is 5"):
        EngineConfig.from_settings({"model": 5}, base_dir=tmp_path)


def test_settings_given_are_not_changed(tmp_path: Path) -> None:
    settings = {"model": "m"}
    EngineConfig.from_settings(settings, base_dir=tmp_path)
    assert settings == {"model": "m"}


def test_config_is_frozen() -> None:
    config = EngineConfig.from_settings({"model": "/m"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 32  # type: ignore[misc]


def test_no_setting_stands_in_two_groups() -> None:
    assert len(set(setting_names())) == len(setting_names())
