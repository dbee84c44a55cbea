"""Medusa heads: what they compute, in which forms they are stored, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig
from quire_engine.models.loader import load_model
from quire_engine.models.medusa import MedusaCheckpoint, MedusaHeads, load_medusa
from safetensors.torch import load_file, save_file
from support.checkpoints import POINTER, write_checkpoint

Tensors = dict[str, torch.Tensor]
SIZE, VOCAB_SIZE = 64, 515  # of the targets


def make_tensors(num_heads: int, num_layers: int, num_matrices: int, bias: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = torch.randn(SIZE, SIZE, generator=generator) / 8
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = torch.randn(SIZE, generator=generator)
    names = ["lm_head"] if num_matrices == 1 else [f"lm_heads.{i}" for i in range(num_matrices)]
    return tensors | {f"{name}.weight": torch.randn(VOCAB_SIZE, SIZE, generator=generator) / 8 for name in names}


def reference(tensors: Tensors, hidden_SE: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
    """[S, E] -> [S, heads, V]: the paper's formula, head by head."""
    logits = []
    for i in range(len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})):
        x = hidden_SE
        for j in range(len([name for name in tensors if name.startswith(f"blocks.{i}.") and name.endswith("weight")])):
            name = f"blocks.{i}.layers.{j}"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
        matrix = tensors.get(f"lm_heads.{i}.weight", tensors.get("lm_head.weight", targets))
        assert matrix is not None
        logits.append(F.linear(x, matrix))
    return torch.stack(logits, dim=1)


@pytest.fixture
def target(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("untied-mha")


def load(
    folder: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    parallel: ParallelState = ParallelState(),
) -> MedusaHeads:
    config = CheckpointConfig.from_folder(target)
    model = load_model(target, config, dtype, 64, parallel, quantization)
    with torch.inference_mode():
        return load_medusa(folder, target, config, model, quantization)


def hidden_states() -> torch.Tensor:
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))


def refusal(folder: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        MedusaCheckpoint.from_folder(folder, CheckpointConfig.from_folder(target))
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("num_layers", "bias"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("num_matrices", [3, 1])
def test_each_head_computes_what_the_paper_says(
    num_layers: int, bias: bool, num_matrices: int, target: Path, tmp_path: Path
) -> None:
    tensors = make_tensors(3, num_layers, num_matrices, bias)
    folder = write_checkpoint(tmp_path, {"num_heads": 3, "num_hidden_layers": num_layers}, tensors)
    heads, hidden = load(folder, target), hidden_states()
    logits = heads.logits(hidden.clone())
    assert (heads.num_heads, logits.shape, logits.dtype) == (3, (5, 3, VOCAB_SIZE), torch.float32)
    torch.testing.assert_close(logits, reference(tensors, hidden), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.bfloat16, None), (torch.bfloat16, "int8")])
