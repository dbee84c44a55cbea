"""The seam of linear methods: a toy that the product does not know, and which layer has which method.

The toy is ternary: weights in {-1, 0, 1}, four a byte, with one scale for a matrix, as in BitNet b1.58
(https://arxiv.org/abs/2402.17764, section 2). It needs no product file: it is a class and an entry in `METHODS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.checkpoints.config import WeightFormat
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable
from quire_engine.models.linear import METHODS, LinearMethod, LoadedLinear, TensorFormat
from quire_engine.models.linear.base import Tensors
from quire_engine.models.loader import load_model
from quire_kernels.activation import activate_and_mul
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from support.ranks import run_on_ranks, thread_ranks

POWERS_OF_3 = torch.tensor([1, 3, 9, 27])


@dataclass
class TernaryWeight:
    numbers: torch.Tensor
    """[N, K] int8."""
    scales: torch.Tensor
    """[N]"""
    loaded: LoadedLinear


def apply_ternary(x_TK: torch.Tensor, weight: TernaryWeight, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    sums_TN = F.linear(x_TK, weight.numbers.to(x_TK.dtype)) * weight.scales
    if weight.loaded.bias is not None:
        sums_TN = sums_TN + weight.loaded.bias
    out = activate_and_mul(sums_TN, weight.loaded.activation) if weight.loaded.gated else sums_TN
    return out.to(out_dtype or x_TK.dtype)


class Ternary(LinearMethod):
    """Becomes the model's dtype when it is packed, and is then computed by `quire_kernels.linear`."""

    tensors: Mapping[str, TensorFormat] = {
        "weight": TensorFormat(dtype=torch.uint8, stored=("U8",), column_block=4),
        "weight_scale": TensorFormat(dtype=torch.float32, row_block=None, column_block=None),
    }

    def unpack(self, loaded: LoadedLinear) -> TernaryWeight:
        scales = loaded.tensors["weight_scale"].flatten().repeat_interleave(torch.tensor(loaded.sizes))
        digits = loaded.tensors["weight"].unsqueeze(-1) // POWERS_OF_3 % 3
        return TernaryWeight(digits.flatten(1).to(torch.int8) - 1, scales, loaded)

    def dense(self, loaded: LoadedLinear) -> torch.Tensor:
        weight = self.unpack(loaded)
        return (weight.numbers * weight.scales[:, None]).to(loaded.dtype)


class TernaryKernel(Ternary):
    """Stays ternary, and has a kernel of its own."""

    apply = staticmethod(apply_ternary)
    pack = Ternary.unpack


