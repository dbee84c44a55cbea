"""The engine on the kernels of GPUs, in Triton's interpreter: the tokens of transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_kernels import cpu
from support.oracle import VOCAB_SIZE, generate_greedily, make_prompts
from support.triton_interpreter import interpreted_kernels
from transformers import LlamaForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar"),  # triton 3.6 with numpy
    pytest.mark.usefixtures("_interpreter"),
]


@pytest.fixture
def _interpreter() -> Iterator[None]:
    from quire_kernels.gpu.interpreter import INTERPRETED

    if not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    with interpreted_kernels():
        yield


@pytest.mark.parametrize("name", ["odd-sizes", "llama3-rope"])
def test_greedy_tokens_are_those_of_transformers(name: str, checkpoint: Callable[[str], Path]) -> None:
    """In chunks and in a batch whose sequences come and go: of three, their step is one for four."""
    folder, prompts, num_tokens = checkpoint(name), make_prompts(4, VOCAB_SIZE, max_length=40), [3, 1, 4, 2]
    settings = {"max_num_seqs": 5, "max_model_len": 64, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    llm = LLM(folder, dtype="float32", **settings)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in num_tokens]
    outputs = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [generate_greedily(model, *one).token_ids for one in zip(prompts, num_tokens, strict=True)]
    assert outputs == expected


PARAMETERS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=2.0, top_k=20, seed=2, max_tokens=2, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, min_p=0.05, seed=3, max_tokens=4, repetition_penalty=1.5, min_tokens=2),
]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"enforce_eager": True, "quantization": "fp8", "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_seeded_tokens_are_those_of_the_other_kernels(
    settings: dict[str, Any], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows are plain, where one wants more than a graph has, ahead of the results, and in fp8 op by op."""
    folder, prompts = checkpoint("tied-gqa"), make_prompts(3, VOCAB_SIZE, max_length=10)
    settings = {"max_num_seqs": 5, "max_model_len": 32, "quantization": "int8", **settings}
    outputs = {}
    for kernels in (cpu.INTERPRETER, "torch"):
        monkeypatch.setenv(cpu.KERNELS_VARIABLE, kernels)
        cpu.status.cache_clear()
        llm = LLM(folder, dtype="float32", **settings)
        outputs[kernels] = [one.outputs[0].token_ids for one in llm.generate(prompts, PARAMETERS, use_tqdm=False)]
    assert outputs[cpu.INTERPRETER] == outputs["torch"]
