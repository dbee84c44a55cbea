"""Arguments that the C++ kernels cannot compute with are refused by name, before anything is read or written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quire_kernels import (
    add_residual,
    add_rms_norm,
    apply_token_bitmask,
    cpu,
    embedding,
    expert_results,
    gelu_tanh_and_mul,
    grouped_topk,
    head_linear,
    linear,
    load_rows,
    pack_experts,
    pack_head_linear,
    pack_linear,
    paged_attention,
    plan_attention,
    probabilities,
    rms_norm,
    rope_and_cache,
    routed_experts,
    sample,
    silu_and_mul,
    soft_cap,
    store_rows,
    sum_results,
    topk_softmax,
)

T, H, K, D, B, S, V = 3, 4, 2, 16, 16, 2, 70
INT64, FLOAT32, BFLOAT16 = torch.int64, torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _has_library() -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)


def gapped(*shape: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    """With something between the elements of a row, and between the rows."""
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def meta(*shape: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    """On a device that is not the CPU; there is no data at all."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=INT64)


GOOD: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    rms_norm: lambda: {
        "hidden_TE": torch.zeros(T, 8), "weight_E": torch.zeros(8), "eps": 1e-5, "out": torch.ones(T, 8),
    },
    add_rms_norm: lambda: {
        "hidden_TE": torch.zeros(T, 8), "residual_TE": torch.zeros(T, 8), "weight_E": torch.zeros(8), "eps": 1e-5,
    },
    add_residual: lambda: {"hidden_TE": torch.zeros(T, 8), "residual_TE": torch.zeros(T, 8)},
    silu_and_mul: lambda: {"gate_up": torch.zeros(T, 8)},
    gelu_tanh_and_mul: lambda: {"gate_up": torch.zeros(T, 8)},
    soft_cap: lambda: {"logits_SV": torch.zeros(S, V), "cap": 30.0},
    linear: lambda: {
        "x_TK": torch.zeros(T, 8), "weight": pack_linear(torch.zeros(5, 8)), "out_dtype": FLOAT32,
    },
    head_linear: lambda: {"x_THK": torch.zeros(T, H, 8), "weight": pack_head_linear(torch.zeros(H, 5, 8))},
    pack_linear: lambda: {"weight_NK": torch.zeros(5, 8)},
    embedding: lambda: {"token_ids_T": ints(T), "weight": pack_linear(torch.zeros(5, 8))},
    topk_softmax: lambda: {"logits_TX": torch.zeros(T, 4), "top_k": 2, "renormalize": True},
    grouped_topk: lambda: {
        "logits_TX": torch.zeros(T, 8), "top_k": 2, "renormalize": True, "num_groups": 4, "top_groups": 2,
        "scoring": "sigmoid", "bias_X": torch.zeros(8),
    },
    routed_experts: lambda: {
        "x_TE": torch.zeros(T, 8), "weights_TK": torch.ones(T, 2), "expert_ids_TK": ints(T, 2),
        "experts": pack_experts(
            [pack_linear(torch.zeros(10, 8), gated=True)], [pack_linear(torch.zeros(8, 5))], ints(3)
        ),
        "shared_TE": torch.zeros(T, 8), "shared_gate_T1": torch.zeros(T, 1),
    },
    expert_results: lambda: {
        "x_PE": torch.zeros(T, 8), "expert_ids_P": ints(T),
        "experts": pack_experts(
            [pack_linear(torch.zeros(10, 8), gated=True)], [pack_linear(torch.zeros(8, 5))], ints(3)
        ),
    },
    sum_results: lambda: {
        "results_TKE": torch.zeros(T, 2, 8), "weights_TK": torch.ones(T, 2), "dtype": FLOAT32,
        "shared_TE": torch.zeros(T, 8), "shared_gate_T1": torch.zeros(T, 1),
    },
    store_rows: lambda: {
        "rows_TE": torch.zeros(T, 8), "slot_mapping_T": torch.arange(T), "out_NE": torch.ones(9, 8),
    },
    load_rows: lambda: {"table_NE": torch.zeros(9, 8), "row_ids_T": torch.arange(T)},
    rope_and_cache: lambda: {
        "query_THD": torch.zeros(T, H, D), "key_TKD": torch.zeros(T, K, D), "value_TKD": torch.zeros(T, K, D),
        "positions_T": ints(T), "cos_sin": torch.zeros(9, D), "slot_mapping_T": torch.arange(T),
        "key_cache_NKBD": torch.zeros(4, K, B, D), "value_cache_NKBD": torch.zeros(4, K, B, D),
        "query_norm_D": torch.ones(D), "key_norm_D": torch.ones(D),
    },
    plan_attention: lambda: {
        "block_table_SM": ints(S, 1), "query_start_loc": torch.tensor([0, 1, T]), "seq_lens": torch.tensor([5, 2]),
        "num_heads": H,
        "key_cache_NKBD": torch.zeros(4, K, B, D),
    },
    paged_attention: lambda: {
        "query_THD": torch.zeros(T, H, D), "key_cache_NKBD": torch.zeros(4, K, B, D),
        "value_cache_NKBD": torch.zeros(4, K, B, D), "block_table_SM": ints(S, 1),
        "query_start_loc": torch.tensor([0, 1, T]), "seq_lens": torch.tensor([5, 2]), "scale": 0.25,
    },
    sample: lambda: {
        "logits_SV": torch.zeros(S, V), "temperature": torch.ones(S), "min_p": torch.zeros(S),
        "top_k": ints(S) + V, "top_p": torch.ones(S), "seeds": ints(S), "positions": ints(S),
    },
    probabilities: lambda: {
        "logits_SV": torch.zeros(S, V), "temperature": torch.ones(S), "min_p": torch.zeros(S),
        "top_k": ints(S) + V, "top_p": torch.ones(S),
    },
    apply_token_bitmask: lambda: {
        "logits_SV": torch.zeros(S, V), "row_ids_R": ints(1), "bitmask_RW": torch.zeros(1, 3, dtype=torch.int32),
    },
}  # fmt: skip
"""Arguments that are right, of every op."""

