"""vLLM's names in `model.json` that are no settings here: the values that change nothing, and what replaces others.

Users of vllm_backend keep their file. A name whose value would change nothing in this engine is ignored, with one line
in the log; a value that needs a missing feature is rejected by name.
"""

import logging
from collections.abc import Mapping
from typing import Any

from quire_engine.errors import quote

logger = logging.getLogger(__name__)

_ANY_VALUE = frozenset((
    # How vLLM downloads and reads files; here they are mapped from the folder that `model` names.
    "download_dir", "hf_token", "ignore_patterns", "safetensors_load_strategy", "pt_load_map_location",
    "max_parallel_loading_workers", "use_tqdm_on_load",
    # What the server is called, and how much it logs. In Triton the name is that of the model's folder.
    "served_model_name", "disable_log_requests", "max_log_len", "aggregate_engine_logging", "shutdown_timeout",
    # Preemption here is by recompute, and swaps nothing.
    "swap_space", "use_v2_block_manager",
    # Switches of vLLM's own kernels, processes and graphs, which change no answer.
    "disable_custom_all_reduce", "max_seq_len_to_capture", "max_context_len_to_capture", "cuda_graph_sizes",
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "disable_cascade_attn",
    "disable_async_output_proc", "multi_step_stream_outputs",
    "tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config",
    "intial_incremental_detokenization_offset", "optimization_level", "performance_mode",
    "enable_flashinfer_autotune",
    # Bounds of prompt adapters, images and speculation, which other names switch on; what LoRA adapters do not need.
    "lora_dtype", "lora_extra_vocab_size", "long_lora_scaling_factors",
    "fully_sharded_loras", "max_prompt_adapters", "max_prompt_adapter_token",
    "mm_processor_kwargs", "media_io_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode", "disable_mm_preprocessor_cache",
    "disable_chunked_mm_input", "skip_mm_profiling", "interleave_mm_strings", "language_model_only",
    "speculative_disable_mqa_scorer", "speculative_disable_by_batch_size", "spec_decoding_acceptance_method",
    # Of experts, copies and nodes, where there are none.
    "all2all_backend", "moe_backend", "expert_placement_strategy", "eplb_log_balancedness",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold",
    "data_parallel_backend", "master_addr", "master_port", "distributed_timeout_seconds",
    "disable_nccl_for_dp_synchronization", "kv_offloading_backend",
))  # fmt: skip
"""Names that may have any value."""

_NOT_OFFERED = (
    "code_revision", "tokenizer_revision", "hf_config_path", "hf_overrides", "model_weights",
    "rope_scaling", "rope_theta", "model_loader_extra_config", "quantization_param_path",
    "qlora_adapter_name_or_path", "allowed_local_media_path", "allowed_media_domains", "num_gpu_blocks_override",
    "kv_offloading_size", "kv_events_config", "ec_transfer_config", "weight_transfer_config",
    "speculative_model", "num_speculative_tokens", "speculative_max_model_len",
    "ngram_prompt_lookup_max", "ngram_prompt_lookup_min", "speculative_model_quantization",
    "speculative_draft_tensor_parallel_size", "disable_logprobs_during_spec_decoding", "otlp_traces_endpoint",
    "collect_detailed_traces", "show_hidden_metrics_for_version", "logits_processors", "logits_processor_pattern",
    "override_neuron_config", "override_pooler_config", "pooler_config",
    "additional_config", "attention_config", "attention_backend", "kernel_config", "profiler_config",
    "reasoning_parser_plugin", "scheduler_cls", "worker_extension_cls", "io_processor_plugin", "eplb_window_size",
    "eplb_step_interval",
    "data_parallel_rank", "data_parallel_start_rank", "mamba_block_size", "default_mm_loras",
)  # fmt: skip
"""Names whose only neutral value is an empty one."""

