"""In float32 and greedy, the engine says token for token what transformers says, however the work is cut and shared."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.kv_cache import AttentionSpec, block_bytes
from quire_engine.models import CheckpointConfig
from support.full import FULL, pairs
from support.oracle import Expected, assert_exact, generate_greedily, load_reference

pytestmark = pytest.mark.slow

Workload = tuple[list[list[int]], list[int], list[Expected]]

SCARCE_BLOCKS = {16: 11, 64: 40, 512: 40}
"""KV blocks, by token budget, with which requests that run together cannot all keep theirs."""

CASES = [
    *pairs(itertools.product(["tied-gqa"], [True, False], SCARCE_BLOCKS, [False, True])),
    *(
        (name, *case)
        for name in ("untied-mha", "odd-sizes", "biased-mqa", "llama3-rope", "tinypy")
        for case in ((True, 16, True), (False, 64, True), (False, 512, False))
    ),
    *((name, True, 16, True) for name in ("qwen3", "qwen2-windows", "qwen3-windows", "gemma3")),
    *((name, True, 16, True) for name in ("qwen2", "gemma3-conditional", "mistral3-conditional", "qwen3-vl") if FULL),
    ("gemma4", True, 7, False), ("gemma4-moe", False, 64, False), ("gemma4-conditional", True, 16, True),
    ("gemma3n", True, 16, True), ("cohere2-moe-sum", True, 64, False),
    *((name, True, 16, True) for name in ("cohere2", "falcon-old", "stablelm-parallel")),
]  # fmt: skip
"""(checkpoint, prefix caching, token budget, scarce blocks). How the work is cut and shared is the scheduler's affair,
which knows no model: each two of its settings with one checkpoint, with others every setting once, for a third of the
requests, and where it is not alone (windows and their groups of layers) what cuts and shares most. Each family is in
`test_every_family.py`."""


def make_llm(folder: Path, budget: int, enable_prefix_caching: bool, num_blocks: int | None) -> LLM:
    config = CheckpointConfig.from_folder(folder)
    specs = [AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size)] * config.num_layers
    per_block = block_bytes(specs, block_size=16, dtype_bytes=4)
    return LLM(
        folder,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_memory_bytes=(num_blocks or 512) * per_block,
    )


@pytest.mark.parametrize(("name", "prefix_caching", "budget", "scarce"), CASES)
def test_many_requests_are_token_exact(
    name: str,
    prefix_caching: bool,
    budget: int,
    scarce: bool,
    checkpoint: Callable[[str], Path],
    workload: Callable[[str], Workload],
) -> None:
    number = 64 if name == "tied-gqa" else 24
    prompts, lengths, expected = (part[:number] for part in workload(name))
    llm = make_llm(checkpoint(name), budget, prefix_caching, SCARCE_BLOCKS[budget] if scarce else None)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)

    assert_exact(outputs, expected)
    sums = [output.outputs[0].cumulative_logprob for output in outputs]
    assert sums == pytest.approx([sum(want.logprobs) for want in expected], abs=1e-3)
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == scarce, "the scarce cache must preempt, or this test shows nothing"
    assert (stats.prefix_cache_hits > 0) == prefix_caching
    assert stats.num_blocks_used == 0
    assert stats.num_failed_steps == 0


# Prefill in chunks, prefix hits, decodes, preemption, and a tied head with two query heads to a KV head; a head of its
# own, biases, one KV head, and a head size that the attention kernels leave to plain torch; normed queries and keys.
@pytest.mark.parametrize(
    ("name", "prefix_caching", "budget"), [("tied-gqa", True, 16), ("odd-sizes", False, 64), ("qwen3", True, 16)]
)
def test_they_are_on_forced_kernels(
    forced_kernels: str,
    name: str,
    prefix_caching: bool,
    budget: int,
    checkpoint: Callable[[str], Path],
    workload: Callable[[str], Workload],
) -> None:
    def some(name: str) -> Workload:
        prompts, lengths, expected = workload(name)
        return prompts[:24], lengths[:24], expected[:24]

    test_many_requests_are_token_exact(name, prefix_caching, budget, True, checkpoint, some)


def test_stored_results_are_those_of_transformers(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    """They are used for checkpoints that have not changed; see `support.oracle`."""
    model = load_reference(checkpoint("untied-mha"))
    for prompt, length, stored in zip(*(part[:4] for part in workload("untied-mha")), strict=True):
        computed = generate_greedily(model, prompt, length)
        assert stored.token_ids == computed.token_ids
        assert stored.logprobs == pytest.approx(computed.logprobs, abs=1e-5)


def test_a_cache_smaller_than_the_profiling_run(
    checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    """Whatever the largest step of the start left in the batch's slots, no block of it is read later."""
    prompts, lengths, expected = workload("tied-gqa")
    llm = make_llm(checkpoint("tied-gqa"), 2048, enable_prefix_caching=True, num_blocks=12)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [want.token_ids for want in expected]
    assert llm.get_stats().num_failed_steps == 0
