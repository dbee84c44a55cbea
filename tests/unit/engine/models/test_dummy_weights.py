"""`load_format="dummy"`: random weights, of a checkpoint without weight files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.layers.parallel import load_targets
from quire_engine.models.loader import DUMMY_STD, load_model

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}
PROMPTS = [[5, 6, 7], list(range(40))]


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint without its weights."""
    shutil.copytree(checkpoint("untied-mha"), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safe*"))
    return tmp_path


def generate(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(folder, load_format="dummy", max_num_seqs=2, kv_cache_memory_bytes=1 << 20, **settings)
    try:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    finally:
        llm.shutdown()


def test_generates_the_same_each_time(folder: Path) -> None:
    tokens = generate(folder, dtype="float32")
    assert [len(one) for one in tokens] == [6, 6]
    assert generate(folder, dtype="float32") == tokens


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_generates_in_other_types(folder: Path, settings: dict[str, str]) -> None:
    assert [len(one) for one in generate(folder, **settings)] == [6, 6]


def test_generates_with_a_checkpoint_of_int8(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
    assert [len(one) for one in generate(folder)] == [6, 6]


def test_weights_are_small_and_each_tensors_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.models.layers.parallel.Packable.pack", lambda *_: None)
    config = CheckpointConfig.from_folder(folder)

    def parameters(parallel: ParallelState = ParallelState()) -> dict[str, torch.Tensor]:
        model = load_model(folder, config, torch.float32, 64, parallel, load_format="dummy")
        return {name: target.parameter for name, target in load_targets(model).items()}

    weights = parameters()
    up, gate = weights["layers.0.mlp.up_proj.weight"], weights["layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(up, gate)
    assert up.std().item() == pytest.approx(DUMMY_STD, rel=0.1)
    assert abs(up.mean().item()) < DUMMY_STD / 10
    second = parameters(ParallelState(rank=1, tensor_parallel_size=2))
    assert torch.equal(second["norm.weight"], weights["norm.weight"]), "ranks have to agree about this one"


def test_the_check_wants_a_tokenizer_but_no_weights(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        check_checkpoint(folder)
    assert check_checkpoint(folder, load_format="dummy") == CheckpointConfig.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        check_checkpoint(folder, load_format="dummy")
