"""Checkpoints and their expected outputs, made once per session; workers that fail on demand."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE
from support.faults import put_fault
from support.oracle import CHECKPOINTS, Expected, generate_greedily, make_checkpoint, make_prompts
from transformers import AutoModelForCausalLM

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a checkpoint by name: one of the oracle's seeded random ones, or the demo model."""
    tokenizer = load_tokenizer(TINYPY)

    @cache
    def make(name: str) -> Path:
        if name == "tinypy":
            return TINYPY
        assert name in CHECKPOINTS
        return make_checkpoint(tmp_path_factory.mktemp(name), name, tokenizer)

    return make


@pytest.fixture(scope="session")
def workload(
    checkpoint: Callable[[str], Path],
) -> Callable[[str], tuple[list[list[int]], list[int], list[Expected]]]:
    """64 prompts of mixed lengths, how many tokens each gets, and what transformers makes of them."""

    @cache
    def make(name: str) -> tuple[list[list[int]], list[int], list[Expected]]:
        model = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
        prompts = make_prompts(64, model.config.vocab_size, max_length=120)
        lengths = [8 + (i * 7) % 25 for i in range(len(prompts))]
        expected = [generate_greedily(model, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
        return prompts, lengths, expected

    return make


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Has workers fail; see `quire_engine.worker.fault_injection`."""
    file = tmp_path / "fault.json"
    monkeypatch.setenv(FAULT_INJECTION_VARIABLE, str(file))

    def write(**fields: Any) -> Path:
        put_fault(file, **fields)
        return file

    return write
