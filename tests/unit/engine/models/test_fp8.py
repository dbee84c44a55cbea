"""Checkpoints in fp8 with scales for blocks, as DeepSeek-V3 is published: dequantised when they are loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.latent_attention import _HeadProjections
from quire_engine.models.layers.parallel import Packable
from quire_engine.models.loader import load_model
from quire_engine.models.mtp import load_mtp
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
"""Blocks of which most of the matrices are no multiples."""
RANKS = [ParallelState(), ParallelState(rank=1, tensor_parallel_size=2)]
Tensors = dict[str, torch.Tensor]


def quantize(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers, the scales, and what they are together, block by block."""
    numbers, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[block].abs().max() / 448
            numbers[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[block] = numbers[block].float() * scales[i, j]
    return numbers, scales, exact


@pytest.fixture(scope="module")
def make(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """A family's checkpoint in fp8, with scales in another file than weights; and the same in float32."""

    def folders(name: str) -> tuple[Path, Path]:
        quantized, plain = (tmp_path_factory.mktemp(kind) for kind in ("fp8", "plain"))
        weights, numbers, scales = load_file(checkpoint(name) / "model.safetensors"), {}, {}
        for tensor, weight in list(weights.items()):
            if tensor.endswith(("_proj.weight", "_proj_with_mqa.weight")):
                numbers[tensor], scales[f"{tensor}_scale_inv"], weights[tensor] = quantize(weight, 24, 40)
        for folder in (quantized, plain):
            (folder / "config.json").write_text((checkpoint(name) / "config.json").read_text())
            (folder / "tokenizer.json").write_text("{}")
        save_file(weights, plain / "model.safetensors")
        save_shards(quantized, weights | numbers, scales)
        edit_json(quantized / "config.json", quantization_config=FP8)
        return quantized, plain

    return folders


def save_shards(folder: Path, *shards: Tensors) -> None:
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    weight_map = {name: f"{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    edit_json(index, weight_map=weight_map)


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    parallel: ParallelState = ParallelState(),
    quantization: str | None = None,
) -> Decoder:
    config = CheckpointConfig.from_folder(folder)
    return load_model(folder, config, dtype, max_model_len=8, parallel=parallel, quantization=quantization)


def packed(model: Decoder) -> list[torch.Tensor]:
    modules = [module for module in model.modules() if isinstance(module, Packable) and module.weight is None]
    heads = [module for module in modules if isinstance(module, _HeadProjections)]
    weights = [one.packed for module in heads for one in module.packed_weight]
    return [weight.data for weight in [*weights, *(module.packed for module in modules if module not in heads)]]


@pytest.mark.parametrize("parallel", RANKS, ids=["one rank", "tensor parallel"])
# Experts and latent attention; fused projections; and queries and keys in another order.
@pytest.mark.parametrize("name", ["deepseek-v3", "phi3", "glm4"])
def test_weights_are_numbers_times_scales(
    name: str,
    parallel: ParallelState,
    make: Callable[[str], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_engine.models.linear.base.BAND", 1000)  # several bands to a matrix
    folders = make(name)
    check_checkpoint(folders[0])
    for dtype, quantization in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")):
        ours, theirs = (packed(load(folder, dtype, parallel, quantization)) for folder in folders)
        assert len(ours) == len(theirs) > 4
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_the_layer_of_multi_token_prediction_is_dequantised_too(make: Callable[[str], tuple[Path, Path]]) -> None:
    folders = make("deepseek-v3-mtp")
    check_checkpoint(folders[0], drafts=("mtp", None))
    ours, theirs = (packed(load_mtp(one, CheckpointConfig.from_folder(one), load(one), 8)) for one in folders)
    assert len(ours) == len(theirs) > 4
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weight, scale: (weight, scale[:, 1:].clone()),
            r"is F32 of shape \(4, 2\); its weight asks for \(4, 3\)",
        ),
        (lambda weight, scale: (weight, scale.to(torch.int32)), r"is I32 of shape \(4, 3\); its weight asks for"),
        (lambda weight, scale: (weight, None), "o_proj.weight is F8_E4M3; quantization_config in config.json asks for"),
        (lambda weight, scale: (weight.float(), scale), "is F32 of shape .*; with .* must be a matrix of type F8_E4M3"),
        (
            lambda weight, scale: (weight, scale * torch.inf),
            "o_proj.weight holds (inf|-inf|nan); weights must be finite",
        ),
    ],
    ids=["shape", "type", "no scales", "no fp8", "not finite"],
)
def test_what_does_not_fit_is_refused(
    change: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    message: str,
    make: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    quantized, name = make("phi3")[0], "model.layers.1.self_attn.o_proj.weight"
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).symlink_to(quantized / file)
    first, second = (load_file(quantized / f"{number}.safetensors") for number in range(2))
    first[name], scale = change(first[name], second.pop(f"{name}_scale_inv"))
    save_shards(tmp_path, first, second if scale is None else {**second, f"{name}_scale_inv": scale})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'; it must be one of e4m3,"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]; it must be two positive integers"),
        ({"weight_block_size": 128}, "weight_block_size is 128; it must be two positive integers"),
    ],
)
def test_other_kinds_of_fp8_are_refused(
    change: dict[str, object], message: str, make: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").symlink_to(make("phi3")[0] / "config.json")
    edit_json(tmp_path / "config.json", quantization_config={**FP8, **change})
    with pytest.raises(CheckpointError, match=message):
        CheckpointConfig.from_folder(tmp_path)