BAD: list[tuple[Callable[..., Any], str, Any]] = [
    (rms_norm, "hidden_TE", torch.zeros(T, 2, 8)),
    *(
        (op, "weight_E", weight)
        for op in (rms_norm, add_rms_norm)
        for weight in (torch.zeros(7), gapped(8), torch.zeros(8, dtype=BFLOAT16), meta(8))
    ),
    *(
        (rms_norm, "out", out)
        for out in (torch.ones(T - 1, 8), torch.ones(T, 9), gapped(T, 8), torch.ones(T, 8, dtype=BFLOAT16), meta(T, 8))
    ),
    *((op, "residual_TE", torch.zeros(T - 1, 8)) for op in (add_rms_norm, add_residual)),
    *((op, "gate_up", torch.zeros(T, 7)) for op in (silu_and_mul, gelu_tanh_and_mul)),
    *((soft_cap, "logits_SV", logits) for logits in (torch.zeros(V), gapped(S, V), torch.zeros(S, V, dtype=BFLOAT16))),
    (linear, "x_TK", torch.zeros(T, 7)),
    (linear, "x_TK", torch.zeros(T, 8, dtype=BFLOAT16)),
    (linear, "x_TK", torch.zeros(8)),
    (linear, "x_TK", meta(T, 8)),
    (linear, "out_dtype", torch.int8),
    (linear, "out_dtype", torch.float16),
    *(
        (head_linear, "x_THK", x)
        for x in (torch.zeros(T, H, 7), torch.zeros(T, H - 1, 8), torch.zeros(T, 8), meta(T, H, 8))
    ),
    (head_linear, "x_THK", torch.zeros(T, H, 8, dtype=BFLOAT16)),
    (pack_linear, "bias_N", torch.zeros(4)),
    (pack_linear, "bias_N", torch.zeros(6)),
    (pack_linear, "scales_N", torch.zeros(5)),
    (pack_linear, "weight_NK", torch.zeros(5, 8, dtype=torch.int8)),
    (pack_linear, "weight_NK", torch.zeros(5, 8, dtype=torch.float8_e4m3fn)),
    (pack_linear, "quantized_dtype", BFLOAT16),
    *((pack_linear, "activation_bits", bits) for bits in (0, 4, 32)),
    (pack_linear, "dtype", BFLOAT16),
    (pack_linear, "gated", True),
    (pack_linear, "activation", "relu"),
    (embedding, "token_ids_T", torch.zeros(T, dtype=torch.int32)),
    (embedding, "token_ids_T", ints(T, 2)),
    (embedding, "token_ids_T", meta(T, dtype=INT64)),
    (topk_softmax, "logits_TX", torch.zeros(4)),
    (topk_softmax, "logits_TX", torch.zeros(T, 4, dtype=BFLOAT16)),
    *((topk_softmax, "top_k", top_k) for top_k in (0, 5)),
    *((topk_softmax, "counts_X", counts) for counts in (ints(5), torch.zeros(4), meta(4, dtype=INT64))),
    (grouped_topk, "logits_TX", torch.zeros(T, 8, dtype=BFLOAT16)),
    *((grouped_topk, "counts_X", counts) for counts in (ints(7), torch.zeros(8), meta(8, dtype=INT64))),
    *((grouped_topk, "top_k", top_k) for top_k in (0, 5)),
    *((grouped_topk, "num_groups", number) for number in (0, 3)),
    *((grouped_topk, "top_groups", number) for number in (0, 5)),
    (grouped_topk, "scoring", "relu"),
    *((grouped_topk, "bias_X", bias) for bias in (torch.zeros(7), torch.zeros(8, dtype=BFLOAT16), meta(8))),
    *(
        (routed_experts, "x_TE", x)
        for x in (torch.zeros(T, 7), torch.zeros(8), torch.zeros(T, 8, dtype=BFLOAT16), meta(T, 8))
    ),
    *((routed_experts, "weights_TK", weights) for weights in (torch.ones(T, 3), torch.ones(T, 2, dtype=BFLOAT16))),
    *((routed_experts, "expert_ids_TK", ids) for ids in (ints(T - 1, 2), ints(T, 2).int(), gapped(T, 2, dtype=INT64))),
    *((routed_experts, "shared_TE", shared) for shared in (torch.ones(T, 7), torch.ones(T, 8, dtype=BFLOAT16))),
    *((routed_experts, "shared_gate_T1", gate) for gate in (torch.ones(T), torch.ones(T, 1, dtype=BFLOAT16))),
    *(
        (expert_results, "x_PE", x)
        for x in (torch.zeros(T, 7), torch.zeros(8), torch.zeros(T, 8, dtype=BFLOAT16), meta(T, 8))
    ),
    *((expert_results, "expert_ids_P", ids) for ids in (ints(T - 1), ints(T).int(), gapped(T, dtype=INT64))),
    *(
        (sum_results, "results_TKE", results)
        for results in (torch.zeros(T, 2, 8, dtype=BFLOAT16), torch.zeros(T, 3, 8), gapped(T, 2, 8), meta(T, 2, 8))
    ),
    *((sum_results, "weights_TK", weights) for weights in (torch.ones(T, 3), torch.ones(T, 2, dtype=BFLOAT16))),
    *((sum_results, "shared_TE", shared) for shared in (torch.ones(T, 7), torch.ones(T, 8, dtype=BFLOAT16))),
    *((sum_results, "shared_gate_T1", gate) for gate in (torch.ones(T), torch.ones(T, 1, dtype=BFLOAT16))),
    (store_rows, "rows_TE", torch.zeros(T - 1, 8)),
    (store_rows, "rows_TE", torch.zeros(T, 7)),
    (store_rows, "rows_TE", torch.zeros(T, 2, 8)),
    (store_rows, "rows_TE", torch.zeros(T, 8, dtype=BFLOAT16)),
    (store_rows, "rows_TE", meta(T, 8)),
    (store_rows, "slot_mapping_T", torch.zeros(T, dtype=torch.int32)),
    (store_rows, "slot_mapping_T", ints(T - 1)),
    (store_rows, "slot_mapping_T", ints(T, 1)),
    (store_rows, "slot_mapping_T", meta(T, dtype=INT64)),
    (store_rows, "out_NE", torch.ones(9, 9)),
    (store_rows, "out_NE", torch.ones(9, 2, 8)),
    (store_rows, "out_NE", torch.ones(9, 8, dtype=BFLOAT16)),
    (store_rows, "out_NE", gapped(9, 8)),
    (store_rows, "out_NE", meta(9, 8)),
    (load_rows, "table_NE", torch.zeros(9, 2, 8)),
    (load_rows, "table_NE", meta(9, 8)),
    (load_rows, "row_ids_T", torch.zeros(T, dtype=torch.int32)),
    (load_rows, "row_ids_T", ints(T, 1)),
    (load_rows, "row_ids_T", meta(T, dtype=INT64)),
    (rope_and_cache, "query_THD", torch.zeros(T, H, 2 * D)),
    (rope_and_cache, "query_THD", torch.zeros(T, H * D)),
    (rope_and_cache, "query_THD", meta(T, H, D)),
    *((rope_and_cache, name, torch.zeros(T - 1, K, D)) for name in ("key_TKD", "value_TKD")),
    *((rope_and_cache, name, torch.zeros(T, K + 1, D)) for name in ("key_TKD", "value_TKD")),
    *((rope_and_cache, name, meta(T, K, D)) for name in ("key_TKD", "value_TKD")),
    *((rope_and_cache, name, ints(T - 1)) for name in ("positions_T", "slot_mapping_T")),
    *((rope_and_cache, name, torch.zeros(T, dtype=torch.int32)) for name in ("positions_T", "slot_mapping_T")),
    *((rope_and_cache, "cos_sin", torch.zeros(9, size)) for size in (D + 2, D - 1)),
    (rope_and_cache, "cos_sin", torch.zeros(9, D, dtype=BFLOAT16)),
    (rope_and_cache, "cos_sin", gapped(9, D)),
    *(
        (rope_and_cache, name, weight)
        for name in ("query_norm_D", "key_norm_D")
        for weight in (torch.ones(D - 1), torch.ones(1, D), gapped(D), torch.ones(D, dtype=BFLOAT16), meta(D))
    ),
    *((op, "key_cache_NKBD", gapped(4, K, B, D)) for op in (rope_and_cache, paged_attention)),
    *((op, "value_cache_NKBD", gapped(4, K, B, D)) for op in (rope_and_cache, paged_attention)),
    *((op, "value_cache_NKBD", torch.zeros(3, K, B, D)) for op in (rope_and_cache, paged_attention)),
    (rope_and_cache, "value_cache_NKBD", torch.zeros(4, K, B, D, dtype=BFLOAT16)),
    *((rope_and_cache, name, None) for name in ("value_TKD", "value_cache_NKBD")),
    (paged_attention, "value_cache_NKBD", None),
    *((paged_attention, "value_size", size) for size in (0, D)),
    (plan_attention, "query_start_loc", torch.tensor([0, T])),
    (plan_attention, "query_start_loc", torch.tensor([0, 1, T], dtype=torch.int32)),
    (plan_attention, "seq_lens", torch.tensor([5, 2], dtype=torch.int32)),
    (plan_attention, "num_heads", 3),
    *((op, "window", 0) for op in (plan_attention, paged_attention)),
    (paged_attention, "soft_cap", 0.0),
    *(
        (paged_attention, "sinks_H", x)
        for x in (torch.zeros(H - 1), torch.zeros(H, dtype=BFLOAT16), gapped(H), meta(H))
    ),
    *(
        (paged_attention, "position_bias_HR", x)
        for x in (
            torch.zeros(H - 1, 41),
            torch.zeros(H, 40),
            torch.zeros(H, 31),
            torch.zeros(H, 41, dtype=BFLOAT16),
            gapped(H, 41),
            meta(H, 41),
        )
    ),
    (paged_attention, "query_THD", torch.zeros(T - 1, H, D)),
    (paged_attention, "query_THD", torch.zeros(T, H, 2 * D)),
    (paged_attention, "query_THD", meta(T, H, D)),
    *((op, "block_table_SM", ints(S - 1, 1)) for op in (plan_attention, paged_attention)),
    *((op, "block_table_SM", ints(S)) for op in (plan_attention, paged_attention)),
    *((op, "block_table_SM", torch.zeros(S, 1, dtype=torch.int32)) for op in (plan_attention, paged_attention)),
    *((op, "logits_SV", torch.zeros(V)) for op in (sample, probabilities)),
    *(
        (op, name, column)
        for op in (sample, probabilities)
        for name in ("temperature", "min_p", "top_p")
        for column in (torch.zeros(S, dtype=torch.float64), torch.ones(S - 1))
    ),
    *((op, "top_k", column) for op in (sample, probabilities) for column in (ints(S).int(), ints(S - 1))),
    *((sample, name, column) for name in ("seeds", "positions") for column in (ints(S).int(), ints(S - 1))),
    (apply_token_bitmask, "row_ids_R", torch.zeros(1, dtype=torch.int32)),
    (apply_token_bitmask, "row_ids_R", ints(2)),
    (apply_token_bitmask, "bitmask_RW", ints(1, 3)),
    (apply_token_bitmask, "bitmask_RW", torch.zeros(1, 2, dtype=torch.int32)),
]
"""The op, one of its arguments, and what must not stand there."""
MESSAGES = (
    "must (be|have)|packed for|two dimensions|two halves|scales_N|multiple of|plan is for|sequences|not enough values"
)


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.__name__)
def test_right_arguments_are_taken(op: Callable[..., Any]) -> None:
    op(**GOOD[op]())


