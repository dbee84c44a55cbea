"""vLLM's names in `model.json`: taken where they ask for nothing, refused by name where for something."""

import logging
from typing import Any

import pytest
from quire_engine.config import EngineConfig, vllm_settings
from quire_engine.config.engine_config import setting_names

DEFAULTS: dict[str, Any] = {
    "served_model_name": None, "task": "auto", "skip_tokenizer_init": False, "tokenizer_mode": "auto",
    "trust_remote_code": False, "allowed_local_media_path": "", "download_dir": None, "load_format": "auto",
    "config_format": "auto", "dtype": "auto", "kv_cache_dtype": "auto", "seed": 0, "max_model_len": None,
    "distributed_executor_backend": None, "pipeline_parallel_size": 1, "tensor_parallel_size": 1,
    "max_parallel_loading_workers": None, "block_size": None, "enable_prefix_caching": None,
    "disable_sliding_window": False, "use_v2_block_manager": True, "swap_space": 4, "cpu_offload_gb": 0,
    "gpu_memory_utilization": 0.9, "max_num_batched_tokens": None, "max_num_seqs": None, "max_logprobs": 20,
    "revision": None, "code_revision": None, "rope_scaling": None, "rope_theta": None, "hf_overrides": None,
    "tokenizer_revision": None, "quantization": None, "enforce_eager": None, "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False, "tokenizer_pool_size": 0, "tokenizer_pool_type": "ray",
    "tokenizer_pool_extra_config": None, "limit_mm_per_prompt": None, "mm_processor_kwargs": None,
    "disable_mm_preprocessor_cache": False, "enable_lora": False, "enable_lora_bias": False, "max_loras": 1,
    "max_lora_rank": 16, "enable_prompt_adapter": False, "max_prompt_adapters": 1, "max_prompt_adapter_token": 0,
    "fully_sharded_loras": False, "lora_extra_vocab_size": 256, "long_lora_scaling_factors": None,
    "lora_dtype": "auto", "max_cpu_loras": None, "device": "auto", "num_scheduler_steps": 1,
    "multi_step_stream_outputs": True, "ray_workers_use_nsight": False, "num_gpu_blocks_override": None,
    "num_lookahead_slots": 0, "model_loader_extra_config": None, "ignore_patterns": None, "preemption_mode": None,
    "scheduler_delay_factor": 0.0, "enable_chunked_prefill": None, "guided_decoding_backend": "xgrammar",
    "logits_processor_pattern": None, "speculative_model": None, "num_speculative_tokens": None,
    "speculative_disable_mqa_scorer": False, "spec_decoding_acceptance_method": "rejection_sampler",
    "otlp_traces_endpoint": None, "collect_detailed_traces": None, "disable_async_output_proc": False,
    "scheduling_policy": "fcfs", "override_neuron_config": None, "override_pooler_config": None,
    "compilation_config": None, "worker_cls": "auto", "kv_transfer_config": None, "generation_config": None,
    "override_generation_config": None, "enable_sleep_mode": False, "model_impl": "auto",
    "calculate_kv_scales": None, "disable_log_requests": False,
    # Of later versions.
    "runner": "auto", "convert": "auto", "hf_token": None, "logprobs_mode": "raw_logprobs", "enable_eplb": False,
    "data_parallel_size": 1, "data_parallel_rank": None, "nnodes": 1, "node_rank": 0,
    "decode_context_parallel_size": 1, "enable_prompt_embeds": False, "kv_sharing_fast_prefill": False,
    "async_scheduling": None, "stream_interval": 1, "structured_outputs_config": {"backend": "auto"},
    "speculative_config": None, "worker_extension_cls": "", "additional_config": {},
    "prefix_caching_hash_algo": "sha256", "max_num_partial_prefills": 1, "long_prefill_token_threshold": 0,
    "logits_processors": None, "enable_log_requests": False, "kv_cache_memory_bytes": None,
}  # fmt: skip
"""EngineArgs and AsyncEngineArgs of vLLM 0.7 to 0.14, at their defaults."""

ASKS_FOR_NOTHING: dict[str, Any] = {
    "swap_space": 0, "served_model_name": ["a", "b"], "disable_log_requests": True, "enable_chunked_prefill": True,
    "trust_remote_code": "False", "hf_token": "a secret", "hf_overrides": {},
    "task": "generate", "cpu_offload_gb": 0.0, "enable_sleep_mode": True, "max_seq_len_to_capture": 2048,
}  # fmt: skip


