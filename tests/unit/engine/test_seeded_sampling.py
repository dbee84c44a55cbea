"""A seeded request samples the same tokens in whatever company."""

from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.outputs import RequestOutput

pytestmark = pytest.mark.slow

SEEDED = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2**64 - 1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.02, seed=4, max_tokens=40, ignore_eos=True),
]
PROMPT = "def fib(n):\n"


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def others(count: int) -> tuple[list[str], list[SamplingParams]]:
    """Neighbours of every kind: greedy, unseeded, with and without masks."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=50),
        SamplingParams(temperature=1.0, max_tokens=30),
        SamplingParams(temperature=1.0, top_p=0.5, max_tokens=60),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=20),
    ]
    return [f"class C{i}:\n    x = {i}\n" for i in range(count)], [kinds[i % len(kinds)] for i in range(count)]


@pytest.fixture(scope="module")
def tinypy(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tinypy")


@pytest.fixture(scope="module")
def alone(tinypy: Path) -> list[list[int]]:
    return sampled_alone(tinypy)


def sampled_alone(tinypy: Path) -> list[list[int]]:
    llm = LLM(tinypy, dtype="float32", enable_prefix_caching=False)
    return [token_ids(llm.generate(PROMPT, params, use_tqdm=False)[0]) for params in SEEDED]


def test_seeds_matter(alone: list[list[int]], tinypy: Path) -> None:
    llm = LLM(tinypy, dtype="float32")
    again = llm.generate([PROMPT] * 2, SamplingParams(temperature=0.8, seed=99, max_tokens=40), use_tqdm=False)
    assert token_ids(again[0]) == token_ids(again[1]) != alone[0]
    unseeded = llm.generate([PROMPT] * 2, SamplingParams(temperature=0.8, max_tokens=40), use_tqdm=False)
    assert token_ids(unseeded[0]) != token_ids(unseeded[1])


@pytest.mark.parametrize(("budget", "prefix_caching"), [(8, True), (64, False), (2048, True)])
def test_same_tokens_among_31_others(budget: int, prefix_caching: bool, alone: list[list[int]], tinypy: Path) -> None:
    llm = LLM(tinypy, dtype="float32", max_num_batched_tokens=budget, enable_prefix_caching=prefix_caching)
    prompts, params = others(28)
    positions = (0, 9, 20, 31)
    for position, seeded in zip(positions, SEEDED, strict=True):
        prompts.insert(position, PROMPT)
        params.insert(position, seeded)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [token_ids(outputs[position]) for position in positions] == alone


def test_they_are_on_forced_kernels(forced_kernels: str, tinypy: Path) -> None:
    test_same_tokens_among_31_others(64, True, sampled_alone(tinypy), tinypy)


def test_same_tokens_after_preemption(alone: list[list[int]], tinypy: Path) -> None:
    llm = LLM(tinypy, dtype="float32", max_model_len=128, kv_cache_memory_bytes=14 * 16 * 2 * 6 * 4 * 32 * 4)
    prompts, params = others(8)
    outputs = llm.generate([*prompts, *[PROMPT] * 4], [*params, *SEEDED], use_tqdm=False)
    preempted = [output.metrics.num_preemptions for output in outputs[-4:] if output.metrics is not None]
    assert sum(preempted) > 0, "nothing was preempted, so this test shows nothing"
    assert [token_ids(output) for output in outputs[-4:]] == alone
    assert llm.get_stats().num_failed_steps == 0
