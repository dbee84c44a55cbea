"""Penalties, biases, bad words and allowed tokens through the whole engine, in any company and however it is cut."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.outputs import RequestOutput
from support.oracle import make_prompts
from transformers import LlamaForCausalLM

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
KINDS = [
    SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, repetition_penalty=1.4),
    SamplingParams(**GREEDY, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(**GREEDY, repetition_penalty=0.8, frequency_penalty=2.0, presence_penalty=-1.0),
    SamplingParams(**GREEDY, allowed_token_ids=list(range(3, 500, 3)), repetition_penalty=1.2),
    SamplingParams(**GREEDY, logit_bias={5: 4.0, 9: 4.0, 77: 3.0, 12: -50.0}, frequency_penalty=1.0),
]
"""Without bad words, which come as text: those are in the tests of the demo model."""


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@torch.inference_mode()
def reference(model: LlamaForCausalLM, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy decoding of one prompt alone, by the definitions."""
    assert params.max_tokens is not None
    output: list[int] = []
    cached, inputs = None, torch.tensor([prompt])
    for _ in range(params.max_tokens):
        result = model(inputs, cache=cached, use_cache=True)
        cached, logits = result.cache, result.logits[0, -1].clone()
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(len(logits), dtype=torch.bool)
            forbidden[params.allowed_token_ids] = False
            logits[forbidden] = float("-inf")
        for token_id, bias in (params.logit_bias or {}).items():
            logits[token_id] += bias
        known = sorted({*prompt, *output})
        values, counts = logits[known], torch.tensor([output.count(token_id) for token_id in known])
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[known] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        output.append(int(logits.argmax()))
        inputs = torch.tensor([output[-1:]])
    return output


@pytest.fixture(scope="module")
def workload_of_kinds(
    checkpoint: Callable[[str], Path],
) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    model = LlamaForCausalLM.from_pretrained(checkpoint("tied-gqa"), dtype=torch.float32).eval()
    prompts = make_prompts(24, 515, max_length=90)
    params = [KINDS[i % len(KINDS)] for i in range(len(prompts))]
    return prompts, params, [reference(model, *pair) for pair in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(("budget", "num_blocks"), [(8, 9), (64, 512), (512, 25)])
def test_greedy_tokens_are_those_of_the_definitions(
    budget: int, num_blocks: int, checkpoint: Callable[[str], Path],
    workload_of_kinds: tuple[list[list[int]], list[SamplingParams], list[list[int]]],
) -> None:  # fmt: skip
    prompts, params, expected = workload_of_kinds
    llm = LLM(
        checkpoint("tied-gqa"), dtype="float32", max_model_len=128, max_num_batched_tokens=budget, max_num_seqs=7,
        kv_cache_memory_bytes=num_blocks * 2 * 2 * 2 * 16 * 16 * 4,
    )  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [token_ids(output) for output in outputs] == expected
    assert (llm.get_stats().num_preemptions > 0) == (num_blocks < 512)
    plain = [reference_tokens for reference_tokens, one in zip(expected, params, strict=True) if one == KINDS[0]]
    assert len(plain) == 4


def test_they_are_on_forced_kernels(
    forced_kernels: str, checkpoint: Callable[[str], Path],
    workload_of_kinds: tuple[list[list[int]], list[SamplingParams], list[list[int]]],
) -> None:  # fmt: skip
    test_greedy_tokens_are_those_of_the_definitions(64, 512, checkpoint, workload_of_kinds)


# -- seeded, on the demo model -----------------------------------------------------------------------------------------

PROMPT = "def fib(n):\n"
SEEDED: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True}
SEEDED_KINDS = [
    SamplingParams(**SEEDED, seed=1, repetition_penalty=1.3, top_p=0.9),
    SamplingParams(**SEEDED, seed=2, presence_penalty=1.0, frequency_penalty=0.5, temperature=0.8),
    SamplingParams(**SEEDED, seed=3, bad_words=["self", "return", "n", ":\n"], repetition_penalty=1.1, top_k=50),
    SamplingParams(**SEEDED, seed=4, logit_bias={300: 5.0, 10: -3.0}, frequency_penalty=1.5, min_p=0.01),
    SamplingParams(**SEEDED, seed=5, allowed_token_ids=list(range(2, 900)), min_tokens=10, presence_penalty=-1.0),
]
BLOCK_BYTES = 2 * 6 * 4 * 16 * 32 * 4


def others(count: int) -> tuple[list[str], list[SamplingParams]]:
    kinds = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(max_tokens=30, frequency_penalty=2.0, bad_words=["x"]),
        SamplingParams(max_tokens=20, allowed_token_ids=[5, 6, 7, 8], logit_bias={5: 9.0}),
        SamplingParams(temperature=0, max_tokens=50, repetition_penalty=1.5, prompt_logprobs=1),
    ]
    return [f"class C{i}:\n    x = {i}\n" for i in range(count)], [kinds[i % len(kinds)] for i in range(count)]


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[], list[list[int]]]:
    @cache
    def make() -> list[list[int]]:
        llm = LLM(checkpoint("tinypy"), dtype="float32", enable_prefix_caching=False)
        return [token_ids(llm.generate(PROMPT, params, use_tqdm=False)[0]) for params in SEEDED_KINDS]

    return make


@pytest.mark.parametrize(("budget", "prefix_caching"), [(8, True), (64, False), (512, True)])
def test_same_tokens_in_a_batch_of_32(
    budget: int, prefix_caching: bool, alone: Callable[[], list[list[int]]], checkpoint: Callable[[str], Path]
) -> None:
    llm = LLM(
        checkpoint("tinypy"), dtype="float32", max_num_batched_tokens=budget, enable_prefix_caching=prefix_caching
    )
    prompts, params = others(32 - len(SEEDED_KINDS))
    for _ in range(2):  # slots are reused, and where there is a prefix cache, it has the prompts
        outputs = llm.generate(
            [*prompts[:10], *[PROMPT] * len(SEEDED_KINDS), *prompts[10:]],
            [*params[:10], *SEEDED_KINDS, *params[10:]],
            use_tqdm=False,
        )
        assert [token_ids(output) for output in outputs[10 : 10 + len(SEEDED_KINDS)]] == alone()


def test_same_tokens_after_preemption(alone: Callable[[], list[list[int]]], checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("tinypy"), dtype="float32", max_model_len=128, kv_cache_memory_bytes=14 * BLOCK_BYTES)
    prompts, params = others(8)
    outputs = llm.generate([*prompts, *[PROMPT] * len(SEEDED_KINDS)], [*params, *SEEDED_KINDS], use_tqdm=False)[8:]
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None) > 0
    assert [token_ids(output) for output in outputs] == alone()


def test_what_each_parameter_promises(alone: Callable[[], list[list[int]]], checkpoint: Callable[[str], Path]) -> None:
    """The tokens above were not the same because nothing had any effect."""
    llm = LLM(checkpoint("tinypy"), dtype="float32")
    without = [SamplingParams(**SEEDED, seed=p.seed, temperature=p.temperature, top_k=p.top_k) for p in SEEDED_KINDS]
    free = [token_ids(output) for output in llm.generate([PROMPT] * 5, without, use_tqdm=False)]
    assert all(mine != other for mine, other in zip(alone(), free, strict=True))
    decode = llm._inputs.tokenizer.decode
    assert max(alone()[4]) < 900
    for word in ("self", "return"):
        assert word not in decode(alone()[2]).split()
