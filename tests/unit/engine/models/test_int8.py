"""W8A8: what it costs in quality, and what it saves in memory."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import VocabParallel
from quire_engine.models.linear import int8
from quire_engine.models.linear.int8 import QuantizedWhenLoaded
from quire_engine.models.loader import load_model
from quire_kernels import linear, pack_linear
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[4]
TINYPY = ROOT / "model_repository" / "tinypy" / "1" / "model"
WINDOW = 500
NUM_WINDOWS = 10


def score(**settings: str) -> tuple[float, list[int]]:
    """Perplexity and the most likely tokens on source text that the model was not trained on: this project's own."""
    text = "".join(path.read_text() for path in sorted((ROOT / "engine").rglob("*.py")))[: 10 * WINDOW * NUM_WINDOWS]
    llm = LLM(TINYPY, max_num_seqs=8, **settings)
    token_ids = llm._inputs.tokenizer.encode(text)
    assert len(token_ids) > WINDOW * NUM_WINDOWS
    prompts = [token_ids[i * WINDOW : (i + 1) * WINDOW] for i in range(NUM_WINDOWS)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    losses, best = [], []
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token_id].logprob)
            best.append(next(i for i, one in entry.items() if one.rank == 1))
    return math.exp(sum(losses) / len(losses)), best


@pytest.fixture(scope="module")
def unquantized() -> tuple[float, list[int]]:
    return score(dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "largest", "least"), [("int8", 1.02, 0.9), ("int4", 1.1, 0.8)])
def test_perplexity_stays_near(
    quantization: str,
    largest: float,
    least: float,
    unquantized: tuple[float, list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    perplexity, best = unquantized
    quantized, quantized_best = score(dtype="bfloat16", quantization=quantization)
    agreement = sum(a == b for a, b in zip(best, quantized_best, strict=True)) / len(best)
    with capsys.disabled():
        print(
            f"\nperplexity on {len(best)} tokens: bfloat16 {perplexity:.3f}, {quantization} {quantized:.3f} "
            f"({quantized / perplexity:.4f}); the most likely token agrees in {agreement:.1%}"
        )
    assert quantized != perplexity, f"{quantization} was not used"
    assert quantized / perplexity < largest
    assert agreement > least


def compressed_tensors(folder: Path, source: Path = TINYPY, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """Write a model as others quantise it: int8 weights and scales in the files. Returns its configuration.

    Args:
        folder: to write to.
        source: the model; unset: the demo model.
        ignored: what is not quantised besides the head.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", *ignored],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_a_quantised_checkpoint_is_the_same_as_one_quantised_when_loaded(tmp_path: Path) -> None:
    compressed_tensors(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["def main():\n", "class Server:\n    def __init__(self", "import os\n\n"]
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (LLM(folder, quantization="int8") for folder in (TINYPY, tmp_path))
    ]
    assert texts[0] == texts[1]
    # Without the setting, the head stays as the checkpoint has it.
    assert LLM(tmp_path).generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids == texts[0][0]


def test_the_head_loses_less_to_int8_than_it_would_with_activations_of_8_bits() -> None:
    model = LLM(TINYPY, dtype="bfloat16", quantization="int8")._core.executor._worker.runner.model
    assert all(layer.mlp.down_proj.packed.is_quantized for layer in model.layers.values())
    table = load_file(TINYPY / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    assert model.head.packed.data.nbytes < 0.6 * table.nbytes
    hidden = torch.randn(64, table.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[:, ::50] *= 30  # as of trained models, whose few large activations leave the others few of 8 bits
    exact = hidden.float() @ table.float().t()

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).norm() / exact.norm())

    of_head = error(model.head.logits(hidden))
    assert 0 < of_head < 0.01 < error(linear(hidden, pack_linear(table, quantize=True), torch.float32))


def test_a_first_stage_embeds_what_the_whole_model_does() -> None:
    config, token_ids = CheckpointConfig.from_folder(TINYPY), torch.arange(50)
    assert config.tie_word_embeddings
    embedded = [
        load_model(
            TINYPY, config, torch.float32, 64, ParallelState(rank=0, pipeline_parallel_size=stages), "int8"
        ).embed_tokens.embed(token_ids)
        for stages in (1, 2)
    ]
    assert torch.equal(embedded[0], embedded[1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_where_no_kernel_takes_16_bits_the_head_is_not_quantised(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "uses_triton", lambda tensor: True)
    head = VocabParallel(40, 8, ParallelState(), is_head=True)
    head.create(QuantizedWhenLoaded(dtype))
    head.pack()
    assert not head.packed.is_quantized


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("mixtral", ("re:.*block_sparse_moe.gate$",)),
        ("qwen2-moe", ("model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate")),
    ],
)
def test_experts_may_be_quantised_already(
    name: str, ignored: tuple[str, ...], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    compressed_tensors(tmp_path, checkpoint(name), ignored)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [[5, 9, 200, 31], [7] * 20, [*range(2, 90)]]
    tokens = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (LLM(folder, quantization="int8") for folder in (checkpoint(name), tmp_path))
    ]
    assert tokens[0] == tokens[1]


def test_a_layer_that_is_not_quantised_beside_one_that_is_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj"
    compressed_tensors(tmp_path, ignored=(name,))
    tensors = load_file(tmp_path / "model.safetensors")
    weight = tensors.pop(f"{name}.weight") * tensors.pop(f"{name}.weight_scale")
    save_file({**tensors, f"{name}.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="are quantised in different ways; they are computed as one"):
        LLM(tmp_path)


def test_other_kinds_of_quantisation_are_refused_by_name(tmp_path: Path) -> None:
    config = compressed_tensors(tmp_path)
    config["quantization_config"]["format"] = "marlin-24"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"compressed-tensors, format marlin-24, with .*; of quantised"):
        LLM(tmp_path)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_scale has no place|is I8; quantization_config"):
        LLM(tmp_path)
