"""`LLM.encode`: hidden states are those of transformers, however the prompts are computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, PoolingParams, SamplingParams
from quire_engine.errors import RequestError
from quire_engine.sampling_params import RequestOptions
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from transformers import AutoModelForCausalLM

NAME = "untied-mha"
PROMPTS = [*make_prompts(12, 515, max_length=120), [7], [7, 8]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 160}
LAST, MEAN = PoolingParams(normalize=False), PoolingParams(normalize=False, pooling_type="MEAN")
BLOCK_BYTES = 2 * 2 * 4 * 16 * 16 * 4
"""Keys and values of 16 tokens in 2 layers of 4 heads of 16 float32 numbers."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def hidden(checkpoint: Callable[[str], Path]) -> list[torch.Tensor]:
    """Of each prompt, what transformers' model computes: [T, E]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(NAME), dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def check(llm: LLM, expected: list[torch.Tensor], params: PoolingParams = LAST) -> list[int]:
    """Encode all prompts; returns how many tokens of each were cached."""
    outputs = llm.encode(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output, want in zip(outputs, expected, strict=True):
        assert output.finished
        assert output.outputs.data.dtype == torch.float32
        torch.testing.assert_close(output.outputs.data, want, atol=2e-5, rtol=1e-4)
    assert llm.get_stats().num_blocks_used == 0
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(("budget", "num_blocks"), [(8, 512), (8, 11), (512, 512)])
def test_the_last_hidden_state(
    budget: int, num_blocks: int, checkpoint: Callable[[str], Path], hidden: list[torch.Tensor]
) -> None:
    """Chunked, in one step, with a cache that holds few prompts, and from the prefix cache."""
    llm = LLM(
        checkpoint(NAME), **SETTINGS, max_num_batched_tokens=budget, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES
    )
    check(llm, [one[-1] for one in hidden])
    hits = check(llm, [one[-1] for one in hidden])
    if num_blocks == 512:
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_of_several_ranks(
    tensor: int, pipeline: int, checkpoint: Callable[[str], Path], hidden: list[torch.Tensor]
) -> None:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "max_num_batched_tokens": 32}
    with llm_of_thread_ranks(checkpoint(NAME), **SETTINGS, **sizes) as llm:
        for _ in range(2):
            check(llm, [one[-1] for one in hidden])


@pytest.mark.parametrize(("budget", "num_blocks"), [(8, 512), (8, 11), (512, 512)])
def test_a_task_that_reads_every_position(
    budget: int, num_blocks: int, checkpoint: Callable[[str], Path], hidden: list[torch.Tensor]
) -> None:
    llm = LLM(
        checkpoint(NAME), **SETTINGS, max_num_batched_tokens=budget, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES
    )
    for _ in range(2):
        hits = check(llm, [one.mean(0) for one in hidden], MEAN)
        assert hits == [0] * len(PROMPTS), "a position that is not computed has no hidden state"


@pytest.mark.parametrize("settings", [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}])
def test_beside_requests_that_generate(
    settings: dict[str, Any], checkpoint: Callable[[str], Path], hidden: list[torch.Tensor]
) -> None:
    llm = LLM(checkpoint(NAME), **SETTINGS, **settings, max_num_batched_tokens=64)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm.reset_prefix_cache()
    requests = [
        llm._inputs.process(prompt, GREEDY, options=RequestOptions(pooling_params=LAST if i % 2 else None))
        for i, prompt in enumerate(PROMPTS)
    ]
    for i, output in enumerate(llm._run_all(requests, use_tqdm=False)):
        if i % 2:
            assert output.pooled is not None
            pooled = torch.tensor(output.pooled.array())
            torch.testing.assert_close(pooled, hidden[i][-1], atol=2e-5, rtol=1e-4)
            assert output.outputs[0].token_ids == []
            assert output.outputs[0].finish_reason == "stop"
        else:
            assert output.outputs[0].token_ids == expected[i]
            assert output.pooled is None


def test_hidden_states_in_and_out(checkpoint: Callable[[str], Path], hidden: list[torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(NAME), dtype=torch.float32).eval()
    embeds = model.get_input_embeddings()(torch.tensor(PROMPTS[0]))
    llm = LLM(checkpoint(NAME), **SETTINGS)
    (output,) = llm.encode({"prompt_embeds": embeds}, LAST, use_tqdm=False)
    torch.testing.assert_close(output.outputs.data, hidden[0][-1], atol=2e-5, rtol=1e-4)
    (half,) = LLM(checkpoint(NAME), dtype="bfloat16", max_model_len=160).encode(PROMPTS[:1], LAST, use_tqdm=False)
    torch.testing.assert_close(half.outputs.data, hidden[0][-1], atol=0.1, rtol=0.1)
    assert llm.encode([], use_tqdm=False) == []


def test_an_unknown_task_is_said() -> None:
    with pytest.raises(RequestError, match="task is 'max'; it must be one of embed"):
        PoolingParams(task="max")