_FALSE = (
    "trust_remote_code", "skip_tokenizer_init", "enable_log_requests", "disable_sliding_window",
    "enable_lora_bias", "enable_prompt_adapter", "enable_prompt_embeds", "enable_mm_embeds", "calculate_kv_scales",
    "kv_sharing_fast_prefill", "ray_workers_use_nsight", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "enable_dbo", "kv_cache_metrics", "cudagraph_metrics",
    "enable_mfu_metrics", "enable_layerwise_nvtx_tracing", "enable_logging_iteration_details", "tokens_only",
)  # fmt: skip
"""Names whose neutral value is false."""

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # What a checkpoint is for is read from its files, and every task of it is served.
    "task": ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "tokenizer_mode": ("auto",),
    "config_format": ("auto", "hf"),
    "enable_chunked_prefill": (True,),
    "enable_sleep_mode": (False, True),
    "cpu_offload_gb": (0,),
    "preemption_mode": ("recompute",),
    "max_logprobs": (20,),
    "logprobs_mode": ("raw_logprobs",),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "structured_outputs_config": ({"backend": "auto"}, {"backend": "xgrammar"}),
    "num_scheduler_steps": (1,),
    "scheduler_delay_factor": (0,),
    "num_lookahead_slots": (0,),
    "max_num_partial_prefills": (1,),
    "max_long_partial_prefills": (1,),
    "worker_cls": ("auto",),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "prefix_caching_hash_algo": ("sha256",),
    "nnodes": (1,),
    "node_rank": (0,),
    "num_redundant_experts": (0,),
    "compilation_config": (0, {"level": 0}),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    **dict.fromkeys(_FALSE, (False,)),
    **dict.fromkeys(_NOT_OFFERED, ()),
}
"""Name → its neutral values. Null, an empty string, object and list are neutral for each."""

_REMEDIES = {
    **dict.fromkeys(("trust_remote_code", "code_revision"), "a checkpoint's own code is never run"),
    "enable_chunked_prefill": "prompts are computed in pieces of at most max_num_batched_tokens; with as many as "
    "max_model_len, each is one piece",
    "num_gpu_blocks_override": "kv_cache_memory_bytes says how large the KV cache is",
    "otlp_traces_endpoint": "otlp_endpoint takes metrics and traces",
    "prefix_caching_hash_algo": "blocks are hashed with SHA-256",
    **dict.fromkeys(
        ("max_num_partial_prefills", "max_long_partial_prefills"),
        "one prompt at a time is computed in chunks, and prompts that fit a step overtake the others",
    ),
    **dict.fromkeys(("eplb_window_size", "eplb_step_interval", "num_redundant_experts"), "eplb_config has it"),
    "tokenizer_revision": "tokenizer is a folder, which is there in one version",
    **dict.fromkeys(
        ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
        "speculative_config says how tokens are drafted",
    ),
    "rope_scaling": "it is read from the checkpoint's config.json",
    "rope_theta": "it is read from the checkpoint's config.json",
    "hf_overrides": "change the checkpoint's config.json",
    "kv_offloading_size": "kv_transfer_config keeps blocks in memory and in files",
    "max_logprobs": "20 is the most that a request may ask for",
    "guided_decoding_backend": "grammars are compiled by xgrammar",
    "structured_outputs_config": "grammars are compiled by xgrammar",
}
"""What to do instead, where leaving the name out is not enough."""

_SAME_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
    "model_impl": {"vllm": "quire"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "reasoning_parser": {"": "auto"},
}
"""vLLM's values → their names here."""

_OPTIONAL = (
    "block_size",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
    "generation_config",
    "max_loras",
    "max_lora_rank",
    "enable_lora",
    "lora_modules",
    "model_impl",
    "override_generation_config",
    "seed",
)
"""Settings with a default that null leaves unset, as in vLLM."""


def without_vllm_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of this engine, without vLLM's that change nothing.

    Raises:
        ValueError: one of them needs a missing feature; the message names it, and what to do.
    """
    own: dict[str, Any] = {}
    ignored = []
    for name, value in settings.items():
        if name in _ANY_VALUE:
            ignored.append(name)
        elif name in _NEUTRAL_VALUES:
            _check(name, value, _NEUTRAL_VALUES[name])
            ignored.append(name)
        elif value is not None or name not in _OPTIONAL:
            same = _SAME_VALUES.get(name, {})
            own[name] = same.get(value, value) if isinstance(value, str) else value
    if ignored:
        logger.info("vLLM's settings that change nothing here: %s", ", ".join(ignored))
    return own


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    said = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    if said in (None, "", {}, []) and not isinstance(said, bool | int | float):
        return
    if any(said == item and isinstance(said, bool) == isinstance(item, bool) for item in allowed):
        return
    remedy = _REMEDIES.get(name, "there is nothing of the kind here")
    values = " or ".join(quote(item) for item in allowed)
    leave = f"leave it out{', or ' + values if values else ''}"
    raise ValueError(f"{name} is {quote(value)}, a setting of vLLM's that is not offered: {remedy}; {leave}")
