"""With the C++ kernels a request's tokens are its own in bfloat16 and int8, too, to the last bit of probabilities.

Plain torch promises that only up to the rounding of logits, as its matrix multiplications differ with the batch.
"""

from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.outputs import CompletionOutput
from quire_kernels import cpu
from support.oracle import make_prompts

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
BLOCK_BYTES = 6 * 2 * 4 * 32 * 16 * 2
"""Layers, keys and values, heads, head size, tokens, bytes."""
PROMPTS = make_prompts(24, 4096, max_length=150)
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), top_p=0.95, seed=i, max_tokens=12, ignore_eos=True, logprobs=1)
    for i in range(len(PROMPTS))
]


def generate(batch_size: int, **settings: Any) -> list[CompletionOutput]:
    llm = LLM(TINYPY, dtype="bfloat16", max_num_seqs=max(batch_size, 2), max_model_len=256, **settings)
    outputs = []
    for first in range(0, len(PROMPTS), batch_size):
        part = slice(first, first + batch_size)
        outputs += [one.outputs[0] for one in llm.generate(PROMPTS[part], PARAMS[part], use_tqdm=False)]
    if "kv_cache_memory_bytes" in settings:
        assert llm.get_stats().num_preemptions
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [(None, "auto"), ("int8", "auto"), ("int8", "int8")])
def test_alone_in_a_batch_in_chunks_and_after_preemption(quantization: str | None, kv_cache_dtype: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    settings = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    block_bytes = BLOCK_BYTES if kv_cache_dtype == "auto" else BLOCK_BYTES * 36 // 64
    alone = generate(1, **settings, enable_prefix_caching=False)
    together = generate(24, **settings)
    in_chunks = generate(24, **settings, max_num_batched_tokens=48)
    scarce = generate(24, **settings, kv_cache_memory_bytes=40 * block_bytes)
    for others in (together, in_chunks, scarce):
        assert [one.token_ids for one in others] == [one.token_ids for one in alone]
        assert [one.logprobs for one in others] == [one.logprobs for one in alone]


@pytest.mark.slow
@pytest.mark.parametrize("forced_kernels", ["avx512", "avx2"], indirect=True)  # plain torch promises no such thing
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_they_are_alone_on_forced_kernels(forced_kernels: str, quantization: str | None) -> None:
    test_alone_in_a_batch_in_chunks_and_after_preemption(quantization, "auto")
