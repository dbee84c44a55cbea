"""Compiles every kernel in the Triton language for a GPU that need not be there; run by tests/unit/kernels/gpu.

Triton's interpreter runs what the compiler refuses: branches whose types differ, shapes that are no powers of 2, tiles
beyond the shared memory. So each op is called here as it is on a GPU, with CPU tensors and launches that end with the
compiler's work: Triton's, and ptxas' for the processor. Prints one JSON line per kernel. With TRITON_INTERPRET=0 only.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from quire_kernels import (
    LoraRows,
    LoraTable,
    add_layer_norm,
    add_rms_norm,
    apply_token_bitmask,
    argmax,
    embedding,
    gated_rms_norm,
    gaussian_topk,
    gelu_tanh_and_mul,
    layer_norm,
    linear,
    match_rms,
    mix_streams,
    pack_experts,
    pack_linear,
    pack_lora,
    paged_attention,
    plan_attention,
    rms_norm,
    rope_and_cache,
    routed_experts,
    row_moments,
    sample,
    silu_and_mul,
    store_rows,
    xielu,
)
from quire_kernels.activation import activate_and_mul
from quire_kernels.attention_plan import GpuAttentionPlan
from quire_kernels.gpu.sampling import gumbel_noise
from support.recurrences import OPS, Step, make_op
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
_run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernel = _run(self, *args, grid=grid, warmup=True, **kwargs)
    row = {"kernel": self.__name__, "shared": kernel.metadata.shared, "wgmma": "wgmma" in kernel.asm["ptx"]}
    print(json.dumps({**row, "cubin": len(kernel.asm["cubin"]), "hash": kernel.hash}), flush=True)


def attention(
    dtype: torch.dtype, head_size: int, cache_dtype: torch.dtype | None = None, prefix: int = 90, **options: Any
) -> None:
    """A prompt on a prefix, and a long decode, of 4 query heads for each KV head."""
    cache = torch.zeros(40, 32, 2, head_size).to(cache_dtype or dtype).transpose(1, 2)
    query, starts = torch.zeros(71, 8, head_size, dtype=dtype), torch.tensor([0, 70, 71])
    table, lens = torch.zeros(2, 48, dtype=torch.int64), torch.tensor([prefix + 70, 1200])
    paged_attention(query, cache, cache, table, starts, lens, head_size**-0.5, **options)


def decode(num_seqs: int, max_seq_len: int, max_num_seqs: int = 0) -> None:
    """One token for each sequence; where a largest number is given, as a CUDA graph of fewer does, of whose plan and
    columns each takes a part."""
    cache, table = torch.zeros(40, 32, 2, 128, dtype=BF16).transpose(1, 2), torch.zeros(16, 48, dtype=torch.int64)
    columns = torch.zeros(32 * 16, dtype=torch.int64)
    size = max_num_seqs or num_seqs
    plan = plan_attention(table[:size], torch.arange(size + 1), torch.full((size,), max_seq_len), 8, cache)
    assert isinstance(plan, GpuAttentionPlan)
    plan = replace(plan, partials=plan.partials[:num_seqs], partial_lse=plan.partial_lse[:num_seqs])
    query, lens = torch.zeros(num_seqs, 8, 128, dtype=BF16), columns[16 : 16 + num_seqs]
    paged_attention(query, cache, cache, table[:num_seqs], columns[32 : 33 + num_seqs], lens, 128**-0.5, plan)


def rows(dtype: torch.dtype) -> None:
    x, ids = torch.zeros(4, 4096, dtype=dtype), torch.ones(4, dtype=torch.int64)
    add_rms_norm(rms_norm(x, x[0], 1e-5), x.clone(), x[0], 1e-5, multiplier=0.22)
    rms_norm(x, x[0].float(), 1e-5)
    add_layer_norm(layer_norm(x, x[0].float(), None, 1e-5), x.clone(), x[0].float(), x[0].float(), 1e-5)
    layer_norm(x, x[0].float().view(32, 128), None, 1e-5)
    activate_and_mul(x, "gelu")
    activate_and_mul(x, "relu2")
    xielu(x, torch.zeros(1), torch.zeros(1))
    activate_and_mul(x, "none", x)
    activate_and_mul(x, "sigmoid", x)
    activate_and_mul(x[:, :32], "sigmoid", x)
    silu_and_mul(x)
    streams, coefs = x.view(4, 4, 1024), torch.zeros(4, 4, 4)
    mix_streams(streams, streams, torch.zeros(4, 4), coefs)
    match_rms(x, x, 1e-5)
    gaussian_topk(x, row_moments(x), 1.6)
    gelu_tanh_and_mul(x)
    embedding(ids, x)
    store_rows(x[:, :1000], ids, x.clone()[:, 1000:2000])
    apply_token_bitmask(x, ids, torch.zeros(4, 128, dtype=torch.int32))
    norms = {"query_norm_D": x[0, :80], "key_norm_D": x[1, :80]}
    for cache_dtype, options, rotary_size in ((dtype, {}, 0), (dtype, norms, 20), (FP8, norms, 80)):
        cache, heads = torch.zeros(4, 16, 8, 80).to(cache_dtype).transpose(1, 2), x[:, :3840].unflatten(1, (48, 80))
        parts = (heads[:, :32], heads[:, 32:40], heads[:, 40:])
        rope_and_cache(*parts, ids, torch.zeros(9, rotary_size), ids, cache, cache, **options)
        rope_and_cache(*parts[:2], None, ids, torch.zeros(9, rotary_size), ids, cache, None)  # values in the keys
    rope_and_cache(*parts, ids, torch.zeros(9, 80), ids, cache, cache, **norms, value_norm_D=x[0, :80])
    rope_and_cache(heads[:, :32], heads[:, :0], None, ids, torch.zeros(9, 80), ids, cache, None)


def choose(dtype: torch.dtype) -> None:
    logits, ids, ones = torch.zeros(4, 128256, dtype=dtype), torch.ones(4, dtype=torch.int64), torch.ones(4)
    argmax(logits)
    sample(logits, ones, ones, ids, ones, ids, ids)


def multiply(kind: torch.dtype, gated: bool, dtype: torch.dtype = BF16, out_dtype: torch.dtype | None = None) -> None:
    weight = torch.zeros(8192, 4096, dtype=dtype)
    name = "gelu_tanh" if kind == FP8 else "silu"
    packed = pack_linear(weight, weight[:, 0], quantize=True, quantized_dtype=kind, gated=gated, activation=name)
    embedding(torch.zeros(2, dtype=torch.int64), packed)
    for num_tokens in (1, 24, 64, 300):
        linear(torch.zeros(num_tokens, 4096, dtype=dtype), packed, out_dtype)


def mix_experts(dtype: torch.dtype, kind: torch.dtype | None = None, biased: bool = False) -> None:
    """Of three experts and one that all share; with biases, as in gpt-oss."""
    gate_up, down = (
        [pack_linear(torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], dtype=dtype) if biased else None,
                     gated=gated, quantize=kind is not None, quantized_dtype=kind or torch.int8,
                     activation="swigluoai" if biased else "silu")] * 3
        for shape, gated in (((1536, 2048), True), ((2048, 768), False))
    )  # fmt: skip
    x, ids = torch.zeros(40, 2048, dtype=dtype), torch.zeros(40, 2, dtype=torch.int64)
    experts = pack_experts(gate_up, down, torch.arange(3))
    routed_experts(x, torch.ones(40, 2), ids, experts)
    routed_experts(x, torch.ones(40, 2), ids, experts, x, torch.ones(40, 1))


def adapt(dtype: torch.dtype, kind: torch.dtype | None = None, gated: bool = False) -> None:
    """A linear with adapters; beside a quantised weight, whose kernel adds what they add."""
    table = LoraTable([2048, 2048], 2816, dtype, max_loras=4)
    table.set_slot(1, [pack_lora(torch.zeros(16, 2816, dtype=dtype), torch.zeros(2048, 16, dtype=dtype)), None])
    weight = pack_linear(
        torch.zeros(4096, 2816, dtype=dtype), quantize=kind is not None, quantized_dtype=kind or torch.int8, gated=gated
    )
    for num_tokens in (1, 40):
        index = torch.zeros(num_tokens, dtype=torch.int64)
        linear(torch.zeros(num_tokens, 2816, dtype=dtype), weight, lora=LoraRows(table, index))


def recur(name: str, dtype: torch.dtype) -> None:
    """A recurrent layer's op on a decode of three sequences and on a prompt."""
    op = make_op(name)
    for steps in ([Step(8, 1, 0, 0, [(1, 0)])] * 3, [Step(0, 40, -1, 0, [(40, 0)])]):
        op(op.tokens(sum(step.num_rows for step in steps), 0, dtype), op.caches(), steps)


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device=None: 0
        )
    )
    JITFunction.run = compile_only
    attention(BF16, 128)
    attention(BF16, 256)
    attention(BF16, 128, FP8, prefix=1100)
    attention(FP16, 80, window=1024, soft_cap=30.0)
    attention(BF16, 128, window=-8192)
    attention(BF16, 64, window=128, sinks_H=torch.zeros(8))
    attention(FP32, 256)
    attention(BF16, 64, prefix=0, window=65, is_causal=False)
    attention(FP32, 64, prefix=0, is_causal=False, position_bias_HR=torch.zeros(8, 289))
    decode(3, 100)
    decode(3, 1200)
    for num_seqs in (1, 8, 16):
        decode(num_seqs, 1200, max_num_seqs=16)
    for dtype in (BF16, FP16, FP32):
        rows(dtype)
    choose(FP32)
    gumbel_noise(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 1000)
    multiply(torch.int8, gated=False, out_dtype=FP32)
    multiply(torch.int8, gated=True, dtype=FP16)
    multiply(FP8, gated=True)
    for dtype, kind in ((BF16, None), (FP16, torch.int8), (BF16, FP8), (FP32, None)):
        mix_experts(dtype, kind)
    mix_experts(BF16, biased=True)
    for dtype, kind in ((BF16, None), (FP16, None), (FP32, None), (BF16, torch.int8), (BF16, FP8)):
        adapt(dtype, kind, gated=dtype == BF16)
    for name in OPS:
        recur(name, FP32 if name == "delta" else BF16)
    for gates_first in (False, True):
        x = torch.zeros(4, 4096, dtype=BF16)
        gated_rms_norm(x, x, torch.ones(128), 1e-5, 128, gates_first)


if __name__ == "__main__":
    main()