@pytest.mark.parametrize("num_matrices", [3, 0])
def test_they_compute_in_the_types_of_the_target(
    dtype: torch.dtype, quantization: str | None, num_matrices: int, target: Path, tmp_path: Path
) -> None:
    tensors, hidden = make_tensors(3, 2, num_matrices), hidden_states()
    fields = {"medusa_num_heads": 3, "medusa_num_layers": 2, "original_lm_head": not num_matrices}
    heads = load(write_checkpoint(tmp_path, fields, tensors), target, dtype, quantization)
    assert heads.first_layers.packed.is_quantized == (quantization is not None)
    logits = heads.logits(hidden.to(dtype))
    assert logits.dtype == torch.float32
    exact = reference(tensors, hidden, load_file(target / "model.safetensors")["lm_head.weight"])
    error = (logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-5 < error < 0.03


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_the_authors_names_are_read_as_well(prefix: str, target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(2, 2, 2)
    theirs = {}
    for name, tensor in tensors.items():
        kind, head, *layer, what = name.replace(".layers", "").split(".")
        theirs[f"{prefix}{head}.{layer[0]}.linear.{what}" if kind == "blocks" else f"{prefix}{head}.2.weight"] = tensor
    assert f"{prefix}1.0.linear.bias" in theirs
    folder = write_checkpoint(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 2}, theirs)
    logits = load(folder, target).logits(hidden_states())
    torch.testing.assert_close(logits, reference(tensors, hidden_states()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["untied-mha", "tied-gqa"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_without_output_matrices_use_the_targets(
    ranks: int, name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors, target = make_tensors(3, 1, 0), checkpoint(name)
    folder = write_checkpoint(tmp_path, {"num_heads": 3, "original_lm_head": True}, tensors)
    heads = load(folder, target, parallel=ParallelState(rank=0, tensor_parallel_size=ranks))
    assert (heads.lm_head is None) == (ranks == 1), "a matrix of its own only where the target has a slice"
    stored = load_file(target / "model.safetensors")
    whole = stored["model.embed_tokens.weight" if name == "tied-gqa" else "lm_head.weight"]
    torch.testing.assert_close(
        heads.logits(hidden_states()), reference(tensors, hidden_states(), whole), rtol=1e-4, atol=1e-3
    )


def test_one_matrix_in_the_place_of_the_first_heads_is_for_all(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(3, 1, 1)
    stored = {name.replace("lm_head.", "lm_heads.0."): tensor for name, tensor in tensors.items()}
    folder = write_checkpoint(tmp_path, {"num_heads": 3, "original_lm_head": True}, stored)
    logits = load(folder, target).logits(hidden_states())
    torch.testing.assert_close(logits, reference(tensors, hidden_states()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_heads", [1, 2])
def test_fewer_heads_than_were_trained(num_heads: int, target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(3, 1, 3)
    heads = load(write_checkpoint(tmp_path, {"num_heads": num_heads}, tensors), target)
    expected = reference(tensors, hidden_states())[:, :num_heads]
    torch.testing.assert_close(heads.logits(hidden_states()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": None}, "medusa_num_heads is missing"),
        ({"num_heads": 0}, "num_heads is 0; it must be an integer from 1 to 64"),
        ({"num_heads": "3"}, "num_heads is '3'; it must be an integer"),
        ({"num_heads": 10**9}, "num_heads is 1000000000; it must be an integer"),
        ({"num_heads": 4}, "hold no blocks.3.layers.0.weight, blocks.3.layers.0.bias, lm_heads.3.weight"),
        ({"medusa_num_layers": 2}, "hold no blocks.0.layers.1.weight, "),
        ({"num_hidden_layers": 65}, "num_hidden_layers is 65; it must be an integer from 1 to 64"),
        ({"hidden_size": 63}, "hidden_size is 63; it must be 64, as in the model that is drafted for"),
        ({"vocab_size": 32000}, "vocab_size is 32000; it must be 515, as in the model that is drafted for"),
        ({"truncated_vocab_size": 100}, "truncated_vocab_size is 100; it must be vocab_size=515: "),
        ({"original_lm_head": 1}, "original_lm_head is 1; it must be true or false"),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    fields = {"num_heads": 3, "vocab_size": VOCAB_SIZE, "truncated_vocab_size": VOCAB_SIZE, "hidden_size": SIZE}
    tensors = make_tensors(3, 1, 3)
    MedusaCheckpoint.from_folder(write_checkpoint(tmp_path, fields, tensors), CheckpointConfig.from_folder(target))
    assert message in refusal(write_checkpoint(tmp_path, {**fields, **changes}, tensors), target)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blocks.1.layers.0.weight", torch.zeros(SIZE, 2 * SIZE), "has shape (64, 128); config.json asks for (64, 64)"),
        ("lm_heads.2.weight", torch.zeros(100, SIZE), "has shape (100, 64); config.json asks for (515, 64)"),
        ("blocks.1.layers.0.bias", torch.zeros(SIZE, dtype=torch.int8), "is I8; "),
        ("blocks.1.layers.1.weight", torch.zeros(SIZE, SIZE), "has no place in this architecture"),
        ("token_map", torch.zeros(100, dtype=torch.int64), "has no place in this architecture"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_tensor_that_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor, message: str, target: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, {"num_heads": 3}, {**make_tensors(3, 1, 3), name: tensor})
    assert f"model.safetensors: tensor {name} {message}" in refusal(folder, target)


def test_a_bias_that_one_block_lacks_is_named(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(3, 1, 3)
    del tensors["blocks.1.layers.0.bias"]
    folder = write_checkpoint(tmp_path, {"num_heads": 3}, tensors)
    assert refusal(folder, target).endswith("hold no blocks.1.layers.0.bias")


def test_pickled_weights_are_refused_unread(target: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"num_heads": 3}, {})
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")
    message = "only safetensors are read: convert 'medusa_lm_head.pt' with safetensors.torch.save_file"
    assert refusal(folder, target).endswith(message)


def test_folders_and_files_that_are_none_are_refused(target: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "x", target).startswith(f"speculative_config: model: there is no folder {tmp_path / 'x'}")
    assert "there is no config.json" in refusal(tmp_path, target)
    folder = write_checkpoint(tmp_path, {"num_heads": 3}, {})
    (folder / "model.safetensors").write_text(POINTER)
    assert "model.safetensors is a git-LFS pointer" in refusal(folder, target)


def test_weights_that_are_no_finite_numbers_are_refused(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors(3, 1, 3)
    tensors["blocks.2.layers.0.weight"][5, 6] = math.nan
    save_file(tensors, write_checkpoint(tmp_path, {"num_heads": 3}, {}) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor blocks\.2\.layers\.0\.weight holds nan; weights must be finite"):
        load(tmp_path, target)
