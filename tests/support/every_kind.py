"""Requests of every kind there is, and what a caller hears of them: for settings that must not change a token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.core.engine_core import EngineCore
from quire_engine.outputs import RequestOutput

__all__ = ["BLOCK_BYTES", "KINDS", "PARAMS", "PROMPTS", "WAYS", "Told", "assert_told", "core_of", "make_llm"]

BLOCK_BYTES = 2 * 6 * 4 * 16 * 32 * 4
"""Of the demo model, in float32."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"seed": 1},
    "seeded with masks": {"seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "presence penalty": {"temperature": 0, "presence_penalty": 1.5, "ignore_eos": True},
    "bad words": {"seed": 4, "bad_words": ["self", "return x", "def f(", "import os"], "ignore_eos": True},
    "biases": {"seed": 5, "logit_bias": {300: 4.0, 10: -3.0}, "allowed_token_ids": list(range(2, 900))},
    "log-probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True},
    "min_tokens": {"temperature": 0, "min_tokens": 20},
    "stop strings": {"temperature": 0, "stop": ["\n\n", "self", ")"]},
    "stop tokens": {"seed": 6, "stop_token_ids": list(range(10, 500, 7)), "min_tokens": 2},
    "one token": {"seed": 7, "max_tokens": 1},
    "regex": {"seed": 8, "structured_outputs": {"regex": "[a-z]{3,9}( = [0-9]{1,6})?"}},
    "json": {"temperature": 0, "structured_outputs": {"json": SCHEMA}},
}
PROMPTS = [f"class C{i}:\n    x = {i}\n" for i in range(len(KINDS))] + ["def fib(n):\n"] * len(KINDS)
PARAMS = [SamplingParams.from_mapping({"max_tokens": 32, **kind}) for kind in [*KINDS.values()] * 2]
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few blocks": {"kv_cache_memory_bytes": 14 * BLOCK_BYTES},
    "small steps": {"max_num_batched_tokens": 8, "max_num_seqs": 5, "enable_prefix_caching": False},
}


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "max_model_len": 128, "device": "cpu", **settings})


def core_of(llm: LLM) -> EngineCore:
    core: EngineCore = llm._core  # type: ignore[attr-defined]
    return core


class Told:
    """All that a caller hears of a request."""

    def __init__(self, output: RequestOutput) -> None:
        (completion,) = output.outputs
        self.text = (completion.token_ids, completion.text, output.error)
        self.end = (completion.finish_reason, completion.stop_reason)
        entries = [entry for entry in [*(output.prompt_logprobs or ()), *(completion.logprobs or ())] if entry]
        self.ranks = [(token_id, item.rank) for entry in entries for token_id, item in entry.items()]
        self.logprobs = [item.logprob for entry in entries for item in entry.values()]


def assert_told(outputs: Sequence[RequestOutput], expected: Sequence[Told]) -> None:
    """Fail unless the callers of `PROMPTS` hear what is expected: to the letter, but for the last digits of
    log-probabilities."""
    for output, want, name in zip(outputs, expected, [*KINDS] * 2, strict=True):
        told = Told(output)
        assert (told.text, told.end, told.ranks) == (want.text, want.end, want.ranks), name
        assert told.logprobs == pytest.approx(want.logprobs, abs=1e-4), name
        assert bool(told.logprobs) == (name == "log-probabilities")
