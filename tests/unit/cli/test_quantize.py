"""`quire quantize`: what it writes, and that nothing is left if it fails."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_cli import quantize
from quire_cli.errors import CommandError
from quire_cli.main import run
from quire_cli.quantize import GROUP_SIZE, write_quantized
from quire_engine import LLM, SamplingParams
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_kernels import quantize_grouped
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, make_small_checkpoint

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"


@pytest.fixture
def make_checkpoint() -> Callable[..., Path]:
    """Imported late: not every process that collects this file spends two seconds on transformers."""
    from support.oracle import make_checkpoint

    return make_checkpoint


def unpacked(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """As compressed-tensors' `unpack_from_int32` and `dequantize`."""
    packed, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].float()
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    codes = torch.zeros(rows, packed.shape[1] * 8, dtype=torch.int32)
    for i in range(8):
        codes[:, i::8] = packed >> (4 * i) & 15
    return (codes[:, :columns] - 8) * scale.repeat_interleave(columns // scale.shape[1], dim=1)


def test_int4_is_what_the_setting_makes_when_loading(tmp_path: Path) -> None:
    done: list[int] = []
    write_quantized(CHECKPOINT, tmp_path / "out", "int4", done.append)
    before, after = load_file(CHECKPOINT / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    names = [name.removesuffix(".weight") for name in before if name.endswith("proj.weight")]
    assert names
    for name in names:
        weight = before.pop(f"{name}.weight")
        assert torch.equal(unpacked(after, name), quantize_grouped(weight, GROUP_SIZE).dequantize())
        for kind in ("packed", "scale", "shape"):
            tensor = after.pop(f"{name}.weight_{kind}")
            assert kind != "scale" or tensor.dtype == weight.dtype
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == (
        "compressed-tensors", "pack-quantized", ["lm_head"],
    )  # fmt: skip
    group = config["config_groups"]["group_0"]
    assert group["weights"]["group_size"] == GROUP_SIZE
    assert group["input_activations"] is None
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in CHECKPOINT.iterdir()}
    assert done == sorted(done)
    assert done[-1] <= 100
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = []
    for folder in (CHECKPOINT, tmp_path / "out"):
        llm = LLM(folder, quantization="int4")  # of the copy, it is the head's alone
        tokens.append(llm.generate(["def main():\n"], params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.shutdown()
    assert tokens[0] == tokens[1]


def test_int8_is_read_back_and_perplexities_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deeper" / "out"
    command = ["quantize", str(CHECKPOINT), str(out), "--quantization", "int8", "--tokens", "256", "--window", "128"]
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert str(out) in lines[0]
    after, before = (float(lines[1].split()[i].rstrip(",")) for i in (1, 2))
    assert before < after < 1.1 * before
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = []
    for folder in (CHECKPOINT, out):
        llm = LLM(folder, quantization="int8")
        tokens.append(llm.generate(["def main():\n"], params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.shutdown()
    assert tokens[0] == tokens[1]


def test_calibrated_rounding_loses_less_of_correlated_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = quantize.BLOCK + 96  # more than a block
    weight = torch.randn(24, columns, generator=generator) * 0.02
    weight[3, :64] = 0.0
    inputs = torch.randn(4000, 40, generator=generator) @ torch.randn(40, columns, generator=generator)
    inputs = inputs + 0.5 * torch.randn(4000, columns, generator=generator)
    inputs[:, 200:232] = 0.0
    moments = quantize.Moments()
    moments.observe("a layer", torch.full((2, columns), 1e9))
    moments.start()
    for part in torch.split(inputs, 1000):
        moments.observe("a layer", part)
    assert [len(block) for block in moments.blocks["a layer"]] == [quantize.BLOCK, 96]
    errors = []
    for blocks in (None, moments.blocks["a layer"]):
        tensors = quantize._quantized("x", weight, "int4", blocks)
        errors.append((inputs @ (unpacked(tensors, "x") - weight).t()).square().mean())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("model", ["tinypy", "phi3"])
def test_every_linear_layer_is_calibrated(
    model: str, tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fused projections too; and the copy is better for it."""
    source = CHECKPOINT
    if model != "tinypy":
        source = make_checkpoint(tmp_path / "source", model, load_tokenizer(CHECKPOINT))
    (tmp_path / "text").write_text("".join(chr(256 + i * i % 97) for i in range(2000)))  # a token each byte
    seen: dict[str, object] = {}
    plain = quantize._quantized

    def spy(name: str, weight: torch.Tensor, quantization: str, blocks: object) -> dict[str, torch.Tensor]:
        seen[name] = blocks
        return plain(name, weight, quantization, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(quantize, "_quantized", spy)
    command = ["quantize", str(source), str(tmp_path / "out"), "--calibration", str(tmp_path / "text")]
    assert run([*command, "--tokens", "0", "--window", "128"]) == 0
    assert seen
    assert all(seen.values())
    quantized = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    weight = load_file(source / "model.safetensors")[f"{name}.weight"]
    assert not torch.equal(unpacked(quantized, name), quantize_grouped(weight, GROUP_SIZE).dequantize())
    llm = LLM(tmp_path / "out", kv_cache_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.shutdown()


def test_shared_experts_are_calibrated(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2-moe", load_tokenizer(CHECKPOINT))
    (tmp_path / "text").write_text("".join(chr(256 + i * i % 97) for i in range(2000)))
    found: list[quantize.Moments] = []
    monkeypatch.setattr(quantize, "write_quantized", lambda *arguments: found.append(arguments[-1]))
    monkeypatch.setattr(quantize, "weight_files", lambda folder: [])
    command = ["quantize", str(source), str(tmp_path / "out"), "--calibration", str(tmp_path / "text")]
    assert run([*command, "--tokens", "0", "--window", "128"]) == 0
    kinds = {name.split(".", 2)[2] for name in found[0].blocks}
    assert {"mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj", "self_attn.o_proj"} <= kinds
    assert not any("experts" in kind or kind.endswith("gate") for kind in kinds)


def test_shards_stay_shards_and_routers_stay_as_they_are(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2-moe", load_tokenizer(CHECKPOINT), max_shard_size="100KB")
    shards = {file.name for file in source.glob("*.safetensors")}
    assert len(shards) > 1
    write_quantized(source, tmp_path / "out", "int8", lambda percent: None)
    index = json.loads((tmp_path / "out" / quantize.INDEX).read_text())["weight_map"]
    assert set(index.values()) == shards
    assert index["model.layers.1.mlp.experts.0.gate_proj.weight_scale"] in shards
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {one for one in ignored if "layers.1" in one} == {
        "model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate",
    }  # fmt: skip
    llm = LLM(tmp_path / "out", kv_cache_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.shutdown()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_left_of_what_was_not_finished(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(quantize, "save_file", fail)
    assert run(["quantize", str(CHECKPOINT), str(tmp_path / "out"), "--tokens", "0"]) in (1, 130)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_quantised_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", str(CHECKPOINT), str(tmp_path)]) == 2
    assert "exists; name a folder that does not" in capsys.readouterr().err
    assert run(["quantize", str(CHECKPOINT), str(tmp_path / "out"), "--quantization", "int3"]) == 2
    assert "--quantization is int3; it must be one of int4, int8" in capsys.readouterr().err
    command = ["quantize", str(CHECKPOINT), str(tmp_path / "out"), "--quantization", "int8", "--calibration", "x"]
    assert run(command) == 2
    assert "--calibration is given with --quantization int8; it is for int4" in capsys.readouterr().err
    assert run(["quantize", "/nowhere", str(tmp_path / "out")]) == 1
    small = make_small_checkpoint(tmp_path / "small")  # rows of 16 and 24 numbers
    with pytest.raises(CommandError, match="in groups of 32; nothing to quantise"):
        write_quantized(small, tmp_path / "out", "int4", lambda percent: None)
    write_quantized(small, tmp_path / "int8", "int8", lambda percent: None)
    with pytest.raises(CommandError, match="its weights are int8 already"):
        write_quantized(tmp_path / "int8", tmp_path / "out", "int4", lambda percent: None)
    tensors = load_file(small / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3, 3] = float("nan")
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj\.weight holds nan"):
        write_quantized(small, tmp_path / "out", "int8", lambda percent: None)
    edit_json(small / "config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    with pytest.raises((CommandError, ValueError)):
        write_quantized(small, tmp_path / "out", "int8", lambda percent: None)
    assert not (tmp_path / "out").exists()
