"""With a KV cache in int8, tokens are near to those without, and do not depend on how the work is cut and shared."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.outputs import RequestOutput
from quire_engine.worker import worker
from quire_kernels import cpu
from quire_kernels.cpu import KernelStatus
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 192, "kv_cache_memory_bytes": 1 << 20}
PROMPTS = make_prompts(12, 500, max_length=110)
PARAMS = [
    SamplingParams(
        temperature=0.9 * (i % 2), seed=i, max_tokens=20, ignore_eos=True, logprobs=1,
        prompt_logprobs=0 if i % 3 == 0 else None,
    )
    for i in range(len(PROMPTS))
]  # fmt: skip


def generate(llm: LLM, batch_size: int = len(PROMPTS)) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for first in range(0, len(PROMPTS), batch_size):
        part = slice(first, first + batch_size)
        outputs += llm.generate(PROMPTS[part], PARAMS[part], use_tqdm=False)
    stats = llm.get_stats()
    assert (stats.num_failed_steps, stats.num_blocks_used) == (0, 0)
    return outputs


def prompt_scores(outputs: list[RequestOutput]) -> torch.Tensor:
    """Log-probabilities of all prompts' tokens."""
    entries = itertools.chain.from_iterable(output.prompt_logprobs or () for output in outputs)
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries if entry])


@pytest.mark.parametrize("name", ["tinypy", "qwen3", "gemma3", "odd-sizes", "gpt-oss", "deepseek-v2", "deepseek-v3"])
def test_tokens_are_near_to_those_of_an_exact_cache(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Windows, norms of heads, sinks, latent rows; head sizes that plain torch computes."""
    exact, coded = (
        prompt_scores(generate(LLM(checkpoint(name), kv_cache_dtype=kind, **SETTINGS))) for kind in ("auto", "int8")
    )
    assert 0 < (coded - exact).abs().mean() < 0.1


@pytest.mark.skipif(cpu.library() is None, reason="plain torch promises no such thing")
@pytest.mark.parametrize(("name", "few_blocks"), [("tinypy", 26), ("gemma3", 40), ("deepseek-v3", 26)])
def test_the_same_alone_in_chunks_cached_and_after_preemption(
    name: str, few_blocks: int, checkpoint: Callable[[str], Path]
) -> None:
    folder, settings = checkpoint(name), {**SETTINGS, "kv_cache_dtype": "int8"}
    alone = generate(LLM(folder, enable_prefix_caching=False, **settings), batch_size=1)
    llm = LLM(folder, **settings)
    block_bytes = (1 << 20) // llm.get_stats().num_blocks_free
    chunked = LLM(folder, max_num_batched_tokens=24, enable_prefix_caching=False, **settings)
    scarce = LLM(folder, max_num_seqs=6, **{**settings, "kv_cache_memory_bytes": few_blocks * block_bytes})
    for others in (generate(llm), generate(llm), generate(chunked), generate(scarce)):
        for own, other in zip(alone, others, strict=True):
            assert other.outputs[0].token_ids == own.outputs[0].token_ids
            assert other.outputs[0].logprobs == own.outputs[0].logprobs
    assert llm.get_stats().prefix_cache_hits > 0
    assert scarce.get_stats().num_preemptions > 0


def test_stages_compute_the_same_and_ranks_nearly(checkpoint: Callable[[str], Path]) -> None:
    """Sums over two ranks are rounded otherwise, and so may be a code."""
    results = []
    for sizes in ({}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}):
        with llm_of_thread_ranks(checkpoint("tied-gqa"), kv_cache_dtype="int8", **SETTINGS, **sizes) as llm:
            results.append(generate(llm))
    alone, stages, ranks = results
    assert [one.outputs[0].token_ids for one in stages] == [one.outputs[0].token_ids for one in alone]
    assert (prompt_scores(ranks) - prompt_scores(alone)).abs().mean() < 1e-3


def test_a_block_has_codes_and_scales(checkpoint: Callable[[str], Path]) -> None:
    """Of 32 features in bfloat16: 36 bytes in the place of 64."""
    folder = checkpoint("tinypy")
    exact, coded = (
        LLM(folder, kv_cache_memory_bytes=1 << 20, max_num_seqs=4, kv_cache_dtype=kind).get_stats().num_blocks_free
        for kind in ("auto", "int8")
    )
    assert coded == (1 << 20) // ((1 << 20) // exact * 36 // 64)


def test_gpu_kernels_reject_it_by_name(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "kernel_status", lambda: KernelStatus(None, "", interprets_triton=True))
    with pytest.raises(ValueError, match=r"^kv_cache_dtype is 'int8', which has no kernel for cpu; set it to 'fp8' or"):
        LLM(checkpoint("tinypy"), kv_cache_dtype="int8", **SETTINGS)