def quantize_ternary(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, the scale (a power of 2, so that products with it are exact), and what they are together."""
    scale = 2.0 ** weight_NK.abs().mean().log2().round().view(1, 1)
    numbers = (weight_NK / scale).round().clamp(-1, 1)
    packed = ((numbers.long() + 1).unflatten(-1, (-1, 4)) * POWERS_OF_3).sum(-1).to(torch.uint8)
    return packed, scale, numbers * scale


@pytest.fixture
def folders(checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose linear layers are ternary, but for one; and the same in float32."""
    quantized, plain = tmp_path / "ternary", tmp_path / "plain"
    weights, packed = load_file(checkpoint("tied-gqa") / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if name.endswith("_proj.weight") and name != "model.layers.1.mlp.down_proj.weight":
            packed[name], packed[f"{name}_scale"], weights[name] = quantize_ternary(weight)
    for folder, tensors in ((quantized, weights | packed), (plain, weights)):
        folder.mkdir()
        for file in checkpoint("tied-gqa").iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors")
    return quantized, plain


@pytest.fixture(params=[Ternary, TernaryKernel])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[LinearMethod]:
    method: type[LinearMethod] = request.param

    def choose(
        stored: WeightFormat, made: LinearMethod, name: str, activation_bits: int, tensors: Tensors | None
    ) -> LinearMethod:
        return method() if activation_bits == 8 and name != "layers.1.mlp.down_proj" else made

    monkeypatch.setitem(METHODS, "ternary", choose)
    return method


@pytest.fixture
def config(folders: tuple[Path, Path], kind: type[LinearMethod]) -> CheckpointConfig:
    return dataclasses.replace(CheckpointConfig.from_folder(folders[0]), weight_format=WeightFormat(method="ternary"))


def layers_of(model: Decoder, x: torch.Tensor) -> list[torch.Tensor]:
    """What the linear layers of a rank make of inputs."""
    results: list[torch.Tensor] = []
    for layer in model.layers.values():
        attention, mlp = layer.self_attn, layer.mlp
        results.append(attention.qkv_proj(x))  # type: ignore[operator,union-attr]
        results.append(attention.o_proj(x[:, : sum(attention.qkv_proj.sizes[:1])]))  # type: ignore
        results.append(mlp(x))  # type: ignore[operator]
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_method_of_its_own_computes_what_the_dequantised_model_does(
    ranks: int, folders: tuple[Path, Path], kind: type[LinearMethod], config: CheckpointConfig
) -> None:
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def compute(rank: ParallelState) -> None:
        ours = load_model(folders[0], config, torch.float32, 64, rank)
        theirs = load_model(folders[1], CheckpointConfig.from_folder(folders[1]), torch.float32, 64, rank)
        kinds = {type(layer.mlp.down_proj.method) for layer in ours.layers.values()}  # type: ignore[union-attr]
        assert kinds == {kind, LinearMethod}, "one of its two layers is not quantised"
        for one, other in zip(layers_of(ours, x), layers_of(theirs, x), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for name in ours.layers:
            identity = torch.eye(config.hidden_size)
            one, other = (model.layers[name].self_attn.qkv_proj(identity) for model in (ours, theirs))  # type: ignore
            assert torch.equal(one, other), "other numbers"

    run_on_ranks(thread_ranks(ranks, 1), compute)


@pytest.mark.parametrize("kind", [Ternary], indirect=True)
def test_an_engine_generates_what_it_does_with_the_dequantised_model(
    folders: tuple[Path, Path], config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts, tokens = [[5, 9, 200, 31], [7] * 20, [*range(2, 60)]], []
    for folder, weight_format in zip(folders, (config.weight_format, WeightFormat()), strict=True):
        monkeypatch.setattr(
            "quire_engine.models.checkpoints.config.read_weight_format", lambda _, is_=weight_format: is_
        )
        llm = LLM(folder, dtype="float32", max_model_len=128)
        tokens.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        llm.shutdown()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", [Ternary], indirect=True)
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_scale", None, r"hold no layers\.0\.self_attn\.q_proj\.weight_scale$"),
        ("weight_scale", torch.ones(2, 1), r"weight_scale has shape \(2, 1\); config\.json asks for \(1, 1\)"),
        ("weight", torch.ones(64, 16), r"q_proj\.weight is F32; quantization_config in config\.json asks for U8"),
        ("weight", torch.ones(64, 64), r"q_proj\.weight has shape \(64, 64\); config\.json asks for \(64, 16\)"),
    ],
)
def test_the_check_knows_its_tensors(
    name: str, tensor: torch.Tensor | None, message: str, folders: tuple[Path, Path], config: CheckpointConfig
) -> None:
    file = folders[0] / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.0.self_attn.q_proj.{name}"]
    save_file(tensors if tensor is None else {**tensors, f"model.layers.0.self_attn.q_proj.{name}": tensor}, file)
    with pytest.raises(CheckpointError, match=message):
        load_model(folders[0], config, torch.float32, 64)


def test_a_slice_that_cuts_a_block_is_rejected() -> None:
    form, shape = TensorFormat(column_block=256, width=144), (8, 768)
    assert form.index(shape, slice(2, 4), slice(256, 768)) == (slice(2, 4), slice(144, 432))
    assert form.index((8, 700), slice(0, 8), slice(512, 700))[1] == slice(288, 432), "the last block may be shorter"
    with pytest.raises(ValueError, match="tensor_parallel_size: a rank has the input features from 0 to 384 of"):
        form.index(shape, slice(0, 8), slice(0, 384))


def test_projections_that_are_one_product_have_one_method(
    folders: tuple[Path, Path], config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        METHODS, "ternary", lambda stored, made, name, bits, tensors: Ternary() if name.endswith("q_proj") else made
    )
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj, .* are quantised in different ways"):
        load_model(folders[0], config, torch.float32, 64)


# -- hostile configurations --------------------------------------------------------------------------------------------


def test_layers_and_experts_that_the_files_do_not_hold_are_not_built(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in checkpoint("qwen3-moe").iterdir():
        (tmp_path / file.name).symlink_to(file)
    num_tensors = len(load_file(tmp_path / "model.safetensors"))
    num_built, create = 0, Packable.create

    def counted(module: Packable, method: LinearMethod | None = None) -> None:
        nonlocal num_built
        num_built += 1
        create(module, method)

    monkeypatch.setattr(Packable, "create", counted)
    edit_json(tmp_path / "config.json", num_hidden_layers=10_000, num_experts=1 << 16, num_local_experts=1 << 16)
    with pytest.raises(CheckpointError, match=r"hold no layers\.\d+\."):
        check_checkpoint(tmp_path)
    assert 0 < num_built < 8 * num_tensors


# -- latent attention --------------------------------------------------------------------------------------------------


def test_latent_attention_may_be_quantised_already(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    quantized, plain = tmp_path / "int8", tmp_path / "plain"
    weights, numbers = load_file(checkpoint("deepseek-v3") / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            scale = weight.float().abs().amax(1, keepdim=True) / 127
            numbers[name], numbers[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
            weights[name] = numbers[name] * scale
    for folder, tensors in ((quantized, weights | numbers), (plain, weights)):
        folder.mkdir()
        for file in checkpoint("deepseek-v3").iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        save_file(tensors, folder / "model.safetensors")
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    edit_json(
        quantized / "config.json",
        quantization_config={
            "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }},
        },
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 9, 200, 31], [7] * 20, [*range(2, 60)]]
    tokens = []
    for folder in (plain, quantized):
        llm = LLM(folder, dtype="float32", quantization="int8")
        tokens.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        llm.shutdown()
    assert tokens[0] == tokens[1]
