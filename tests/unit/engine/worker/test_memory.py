"""How much of the memory the KV cache gets, and what is said when that is nothing."""

from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.memory import resident_memory_bytes

TINYPY = Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model"


def test_too_small_a_share_of_the_memory_names_the_setting_that_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization is 1e-07: .* raise it, or set kv_cache_memory_bytes"
    ):
        LLM(str(TINYPY), max_model_len=64, max_num_batched_tokens=64, gpu_memory_utilization=1e-7)


def test_a_cache_that_nobody_has_used_is_no_memory() -> None:
    size = 512 << 20
    before = resident_memory_bytes()
    llm = LLM(TINYPY, kv_cache_memory_bytes=size, max_num_seqs=4)
    assert resident_memory_bytes() - before < size / 2
    llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
    assert resident_memory_bytes() - before < size / 2