@pytest.mark.parametrize(
    ("op", "name", "value"), BAD, ids=[f"{op.__name__}-{name}-{i}" for i, (op, name, _) in enumerate(BAD)]
)
def test_wrong_arguments_are_refused(op: Callable[..., Any], name: str, value: Any) -> None:
    arguments = GOOD[op]()
    written = [one for one in arguments.values() if isinstance(one, torch.Tensor)]
    before = [one.clone() for one in written]
    with pytest.raises((TypeError, ValueError), match=MESSAGES):
        op(**{**arguments, name: value})
    assert all(torch.equal(one, old) for one, old in zip(written, before, strict=True))


@pytest.mark.parametrize("size", [None, 0, -1, D + 1])
def test_values_are_a_part_of_the_keys(size: int | None) -> None:
    arguments = GOOD[paged_attention]() | {"value_cache_NKBD": None}
    with pytest.raises(ValueError, match=f"value_size is {size}; it must be"):
        paged_attention(**arguments, value_size=size)


def test_a_plan_for_other_shapes_is_refused() -> None:
    arguments = GOOD[paged_attention]()
    plan = plan_attention(ints(S, 1), torch.tensor([0, 1, T]), torch.tensor([5, 2]), H, torch.zeros(4, K, 2 * B, D))
    with pytest.raises(ValueError, match="the plan is for 3 tokens"):
        paged_attention(**arguments, plan=plan)
    plan = plan_attention(ints(S, 1), torch.tensor([0, 1, T]), torch.tensor([5, 2]), H, arguments["key_cache_NKBD"], 3)
    with pytest.raises(ValueError, match="window is None; the plan is for a window of 3"):
        paged_attention(**arguments, plan=plan)
    plan = plan_attention(ints(S, 1), torch.tensor([0, 1, T - 1]), torch.tensor([5, 2]), H, arguments["key_cache_NKBD"])
    with pytest.raises(ValueError, match="the plan is for 2 tokens"):
        paged_attention(**arguments, plan=plan)
