"""The compute ops of the engine: one kind of op per file, one signature for every device.

This package knows only tensors: no request, no model, no scheduler. The tensors' device decides whether an op computes
in the Triton language, in C++ or in plain torch (`cpu.uses_triton`). Shape suffixes, used throughout:

    T  tokens of the flattened batch          S  sequences of the batch
    H  query heads      K  key/value heads    D  head size
    N  KV blocks        B  tokens per block   M  blocks per sequence, at most
    E  hidden size      V  vocabulary size
    X  experts
"""

from quire_kernels.activation import activate_and_mul, gelu_tanh_and_mul, scale_rows, silu_and_mul, xielu
from quire_kernels.attention import paged_attention, plan_attention, standing_plan
from quire_kernels.attention_plan import AttentionPlan, StandingPlan
from quire_kernels.causal_conv import causal_conv
from quire_kernels.drafts import DraftState, advance_drafts
from quire_kernels.embedding import embedding
from quire_kernels.experts import (
    ExpertsLora,
    ExpertsWeight,
    combine_experts,
    expert_results,
    pack_experts,
    routed_experts,
    sum_results,
)
from quire_kernels.grouped import GroupedCodes, pack_grouped, quantize_grouped
from quire_kernels.kv_cache import PageConverter
from quire_kernels.layernorm import add_layer_norm, add_residual, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from quire_kernels.linear import (
    HeadLinearWeight,
    LinearWeight,
    head_linear,
    linear,
    pack_head_linear,
    pack_linear,
    stack_linear,
    weight_rows,
)
from quire_kernels.logits import apply_token_bitmask, soft_cap, token_probabilities
from quire_kernels.lora import LoraRows, LoraSlot, LoraTable, LoraWeight, lora_sizes, pack_lora, rescale_lora
from quire_kernels.recording import NotRecordableError, Recording, record
from quire_kernels.recurrence import gated_delta_rule, rg_lru, selective_scan, state_space
from quire_kernels.rope import rope_and_cache
from quire_kernels.routing import grouped_topk, topk_softmax
from quire_kernels.sampling import argmax, probabilities, sample
from quire_kernels.shared_blocks import SharedBlocks
from quire_kernels.states import StateRows
from quire_kernels.store import load_rows, store_columns, store_rows
from quire_kernels.streams import gaussian_topk, match_rms, mix_streams, row_moments
from quire_kernels.sum_rows import sum_rows

__all__ = [
    "AttentionPlan", "DraftState", "ExpertsLora", "ExpertsWeight", "GroupedCodes", "HeadLinearWeight", "LinearWeight",
    "LoraRows", "LoraSlot", "LoraTable", "LoraWeight", "NotRecordableError", "PageConverter", "Recording",
    "SharedBlocks", "StandingPlan", "StateRows", "activate_and_mul", "add_layer_norm", "add_residual", "add_rms_norm",
    "advance_drafts", "apply_token_bitmask", "argmax", "causal_conv", "combine_experts", "embedding", "expert_results",
    "gated_delta_rule", "gated_rms_norm", "gaussian_topk", "gelu_tanh_and_mul", "grouped_topk", "head_linear",
    "layer_norm", "linear", "load_rows", "lora_sizes", "match_rms", "mix_streams", "pack_experts", "pack_grouped",
    "pack_head_linear", "pack_linear", "pack_lora", "paged_attention", "plan_attention", "probabilities",
    "quantize_grouped", "record", "rescale_lora", "rg_lru", "rms_norm", "rope_and_cache", "routed_experts",
    "row_moments", "sample", "scale_rows", "selective_scan", "silu_and_mul", "soft_cap", "stack_linear",
    "standing_plan", "state_space", "store_columns", "store_rows", "sum_results", "sum_rows", "token_probabilities",
    "topk_softmax", "weight_rows", "xielu",
]  # fmt: skip
