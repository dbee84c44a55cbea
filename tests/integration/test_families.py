"""Checkpoints of each family, served by a real tritonserver, say what transformers says."""

from pathlib import Path

import pytest
from quire_engine.frontend.tokenizer import load_tokenizer
from support.clients import ask_all
from support.serving import CHECKPOINT, SMALL, add_model, serve

pytestmark = [pytest.mark.server, pytest.mark.slow]

FAMILIES = ["qwen2", "qwen3"]
NUM_TOKENS = 24


def test_families_are_served(tmp_path: Path) -> None:
    # Not every process that collects this file spends two seconds on transformers.
    import torch
    from support.oracle import generate_greedily, make_checkpoint, make_prompts
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(CHECKPOINT)
    requests, expected = [], []
    for name in FAMILIES:
        folder = make_checkpoint(tmp_path / "checkpoints" / name, name, tokenizer)
        add_model(tmp_path / "models", name, {**SMALL, "model": str(folder), "max_model_len": 256})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt in make_prompts(8, model.config.vocab_size, max_length=100):
            requests.append({"model": name, "input_ids": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True,
                             "temperature": 0.0, "stream": True, "return_token_ids": True})  # fmt: skip
            expected.append(generate_greedily(model, prompt, NUM_TOKENS).token_ids)
    with serve("--model-repository", str(tmp_path / "models")) as server:
        answers = ask_all(server, requests)
    assert [answer.token_ids for answer in answers] == expected
