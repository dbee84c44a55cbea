"""The benchmark of mixtures of experts: what a step has to read."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.harness.checkpoint_size import bytes_of_a_step
from safetensors.torch import save_file

NUM_EXPERTS, TOP_K, HIDDEN, SIZE = 4, 2, 8, 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fields = {"hidden_size": HIDDEN, "moe_intermediate_size": SIZE, "num_hidden_layers": 2}
    fields |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = {"model.embed_tokens.weight": torch.zeros(10, HIDDEN)}
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = torch.zeros(SIZE, HIDDEN)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_one_token_reads_its_own_experts(model: Path) -> None:
    expert = 3 * HIDDEN * SIZE
    assert bytes_of_a_step(model, 1, quantized=False) == 2 * (10 * HIDDEN + 2 * TOP_K * expert)
    assert bytes_of_a_step(model, 1, quantized=True) == 2 * 10 * HIDDEN + 2 * TOP_K * expert


def test_many_tokens_read_all_experts(model: Path) -> None:
    everything = 2 * (10 * HIDDEN + 2 * NUM_EXPERTS * 3 * HIDDEN * SIZE)
    assert bytes_of_a_step(model, 2, quantized=False) < 0.95 * everything
    assert bytes_of_a_step(model, 64, quantized=False) == pytest.approx(everything)
