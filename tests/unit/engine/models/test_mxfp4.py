"""Checkpoints whose experts are stored in mxfp4, as gpt-oss is published: they stay so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.experts import MixtureOfExperts
from quire_engine.models.linear import LinearMethod, LoadedLinear, base
from quire_engine.models.linear.fp4 import POWERS, Mxfp4
from quire_engine.models.loader import load_model
from quire_kernels import GroupedCodes, LinearWeight, pack_linear
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2, "vocab_size": 64,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in mxfp4, blocks in one file and scales in another, and the same as transformers dequantises it."""
    quantized, plain = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).bfloat16()
    model.save_pretrained(quantized)
    weights = load_file(quantized / "model.safetensors")
    scales = {}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = weights[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(116, 122, (experts, rows, columns // 32), dtype=torch.uint8)
        weights[name] = convert_moe_packed_tensors(blocks, exponents)
        scales[name] = (blocks, exponents)
    for folder in (quantized, plain):
        (folder / "config.json").write_text((quantized / "config.json").read_text())
        (folder / "tokenizer.json").write_text("{}")
    save_file(weights, plain / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in weights.items() if name not in scales}
    save_shards(quantized, first | {f"{n}_blocks": b for n, (b, _) in scales.items()},
                {f"{n}_scales": e for n, (_, e) in scales.items()})  # fmt: skip
    edit_json(quantized / "config.json", quantization_config=MXFP4)
    return quantized, plain


def save_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    edit_json(index, weight_map=weight_map)


def load(folder: Path, dtype: torch.dtype = torch.bfloat16, parallel: ParallelState = ParallelState()) -> Decoder:
    return load_model(folder, CheckpointConfig.from_folder(folder), dtype, max_model_len=8, parallel=parallel)


def expert_weights(model: Decoder) -> list[torch.Tensor]:
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    packed = [mixture._packed for mixture in mixtures if mixture._packed is not None]
    return [weight.data for one in packed for each in (one.gate_up, one.down) for weight in each]


RANKS = [
    ParallelState(),
    ParallelState(rank=1, tensor_parallel_size=2),  # its columns begin in the middle of a block
    ParallelState(rank=1, tensor_parallel_size=2, enable_expert_parallel=True),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parallel", RANKS, ids=["one rank", "tensor parallel", "expert parallel"])
def test_experts_have_the_numbers_that_transformers_makes_of_them(
    parallel: ParallelState, dtype: torch.dtype, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_engine.models.linear.base.BAND", 1000)  # several bands to a matrix
    groups = []

    def pack(codes: GroupedCodes, bias: torch.Tensor, **options: Any) -> LinearWeight:
        groups.append(codes.group_size)
        del options["activation_bits"]
        return pack_linear(codes.dequantize().to(options["dtype"]), bias, **options)

    monkeypatch.setattr(base, "pack_grouped", pack)  # as what they stand for
    for folder in folders:
        check_checkpoint(folder)
    quantized, plain = (expert_weights(load(folder, dtype, parallel)) for folder in folders)
    assert len(quantized) == 2 * 2 * len(range(3)[2:] if parallel.enable_expert_parallel else range(3))
    for ours, theirs in zip(quantized, plain, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)
        assert ours.any()
    is_cut = parallel.tensor_parallel_size > 1 and not parallel.enable_expert_parallel
    assert set(groups) == ({16, 32} if is_cut else {32})


def test_four_bits_take_four_bits(folders: tuple[Path, Path]) -> None:
    quantized, plain = (sum(one.nbytes for one in expert_weights(load(folder))) for folder in folders)
    assert quantized * 4 == plain


def test_every_number_and_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks[:, :255], scales[:, :255], dtype=dtype)[0].t()
        halved = POWERS[scales[0].int()] / 2
        loaded = LoadedLinear(
            tensors={"weight": blocks[0].flatten(1), "weight_scale": halved}, sizes=[256], bias=None, dtype=dtype,
            activation_bits=8, gated=False, activation="silu",
        )  # fmt: skip
        ours = Mxfp4(LinearMethod()).dense(loaded)
        assert torch.equal(ours[:255], theirs)
        assert not ours[255].isfinite().any(), "that scale says that there is no number"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks, scales: (blocks, None), "has no scales beside it, as mxfp4 has them"),
        (lambda blocks, scales: (blocks[1:], scales), r"shape \(2, 64, 3, 16\); config.json asks for \(3, 64, 3, 16\)"),
        (lambda blocks, scales: (blocks, scales[:, :, 1:].clone()), r"shape \(3, 64, 2\); .* asks for \(3, 64, 3\)"),
        (lambda blocks, scales: (blocks.view(torch.int8), scales), "is I8; mxfp4 asks for U8"),
        (lambda blocks, scales: (blocks, scales.fill_(255)), "holds (inf|nan|-inf); weights must be finite"),
        (lambda blocks, scales: (blocks, scales.fill_(253)), "holds inf; weights must be finite"),
    ],
    ids=["no scales", "blocks", "scales", "type", "not finite", "too large"],
)
def test_what_is_not_whole_is_refused(
    change: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    message: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    quantized, name = folders[0], "model.layers.1.mlp.experts.down_proj"
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).symlink_to(quantized / file)
    first, second = (load_file(quantized / f"{number}.safetensors") for number in range(2))
    blocks, scales = change(first[f"{name}_blocks"], second.pop(f"{name}_scales"))
    second |= {} if scales is None else {f"{name}_scales": scales}
    save_shards(tmp_path, {**first, f"{name}_blocks": blocks}, second)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_sizes_that_are_no_blocks_and_other_families_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.symlink_to(folders[0] / "config.json")
    edit_json(config, intermediate_size=100)
    with pytest.raises(CheckpointError, match="hidden_size is 64 and intermediate_size 100; they must be multiples"):
        CheckpointConfig.from_folder(tmp_path)
    edit_json(config, architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match="says mxfp4; a LlamaForCausalLM is served from checkpoints that are unq"):
        CheckpointConfig.from_folder(tmp_path)