def test_defaults_of_vllm_change_nothing() -> None:
    assert EngineConfig.from_settings({"model": "/m", **DEFAULTS}) == EngineConfig.from_settings({"model": "/m"})


def test_what_asks_for_nothing_is_passed_over_with_one_line_in_the_log(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        config = EngineConfig.from_settings({"model": "/m", **ASKS_FOR_NOTHING})
    assert config == EngineConfig.from_settings({"model": "/m"})
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in ASKS_FOR_NOTHING)
    assert "a secret" not in record.getMessage()


def test_adapters_have_vllms_names_and_its_words() -> None:
    """Without adapters their bounds change nothing, whatever they are."""
    bounds = {"max_loras": 1, "max_lora_rank": 512, "max_cpu_loras": None}
    plain = EngineConfig.from_settings({"model": "/m"})
    assert EngineConfig.from_settings({"model": "/m", "enable_lora": "false", **bounds}) == plain
    own = EngineConfig.from_settings({"model": "/m", "enable_lora": "true", "max_loras": 3, "max_cpu_loras": None}).lora
    assert (own.enable_lora, own.max_loras, own.num_ready) == (True, 3, 6)
    for name, value in {"max_lora_rank": 512, "max_cpu_loras": 1, "max_loras": 0, "lora_modules": ["a"]}.items():
        with pytest.raises(ValueError, match=f"^{name} is "):
            EngineConfig.from_settings({"model": "/m", "enable_lora": True, name: value})
    for settings in ({"enable_lora": "yes"}, {"lora_modules": {"a": "/a"}}):
        with pytest.raises(ValueError, match="enable_lora"):
            EngineConfig.from_settings({"model": "/m", **settings})


@pytest.mark.parametrize(("name", "value"), [("task", "embed"), ("runner", "pooling"), ("convert", "classify")])
def test_a_task_may_be_named_which_the_checkpoint_has_anyway(name: str, value: str) -> None:
    assert EngineConfig.from_settings({"model": "/m", name: value}) == EngineConfig.from_settings({"model": "/m"})


def test_nothing_is_logged_of_settings_of_ours(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        EngineConfig.from_settings({"model": "/m", "max_num_seqs": 4})
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("trust_remote_code", True, "a checkpoint's own code is never run; leave it out, or false"),
        ("enable_chunked_prefill", False, "max_num_batched_tokens"),
        ("tokenizer_mode", "slow", "leave it out, or 'auto'"),
        ("prefix_caching_hash_algo", "builtin", "blocks are hashed with SHA-256; leave it out, or 'sha256'"),
        ("num_gpu_blocks_override", 100, "kv_cache_memory_bytes"),
        ("revision", "main", "model is a folder"),
        ("cpu_offload_gb", 4, "leave it out, or 0"),
        ("max_logprobs", 50, "20 is the most"),
        ("speculative_model", "x", "leave it out"),
        ("num_scheduler_steps", True, "leave it out, or 1"),
        ("task", "transcription", "'auto' or 'generate' or 'embed'"),
        ("runner", "draft", "'auto' or 'generate' or 'pooling'"),
        ("rope_scaling", {"type": "linear"}, "config.json"),
    ],
)
def test_what_asks_for_what_there_is_not_is_refused_by_name(name: str, value: Any, mend: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        EngineConfig.from_settings({"model": "/m", name: value})
    assert mend in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "bfloat16", "bfloat16"),
        ("load_format", "safetensors", "auto"),
        ("model_impl", "vllm", "quire"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("reasoning_parser", "", "auto"),
    ],
)
def test_values_that_are_called_otherwise_here(name: str, value: str, ours: str) -> None:
    assert EngineConfig.from_settings({"model": "/m", name: value}).settings()[name] == ours


def test_no_name_is_passed_over_that_is_a_setting() -> None:
    names = vllm_settings._ANY_VALUE | vllm_settings._NEUTRAL_VALUES.keys()
    assert not names & set(setting_names())
    assert not vllm_settings._ANY_VALUE & vllm_settings._NEUTRAL_VALUES.keys()
    assert vllm_settings._REMEDIES.keys() <= vllm_settings._NEUTRAL_VALUES.keys()
