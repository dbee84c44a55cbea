"""Encoders in an engine: prompts are computed whole, batched by tokens, and nothing is generated."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, EngineConfig, PoolingParams, SamplingParams
from quire_engine.core.core_process import _start_grammar_compiler
from quire_engine.errors import RequestError
from quire_engine.frontend.tokenizer import load_tokenizer
from support.encoders import expected_states, make_encoder
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from support.real_models import minilm
from transformers import AutoModel, AutoTokenizer

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
PROMPTS = [*make_prompts(20, 515, max_length=120), [7], [7, 8], list(range(2, 162))]
SETTINGS: dict[str, Any] = {"dtype": "float32", "weight_cache_dir": ""}
MEAN = PoolingParams(task="embed", pooling_type="MEAN", normalize=False)
TEXTS = [
    "A prompt that exceeds the budget takes several steps.", "Where is the cache?", "x", "naïve café ☃ 日本語",
    "The scheduler decides which tokens of which requests are computed in the next step. " * 12,
]  # fmt: skip


@pytest.fixture(scope="module", params=["bert", "modernbert", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    return make_encoder(path, request.param, load_tokenizer(TINYPY), torch.float32)


@pytest.fixture(scope="module")
def means(folder: Path) -> torch.Tensor:
    return torch.stack([one.mean(0) for one in expected_states(folder, PROMPTS)])


def encode(llm: LLM) -> torch.Tensor:
    outputs = llm.encode(PROMPTS, MEAN, use_tqdm=False)
    assert llm.get_stats().num_blocks_used == 0
    assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
    return torch.stack([output.outputs.data for output in outputs])


@pytest.mark.parametrize("settings", [
    {},
    {"max_num_batched_tokens": 8, "max_num_seqs": 3},
    {"long_prefill_token_threshold": 4, "kv_cache_memory_bytes": 2**18},
    {"scheduling_policy": "slo", "max_num_batched_tokens": 170},
    {"block_size": 8, "enforce_eager": True},
], ids=["default", "small budget", "few blocks", "slo", "blocks of 8"])  # fmt: skip
def test_prompts_are_computed_whole(folder: Path, means: torch.Tensor, settings: dict[str, Any]) -> None:
    """Also where the settings ask for chunks, the second time, and up to the last position; bit for bit the same."""
    llm = LLM(folder, **SETTINGS, **settings)
    first = encode(llm)
    torch.testing.assert_close(first, means, atol=1e-4, rtol=1e-4)
    assert torch.equal(encode(llm), first)
    alone = torch.stack([llm.encode([prompt], MEAN, use_tqdm=False)[0].outputs.data for prompt in PROMPTS[::7]])
    assert torch.equal(alone, first[::7])


def test_two_ranks(folder: Path, means: torch.Tensor) -> None:
    with llm_of_thread_ranks(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        torch.testing.assert_close(encode(llm), means, atol=1e-4, rtol=1e-4)


def test_two_ranks_have_the_biases_of_their_heads(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "mpnet", load_tokenizer(TINYPY), torch.float32)
    prompts = [[2 + token_id % 513 for token_id in prompt] for prompt in PROMPTS]  # 1 would be padding to transformers
    expected = torch.stack([one.mean(0) for one in expected_states(folder, prompts)])
    with llm_of_thread_ranks(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        found = torch.stack([output.outputs.data for output in llm.encode(prompts, MEAN, use_tqdm=False)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_nothing_is_generated(folder: Path) -> None:
    llm = LLM(folder, **SETTINGS)
    with pytest.raises(RequestError, match="does not generate"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    with pytest.raises(RequestError, match="161"):
        llm.encode([[1] * 161], MEAN, use_tqdm=False)
    assert llm.encode([[1] * 160], MEAN, use_tqdm=False)[0].finished


def test_no_grammar_compiler_is_started(folder: Path) -> None:
    """A model without an end-of-sequence token has none."""
    assert _start_grammar_compiler(EngineConfig.from_settings({"model": str(folder), **SETTINGS}).core, False) is None


def test_settings_of_generation_are_rejected(folder: Path) -> None:
    memory = {"kv_connector": "SharedMemoryConnector"}
    for settings in ({"speculative_config": {"method": "suffix"}}, {"kv_transfer_config": memory}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            LLM(folder, **SETTINGS, **settings)


@pytest.mark.skipif("QUIRE_SEQUENCES" not in os.environ, reason="large downloads")
@pytest.mark.parametrize(("kind", "least"), [("fp32", 0.99999), ("bf16", 0.9995), ("int8", 0.995)])
def test_minilm(kind: str, least: float) -> None:
    """Real weights: embeddings of texts, as sentence-transformers computes them, alone and together."""
    path = minilm()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path, dtype=torch.float32)
    expected = []
    with torch.inference_mode():
        for text in TEXTS:
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            expected.append(model(**inputs).last_hidden_state[0].mean(0))
    dtype, quantization = ("bfloat16" if kind == "bf16" else "float32"), ("int8" if kind == "int8" else None)
    llm = LLM(path, dtype=dtype, quantization=quantization, weight_cache_dir="")
    together = torch.stack([output.outputs.data for output in llm.encode(TEXTS, MEAN, use_tqdm=False)])
    assert torch.nn.functional.cosine_similarity(together, torch.stack(expected)).min() >= least
    alone = torch.stack([llm.encode([text], MEAN, use_tqdm=False)[0].outputs.data for text in TEXTS])
    assert torch.equal(alone, together)
