"""Compiles every kernel in the Triton language for a GPU that need not be there; run by tests/unit/kernels/gpu.

Triton's interpreter runs what the compiler refuses: branches whose types differ, shapes that are no powers of 2, tiles
beyond the shared memory. So each op is called here as it is on a GPU, with CPU tensors and launches that end with the
compiler's work: Triton's, and ptxas' for the processor. Prints one JSON line per kernel. With TRITON_INTERPRET=0 only.
"""

import json
from types import SimpleNamespace
from typing import Any

import torch
from quire_kernels import (
    add_rms_norm,
    apply_token_bitmask,
    argmax,
    embedding,
    linear,
    pack_linear,
    paged_attention,
    rms_norm,
    rope_and_cache,
    sample,
    silu_and_mul,
)
from quire_kernels.gpu.sampling import gumbel_noise
from quire_kernels.kv_cache import copy_blocks
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
_run = JITFunction.run


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernel = _run(self, *args, grid=grid, warmup=True, **kwargs)
    row = {"kernel": self.__name__, "shared": kernel.metadata.shared, "wgmma": "wgmma" in kernel.asm["ptx"]}
    print(json.dumps({**row, "cubin": len(kernel.asm["cubin"])}), flush=True)


def attention(dtype: torch.dtype, head_size: int, cache_dtype: torch.dtype | None = None, **options: Any) -> None:
    """A prompt and a long decode, of 4 query heads for each KV head."""
    cache = torch.zeros(40, 32, 2, head_size).to(cache_dtype or dtype).transpose(1, 2)
    query, starts = torch.zeros(71, 8, head_size, dtype=dtype), torch.tensor([0, 70, 71])
    table, lens = torch.zeros(2, 40, dtype=torch.int64), torch.tensor([160, 1200])
    paged_attention(query, cache, cache, table, starts, lens, head_size**-0.5, **options)


def rows(dtype: torch.dtype) -> None:
    x, ids = torch.zeros(4, 4096, dtype=dtype), torch.ones(4, dtype=torch.int64)
    add_rms_norm(rms_norm(x, x[0], 1e-5), x.clone(), x[0], 1e-5)
    silu_and_mul(x)
    embedding(ids, x)
    apply_token_bitmask(x, ids, torch.zeros(4, 128, dtype=torch.int32))
    for cache_dtype, norm_weights in ((dtype, None), (FP8, (x[0, :80], x[1, :80]))):
        cache, heads = torch.zeros(4, 16, 8, 80).to(cache_dtype).transpose(1, 2), x[:, :3840].unflatten(1, (48, 80))
        parts = (heads[:, :32], heads[:, 32:40], heads[:, 40:])
        rope_and_cache(*parts, ids, torch.zeros(9, 80), ids, cache, cache, norm_weights=norm_weights)
        copy_blocks(cache, ids[:1], ids[:1] + 1)


def choose(dtype: torch.dtype) -> None:
    logits, ids, ones = torch.zeros(4, 128256, dtype=dtype), torch.ones(4, dtype=torch.int64), torch.ones(4)
    argmax(logits)
    sample(logits, ones, ones, ids, ones, ids, ids)


def multiply(kind: torch.dtype, gated: bool) -> None:
    weight = torch.zeros(8192, 4096, dtype=BF16)
    packed = pack_linear(weight, weight[:, 0], quantize=True, quantized_dtype=kind, gated=gated)
    embedding(torch.zeros(2, dtype=torch.int64), packed)
    for num_tokens in (1, 64, 300):
        linear(torch.zeros(num_tokens, 4096, dtype=BF16), packed)


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device=None: 0
        )
    )
    JITFunction.run = compile_only
    attention(BF16, 128)
    attention(BF16, 256)
    attention(BF16, 128, FP8)
    attention(FP16, 80, window=1024, soft_cap=30.0)
    attention(FP32, 256)
    rows(BF16)
    choose(FP32)
    gumbel_noise(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 1000)
    multiply(torch.int8, gated=False)
    multiply(FP8, gated=True)


if __name__ == "__main__":
    main()
