"""GGUF files: every architecture and type of theirs, split ones, tokenizers, and headers that are hostile."""

import dataclasses
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.core import build_engine
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_connector.namespace import checkpoint_digest
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.checkpoints import gguf as reader
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.gguf_blocks import UNPACK, unpack
from quire_engine.models.checkpoints.gguf_types import BLOCKS, TYPES
from quire_engine.models.linear.gguf import join_codes
from quire_engine.models.loader import load_model
from quire_engine.models.mtp import load_mtp
from safetensors.torch import save_file
from support.every_kind import core_of
from support.gguf_files import gguf_file, random_blocks, text, write_gguf
from support.oracle import CHECKPOINTS, VOCAB_SIZE, make_checkpoint
from support.ranks import ThreadExecutor

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 9, 200, 31], [7] * 20, [*range(2, 90)]]
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "tied-gqa": {},
    "untied-mha": {},
    "odd-sizes": {},
    "llama3-rope": {},
    "yarn-rope": {},
    "mixtral": {"sliding_window": None},
    "granite": {},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None},
    "qwen2": {},
    "qwen2-moe": {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None,
        "num_hidden_layers": 2,
    },
    "qwen3": {},
    "qwen3-moe": {},
    "qwen3-next": {"mlp_only_layers": []},
    "qwen3-5": {},
    "qwen3-5-moe": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7},
    "gemma3n": {"vocab_size_per_layer_input": VOCAB_SIZE},  # llama.cpp's has all rows
    "gemma4": {},
    "gemma4-moe": {},
    "gemma4-conditional": {},
    "glm4-moe": {},
    "falcon-h1": {},
    "phi3": {},
    "gpt-oss": {},
    "olmo2": {},
    "olmo3": {},
    "ministral3": {},
    "deepseek-v2": {},
    "deepseek-v3": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    "granite-moe": {},
    "granite-moe-shared": {},
    "granite-hybrid": {"mamba_n_groups": 2},
    "lfm2": {},
    "lfm2-moe": {},
    "mamba": {},
    "mamba2": {},
    "nemotron-h": {"hybrid_override_pattern": "MEM*EM"},
    "nemotron-h-latent": {},
}  # fmt: skip
"""Checkpoints of the oracle, without what no GGUF file can say."""


def outputs_of(model: Path, **settings: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens, and their log-probabilities."""
    sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 2**21, "dtype": "float32"}
    with pytest.MonkeyPatch.context() as patch:
        if "tensor_parallel_size" in settings:
            patch.setattr(build_engine, "make_executor", ThreadExecutor)
        llm = LLM(model, **{**sizes, **settings})
    try:
        found = []
        for request in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            (output,) = request.outputs
            assert output.logprobs is not None
            scores = [one[i].logprob for one, i in zip(output.logprobs, output.token_ids, strict=True)]
            found.append((list(output.token_ids), scores))
        return found
    finally:
        core_of(llm).shutdown()


def assert_same(one: list[tuple[list[int], list[float]]], other: list[tuple[list[int], list[float]]]) -> None:
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
    for (_, scores), (_, expected) in zip(one, other, strict=True):
        assert scores == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def make(checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A checkpoint of the oracle's with other fields."""

    def make(name: str, **changes: Any) -> Path:
        if not changes:
            return checkpoint(name)
        monkeypatch.setitem(CHECKPOINTS, name, {**CHECKPOINTS[name], **changes})
        return make_checkpoint(tmp_path / "made", name, load_tokenizer(checkpoint("tinypy")))

    return make


def write_plain(folder: Path, like: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint like another one, of other numbers."""
    folder.mkdir()
    for file in like.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_an_architecture_generates_what_it_does_from_safetensors(
    name: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    folder, file = make(name, **FAMILIES[name]), tmp_path / "model.gguf"
    write_gguf(folder, file)
    assert_same(outputs_of(file), outputs_of(folder))
    ours, theirs = (CheckpointConfig.from_folder(one) for one in (file, folder))
    assert ours.dtype == "bfloat16"
    assert ours.architecture == theirs.architecture.replace("ForConditionalGeneration", "ForCausalLM")
    same = ("vocab_size", "num_heads", "head_size", "tie_word_embeddings", "eos_token_ids", "windows")
    assert [getattr(ours, one) for one in same] == [getattr(theirs, one) for one in same]


@pytest.mark.parametrize(
    ("name", "changes", "architecture"),
    [
        ("granite-hybrid-dense", {"intermediate_size": 100}, "GraniteForCausalLM"),
        ("bamba", {}, "GraniteMoeHybridForCausalLM"),
        ("falcon-mamba", {}, "FalconMambaForCausalLM"),
        ("nemotron-h", {"hybrid_override_pattern": "M-M*-"}, "NemotronHForCausalLM"),
    ],
)
def test_an_architecture_may_be_written_as_others(
    name: str, changes: dict[str, Any], architecture: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    folder, file = make(name, **changes), tmp_path / "model.gguf"
    write_gguf(folder, file)
    assert CheckpointConfig.from_folder(file).architecture == architecture
    assert_same(outputs_of(file), outputs_of(folder))


def test_older_files_have_latent_projections_in_one(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("deepseek-v2"), tmp_path / "model.gguf"
    write_gguf(folder, file, latent_split=False)
    assert "blk.0.attn_kv_b.weight" in [tensor.name for tensor in open_checkpoint(file).tensors.values()]
    assert_same(outputs_of(file), outputs_of(folder))


def test_ranks_have_slices_of_permuted_and_stacked_tensors(make: Callable[..., Path], tmp_path: Path) -> None:
    for name in (
        "tied-gqa", "qwen3-moe", "granite-hybrid", "qwen3-next", "qwen3-5", "gemma4-moe", "falcon-h1", "mamba",
        "nemotron-h", "gemma3n",
    ):  # fmt: skip
        folder, file = make(name, **FAMILIES[name]), tmp_path / f"{name}.gguf"
        write_gguf(folder, file)
        assert_same(outputs_of(file, tensor_parallel_size=2), outputs_of(folder))


def test_layers_of_multi_token_prediction_come_with_the_file(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("qwen3-5-mtp"), tmp_path / "model.gguf"
    write_gguf(folder, file)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for path in (file, folder):
        config = CheckpointConfig.from_folder(path)
        target = load_model(path, config, torch.float32, 64)
        layer = load_mtp(path, config, target, 64)
        (own,) = layer.layers.values()
        norms = [one.weight for one in (layer.pre_fc_norm_embedding, layer.pre_fc_norm_hidden, layer.norm)]
        results.append([layer.fc(x.repeat(1, 2)), own.self_attn.qkv_proj(x), own.mlp(x), *norms])
    torch.testing.assert_close(*results)
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    assert_same(outputs_of(file, speculative_config=drafts), outputs_of(folder))


# -- types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", UNPACK)
def test_a_type_is_dequantised_as_by_the_gguf_package(kind: str) -> None:
    numbers, size = BLOCKS[kind]
    dtype = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[dtype] == (numbers, size)
    assert TYPES[dtype][0] == kind
    for rows, columns in ((1, numbers), (7, 3 * numbers), (5, 16 * 256)):
        blocks = random_blocks(kind, rows, columns, seed=rows, scale=3.0)
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, dtype))
        codes = unpack(torch.from_numpy(blocks), kind)
        assert torch.equal(codes.dequantize(), expected)
        assert codes.bits == (8 if kind in ("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K") else 4)


def test_every_scale_of_mxfp4_is_exact() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (1, 253, 17), dtype=np.uint8)
    blocks[0, :, 0] = range(253)
    flat = blocks.reshape(1, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(flat, gguf.GGMLQuantizationType.MXFP4))
    assert torch.equal(unpack(torch.from_numpy(flat), "MXFP4").dequantize(), expected)


def test_a_large_weight_is_unpacked_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.from_numpy(random_blocks("Q5_K", 37, 512, seed=0))
    whole = unpack(blocks, "Q5_K")
    monkeypatch.setattr("quire_engine.models.checkpoints.gguf_blocks.BAND", 512 * 5)
    banded = unpack(blocks, "Q5_K")
    for field in dataclasses.fields(whole):
        one, other = (getattr(codes, field.name) for codes in (whole, banded))
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q2_K", "Q3_K"), ("IQ4_XS", "Q5_1"),
                                   ("MXFP4", "Q4_1"), ("IQ4_NL", "Q5_0")])  # fmt: skip
def test_two_types_have_a_common_form(kinds: tuple[str, str]) -> None:
    blocks = [torch.from_numpy(random_blocks(kind, 3, 512, seed=i)) for i, kind in enumerate(kinds)]
    parts = [unpack(one, kind) for one, kind in zip(blocks, kinds, strict=True)]
    assert torch.equal(join_codes(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


MIXED = {
    "embed_tokens.weight": "Q6_K", "q_proj.weight": "Q4_K", "k_proj.weight": "Q6_K", "v_proj.weight": "Q8_0",
    "o_proj.weight": "Q5_0", "0.mlp.gate_proj.weight": "Q4_K", "0.mlp.up_proj.weight": "Q6_K",
    "1.mlp.gate_proj.weight": "Q3_K", "1.mlp.up_proj.weight": "F16", "down_proj.weight": "IQ4_XS",
}  # fmt: skip
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "gemma4-moe": {"global_head_dim": 128, "moe_intermediate_size": 256},
    "granite-hybrid": {"mamba_n_heads": 8, "mamba_d_head": 64},
    "lfm2-moe": {"moe_intermediate_size": 256},
    "nemotron-h": {
        "hybrid_override_pattern": "ME*",
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
    },
    "qwen3-moe": {"moe_intermediate_size": 256},
    "qwen3-next": FAMILIES["qwen3-next"],
    "qwen3-5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_value_head_dim": 128},
}


PARTS = {"self_attn.qkv_proj", "mixer.in_proj", "mixer.gate_proj", "mixer.out_proj", "mlp", "moe"}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("tied-gqa", {"proj.weight": "Q4_0", "embed_tokens.weight": "Q4_1"}),
        ("tied-gqa", MIXED),
        ("untied-mha", {**MIXED, "lm_head.weight": "Q8_0"}),
        ("biased-mqa", {"q_proj.weight": "Q4_K", "k_proj.weight": "Q6_K", "gate_proj.weight": "Q4_K",
                       "up_proj.weight": "Q5_K"}),
        ("qwen3-moe", {"experts.0.gate_proj.weight": "Q4_K", **{f"{n}.{one}_proj.weight": "Q4_K" for n in range(9)
                                                                 for one in ("gate", "up", "down")}}),
        ("lfm2-moe", {"proj.weight": "Q8_0", "w1.weight": "Q4_0", "w3.weight": "Q4_0", "w2.weight": "Q8_0"}),
        ("granite-hybrid", {"in_proj.weight": "Q5_0", "q_proj.weight": "Q4_K", "k_proj.weight": "Q6_K",
                            "shared_mlp.input_linear.weight": "Q4_K"}),
        ("qwen3-next", {"in_proj_qkvz.weight": "Q4_K", "in_proj_ba.weight": "Q8_0", "k_proj.weight": "Q6_K"}),
        ("qwen3-5", {"0.linear_attn.out_proj.weight": "Q5_K", "1.linear_attn.out_proj.weight": "Q6_K",
                     "3.linear_attn.out_proj.weight": "Q8_0", "in_proj_qkv.weight": "Q4_K", "in_proj_z.weight": "Q6_K",
                     "in_proj_a.weight": "Q8_0", "in_proj_b.weight": "Q8_0"}),
        ("mamba", {"in_proj.weight": "Q4_K", "x_proj.weight": "Q8_0", "out_proj.weight": "Q6_K",
                   "embeddings.weight": "Q5_K"}),
        ("nemotron-h", {"in_proj.weight": "Q5_0", "out_proj.weight": "Q8_0", "q_proj.weight": "Q4_K",
                        "k_proj.weight": "Q6_K", "up_proj.weight": "Q4_K", "down_proj.weight": "Q5_K"}),
        ("gemma4-moe", {"experts.gate_up_proj": "Q4_K", "experts.down_proj": "Q8_0", "proj.weight": "Q5_0"}),
    ],
    ids=["uniform", "mixed", "mixed-untied", "biased", "experts", "convolutions", "mamba-2", "delta", "tiled-delta",
         "mamba", "nemotron", "stacked-experts"],
)  # fmt: skip
def test_quantised_weights_are_the_numbers_that_they_stand_for(
    name: str, kinds: dict[str, str], make: Callable[..., Path], tmp_path: Path
) -> None:
    folder, file = make(name, **{**SIZES, **OTHER_SIZES.get(name, {})}), tmp_path / "model.gguf"
    plain = write_plain(tmp_path / "plain", folder, write_gguf(folder, file, kinds))
    config, theirs = CheckpointConfig.from_folder(file), CheckpointConfig.from_folder(plain)
    assert len(config.weight_format.types) > 3
    one, other = (load_model(path, form, torch.float32, 128) for path, form in ((file, config), (plain, theirs)))
    tokens = torch.arange(40)
    torch.testing.assert_close(one.embed(tokens), other.embed(tokens), rtol=0.02, atol=0.002)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    for own, theirs_layer in zip(one.layers.values(), other.layers.values(), strict=True):
        names = [name for name, _ in own.named_modules()]
        for path in PARTS.intersection(names):
            width = own.get_submodule(path).projections[0].shape[1] if path == "mixer.out_proj" else 256
            rows = torch.randn(9, width, generator=torch.Generator().manual_seed(0))
            inputs = (rows, rows) if path == "moe" else (rows,)
            results = [layer.get_submodule(path)(*inputs) for layer in (own, theirs_layer)]
            assert (results[0] - results[1]).norm() < 0.03 * results[1].norm()
    logits = [model.compute_logits(x) for model in (one, other)]
    assert logits[0] is not None
    assert logits[1] is not None
    assert (logits[0] - logits[1]).norm() < 0.03 * logits[1].norm()
    if name == "tied-gqa":
        outputs_of(file, tensor_parallel_size=2) if kinds is not MIXED else outputs_of(file, dtype="bfloat16")


def test_a_rank_cannot_have_a_part_of_a_block(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("tied-gqa", **{**SIZES, "intermediate_size": 256}), tmp_path / "model.gguf"
    write_gguf(folder, file, {"down_proj.weight": "Q4_K"})
    with pytest.raises(ValueError, match="tensor_parallel_size: a rank has the input features from 0 to 128 of a lin"):
        outputs_of(file, tensor_parallel_size=2)


def test_the_setting_makes_int8_of_them(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("tied-gqa", **SIZES), tmp_path / "model.gguf"
    plain = write_plain(tmp_path / "plain", folder, write_gguf(folder, file, MIXED))
    ours, theirs = (outputs_of(one, quantization="int8") for one in (file, plain))
    assert [len(tokens) for tokens, _ in ours] == [len(tokens) for tokens, _ in theirs]
    assert ours[0][1][0] == pytest.approx(theirs[0][1][0], abs=0.2)


def test_a_setting_of_4_bits_leaves_blocks_as_they_are(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("tied-gqa", **SIZES), tmp_path / "model.gguf"
    write_gguf(folder, file, {"proj.weight": "Q4_1", "embed_tokens.weight": "Q4_1"})
    assert outputs_of(file, quantization="int4") == outputs_of(file)


def test_random_weights_of_a_gguf_file_are_finite(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("tied-gqa", **SIZES), tmp_path / "model.gguf"
    write_gguf(folder, file, MIXED)
    assert all(np.isfinite(scores).all() for _, scores in outputs_of(file, load_format="dummy"))


@pytest.mark.parametrize(
    ("kind", "at", "value"), [("Q4_K", 2, b"\x00\x7c"), ("Q8_0", 0, b"\x01\x7e"), ("MXFP4", 0, b"\xff")]
)
def test_scales_that_are_no_finite_numbers_are_rejected(
    kind: str, at: int, value: bytes, make: Callable[..., Path], tmp_path: Path
) -> None:
    folder, file = make("tied-gqa", **SIZES), tmp_path / "model.gguf"
    write_gguf(folder, file, {"0.mlp.down_proj.weight": kind})
    place = next(one for one in gguf.GGUFReader(file).tensors if one.name == "blk.0.ffn_down.weight").data_offset
    with file.open("r+b") as opened:
        opened.seek(int(place) + at)
        opened.write(value)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_down\.weight has scales that are no finite numbers"):
        load_model(file, CheckpointConfig.from_folder(file), torch.float32, 64)


# -- files -------------------------------------------------------------------------------------------------------------


def test_split_files_are_one_model(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make("tied-gqa")
    write_gguf(folder, tmp_path / "a.gguf", split=7)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"a-{i:05}-of-00003.gguf" for i in range(1, 4)]
    expected = outputs_of(folder)
    for path in (tmp_path / names[0], tmp_path / names[2], tmp_path):
        assert_same(outputs_of(path), expected)
    digest = checkpoint_digest(tmp_path / names[0], "auto", 0)
    os.utime(tmp_path / names[2], (1, 1))
    assert checkpoint_digest(tmp_path / names[0], "auto", 0) != digest
    (tmp_path / names[1]).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"there is no a-00002-of-00003\.gguf"):
        check_checkpoint(tmp_path / names[0])
    shutil.copy(tmp_path / names[2], tmp_path / names[1])
    with pytest.raises(
        CheckpointError, match=r"a-00002-of-00003.gguf: its metadata does not say that it is file 2 of 3"
    ):
        check_checkpoint(tmp_path / names[0])
    (tmp_path / names[0]).rename(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 files of a model, whose names must end in -00001-of-00003"):
        check_checkpoint(tmp_path / "b.gguf")


def test_a_folder_of_gguf_files(make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make("tied-gqa")
    write_gguf(folder, tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"for pictures")
    assert check_checkpoint(tmp_path).architecture == "LlamaForCausalLM"
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"several models \(\['a.gguf', 'b.gguf'\]\); give the path of one"):
        check_checkpoint(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"only safetensors are read; to serve 'a.gguf', give the path of that"):
        check_checkpoint(tmp_path, tokenizer_folder=folder)
    with pytest.raises(
        CheckpointError, match=r"^model: there is no folder .*none\.gguf; give the path of .* a GGUF file"
    ):
        check_checkpoint(tmp_path / "none.gguf")


def test_digests_know_header_and_weights(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, one, other = make("tied-gqa"), tmp_path / "a.gguf", tmp_path / "b.gguf"
    for file in (one, other):
        write_gguf(folder, file)
    digests = {load: checkpoint_digest(one, load, 0, with_times=False) for load in ("auto", "dummy")}
    data = bytearray(other.read_bytes())
    data[data.index(b"gpt-2")] ^= 1
    other.write_bytes(data)
    for load, digest in digests.items():
        assert checkpoint_digest(other, load, 0, with_times=False) != digest


# -- tokenizers --------------------------------------------------------------------------------------------------------

TEXTS = (
    "Hello, world!", "  two  spaces\n\n\nand lines", "1234567 + 89.5", "don't DON'T", "ä é ñ 日本語 🙂",
    "\t\tdef f(x):", "a  b   c    d", " lead", "trail ", "", "<b>html</b>", "x" * 40,
)  # fmt: skip


def test_the_tokenizer_and_its_template_come_with_the_file(make: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = make("tied-gqa"), tmp_path / "model.gguf"
    write_gguf(folder, file)
    ours, theirs = load_tokenizer(file), load_tokenizer(folder)
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)
    for said in TEXTS:
        ids = ours.encode(said)
        assert ours.decode(ids) == said
    llm = LLM(file, max_model_len=64, kv_cache_memory_bytes=2**21)
    (output,) = llm.generate("def f", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    core_of(llm).shutdown()
    assert output.outputs[0].text


def values_of(**changes: Any) -> dict[str, Any]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "  ",
        "<x>",
    ]
    values = {
        "model": "llama", "tokens": tokens, "scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -3.0, -1.0, -8.0, -9.0],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 6 + [4, 4],
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in {**values, **changes}.items() if value is not None}


def sentencepiece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: Any) -> Any:
    class Fake:
        def tokenizer(self) -> dict[str, Any]:
            return values_of(**changes)

    monkeypatch.setattr("quire_engine.frontend.tokenizer.open_checkpoint", lambda path, setting: Fake())
    return load_tokenizer(tmp_path / "x.gguf")


def test_sentencepiece_begins_with_a_space_and_falls_back_to_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = sentencepiece(monkeypatch, tmp_path)
    assert tokenizer.tokenize("ab a", add_special_tokens=True) == ["<s>", "▁ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab é<x>b", add_special_tokens=False)) == "ab é<x> b"
    plain = sentencepiece(monkeypatch, tmp_path, add_space_prefix=False, add_bos_token=False)
    assert plain.tokenize("aba", add_special_tokens=True) == ["ab", "a"]
    gemma = sentencepiece(monkeypatch, tmp_path, model="gemma4", merges=["▁ a", "a b"], add_space_prefix=False)
    assert gemma.tokenize("a ab") == ["a", "▁a", "b"], "in the order of the file's merges"
    both = sentencepiece(monkeypatch, tmp_path, add_eos_token=True)
    assert both.tokenize("ab", add_special_tokens=True) == ["<s>", "▁ab", "</s>"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "bert"}, "model is 'bert'; it must be gpt2 or llama"),
        ({"model": None}, "model is ''"),
        ({"model": 5}, "model is 5; it must be a value like ''"),
        ({"model": "gpt2", "pre": "klingon"}, "pre is 'klingon'; it must be one of default"),
        ({"tokens": [1, 2]}, r"tokens is \[1, 2\]; it must be a list of str"),
        ({"token_type": [1]}, "token_type is 'of 1 tokens'; it must be of 267"),
        ({"scores": ["x"]}, "scores is .* a list of float"),
        ({"bos_token_id": "one"}, "bos_token_id is 'one'"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"merges": ["zz zz"]}, "does not load|out of vocabulary"),
    ],
)
def test_a_malformed_tokenizer_is_rejected(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        sentencepiece(monkeypatch, tmp_path, **changes)


# -- hostile files -----------------------------------------------------------------------------------------------------

U32, U64, F32, STRING, ARRAY = 4, 10, 6, 8, 9
HUGE = 1 << 60


def u32(value: int) -> bytes:
    return struct.pack("<II", U32, value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", STRING) + text(value)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + data


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    number = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", number, *sizes, kind, offset)


LLAMA = {
    "general.architecture": string("llama"), "llama.block_count": u32(1), "llama.embedding_length": u32(32),
    "llama.attention.head_count": u32(2), "llama.feed_forward_length": u32(32), "llama.context_length": u32(64),
}  # fmt: skip
LFM2 = {"general.architecture": string("lfm2"), **{key.replace("llama.", "lfm2."): one for key, one in LLAMA.items()
                                                   if key.startswith("llama.")}}  # fmt: skip
GEMMA = {"general.architecture": string("gemma4"), **{key.replace("llama.", "gemma4."): one for key, one in
                                                      LLAMA.items() if key.startswith("llama.")}}  # fmt: skip
HEADS = "llama.attention.head_count"
QWEN = {"general.architecture": string("qwen35"), **{f"qwen35.{name}": u32(value) for name, value in (
    ("block_count", 1), ("embedding_length", 32), ("attention.head_count", 2), ("feed_forward_length", 32),
    ("context_length", 64), ("ssm.time_step_rank", 4), ("ssm.group_count", 2), ("ssm.inner_size", 64),
    ("ssm.state_size", 8), ("ssm.conv_kernel", 4),
)}}  # fmt: skip
ONE = [tensor("token_embd.weight", [32, 4])]
DATA = bytes(4 * 32 * 4)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated; it has 0 bytes"),
    "short": (b"GGUF\x03\0\0\0", "truncated; it has 8 bytes"),
    "no GGUF": (b"GGML" + bytes(60), "not a GGUF file"),
    "version 1": (gguf_file(LLAMA, ONE, DATA, version=1), "it has version 1"),
    "version 99": (gguf_file(LLAMA, ONE, DATA, version=99), "it has version 99"),
    "big-endian": (gguf_file(LLAMA, ONE, DATA, version=3 << 24), "it is big-endian"),
    "2^60 tensors": (gguf_file(LLAMA, ONE, DATA, counts=(HUGE, len(LLAMA))), f"speaks of {HUGE} tensors"),
    "2^60 values": (gguf_file(LLAMA, ONE, DATA, counts=(1, HUGE)), f"speaks of {HUGE} values"),
    "60,000 values": (gguf_file(LLAMA, ONE, counts=(1, 60_000)), "."),
    "60,000 tensors": (gguf_file(LLAMA, ONE, counts=(60_000, len(LLAMA))), "the file is too short for"),
    "a key of 4 GB": (gguf_file([], []) [:16] + struct.pack("<QQ", 1, 4 << 30) + bytes(64), "truncated"),
    "a string of 4 GB": (gguf_file({"x": struct.pack("<IQ", STRING, 4 << 30)}, []), "truncated"),
    "a string of 2^64": (gguf_file({"x": struct.pack("<IQ", STRING, (1 << 64) - 1)}, []), "truncated"),
    "an array of 2^60 numbers": (gguf_file({"x": array(F32, HUGE)}, []), "truncated"),
    "an array of 2^60 strings": (gguf_file({"x": array(STRING, HUGE)}, []), f"speaks of {HUGE} strings"),
    "an array of a million strings": (gguf_file({"x": array(STRING, 1 << 20)}, []), "truncated"),
    "a string of 2^63 in an array": (gguf_file({"x": array(STRING, 2, struct.pack("<Q", 1 << 63))}, []), "truncated"),
    "nested arrays": (gguf_file({"x": array(ARRAY, 1, array(U32, 1))}, []), "has an array of type 9"),
    "an unknown value": (gguf_file({"x": struct.pack("<I", 77)}, []), "has a value of type 77"),
    "an unknown array": (gguf_file({"x": array(77, 1)}, []), "has an array of type 77"),
    "a key twice": (gguf_file([("x", u32(1)), ("x", u32(2))], []), "has 'x' twice"),
    "no UTF-8": (gguf_file({"x": string(b"\xff\xfe")}, []), "no UTF-8"),
    "no architecture": (gguf_file({}, ONE, DATA), "general.architecture is None; it must be one of deepseek2"),
    "another architecture": (gguf_file({"general.architecture": string("rwkv")}, ONE, DATA), "architecture is 'rwkv'"),
    "a list": (gguf_file({"general.architecture": array(U32, 1, bytes(4))}, []), "is an array of 1; "),
    "alignment 0": (gguf_file({**LLAMA, "general.alignment": u32(0)}, ONE, DATA), "has the alignment 0"),
    "alignment 2^31": (gguf_file({**LLAMA, "general.alignment": u32(1 << 31)}, ONE, DATA), "has the alignment 2147"),
    "alignment 24": (gguf_file({**LLAMA, "general.alignment": u32(24)}, ONE, DATA), "has the alignment 24"),
    "an alignment of letters": (gguf_file({**LLAMA, "general.alignment": string("x")}, ONE, DATA), "alignment 'x'"),
    "a tensor twice": (gguf_file(LLAMA, ONE * 2, DATA), "has the tensor 'token_embd.weight' twice"),
    "an unknown type": (gguf_file(LLAMA, [tensor("x", [32], 999)], DATA), "of type 999; F32, "),
    "a type that is not read": (gguf_file(LLAMA, [tensor("x", [256], 16)], DATA), "of type IQ2_XXS; F32, "),
    "no dimensions": (gguf_file(LLAMA, [tensor("x", [])], DATA), "of 0 dimensions"),
    "2^32 dimensions": (gguf_file(LLAMA, [tensor("x", [1], dimensions=(1 << 32) - 1)], DATA), "of 4294967295 dim"),
    "an empty dimension": (gguf_file(LLAMA, [tensor("x", [0, 5])], DATA), "which the file is too short for"),
    "an overflowing size": (gguf_file(LLAMA, [tensor("x", [1 << 32, 1 << 32])], DATA), "the file is too short for"),
    "a size of 2^63": (gguf_file(LLAMA, [tensor("x", [1 << 63])], DATA), "which the file is too short for"),
    "half a block": (gguf_file(LLAMA, [tensor("x", [48], 2)], DATA), "with rows of 48; Q4_0 has blocks of 32"),
    "an offset past the file": (gguf_file(LLAMA, [tensor("x", [4], offset=1 << 40)], DATA), "truncated; it has"),
    "an offset of 2^64": (gguf_file(LLAMA, [tensor("x", [4], offset=(1 << 64) - 32)], DATA), "truncated; it has"),
    "an odd offset": (gguf_file(LLAMA, [tensor("x", [4], offset=3)], DATA), "at 3, no multiple of 32"),
    "overlapping tensors": (
        gguf_file(LLAMA, [*ONE, tensor("x", [8], offset=32)], DATA), "'x' begin within tensor 'token_embd.weight'"
    ),
    "no data": (gguf_file(LLAMA, ONE), "which the file is too short for"),
    "too little data": (gguf_file(LLAMA, ONE, DATA[:-1]), "truncated; it has .* and the tensor .* ends at"),
    "no embedding": (gguf_file(LLAMA, [tensor("x", [4])], DATA), "there is no tensor token_embd.weight"),
    "no layers": (gguf_file(LLAMA, ONE, DATA), "there is no tokenizer in it"),
    "2^32 layers": (gguf_file({**LLAMA, "llama.block_count": u32(0xFFFFFFFF)}, ONE, DATA), "num_hidden_layers is 42"),
    "10,000 layers": (gguf_file({**LLAMA, "llama.block_count": u32(10_000)}, ONE, DATA), "there is no tokenizer"),
    "heads of letters": (gguf_file({**LLAMA, HEADS: string("two")}, ONE, DATA), "head_count is 'two'"),
    "2^32 heads": (gguf_file({**LLAMA, HEADS: u32(0xFFFFFFFF)}, ONE, DATA), "head_count is 42"),
    "no heads of keys": (gguf_file(LFM2, ONE, DATA), "head_count_kv is None; it must be a number for each layer"),
    "heads of keys of other layers": (
        gguf_file({**LFM2, "lfm2.attention.head_count_kv": array(U32, 2, bytes(8))}, ONE, DATA), "an array of 2; it"
    ),
    "rows of no part": (
        gguf_file({"general.architecture": string("qwen3next"), "qwen3next.ssm.time_step_rank": u32(1),
                   "qwen3next.ssm.inner_size": u32(1), "qwen3next.embedding_length": u32(32),
                   "qwen3next.attention.head_count": u32(2)},
                  [tensor("token_embd.weight", [32, 4]), tensor("blk.0.ssm_ba.weight", [32, 3], 0, 512)], bytes(1024)),
        r"blk\.0\.ssm_ba\.weight has 3 rows; its metadata asks for parts of \[1, 1\]",
    ),
    "heads of values that are no multiple": (
        gguf_file({**QWEN, "qwen35.ssm.group_count": u32(3)}, [*ONE, tensor("blk.0.ssm_out.weight", [64, 32], 8, 512)],
                  DATA + bytes(2176)), "time_step_rank is 4; it must be a multiple of ssm.group_count=3"),
    "heads that are no part of a block": (
        gguf_file({**QWEN, "qwen35.ssm.inner_size": u32(96)}, [*ONE, tensor("blk.0.ssm_out.weight", [96, 32], 8, 512)],
                  DATA + bytes(3264)), "blocks of 32 columns; its heads of values, of 24 columns, cannot"),
    "recurrent layers of letters": (
        gguf_file({**QWEN, "qwen35.attention.recurrent_layers": string("all")}, ONE, DATA),
        "recurrent_layers is 'all'; it must be a number for each layer",
    ),
    "no window's layers": (
        gguf_file({**GEMMA, "gemma4.attention.sliding_window_pattern": u32(6)}, ONE, DATA),
        "sliding_window_pattern is 6; it must be a number for each layer",
    ),
    "windows of no layer": (
        gguf_file({**GEMMA, "gemma4.block_count": u32(0),
                   "gemma4.attention.sliding_window_pattern": array(U32, 0)}, ONE, DATA), "an array of 0; it must be"),
    "layers behind others that there are not": (
        gguf_file({**GEMMA, "gemma4.nextn_predict_layers": u32(7),
                   "gemma4.attention.sliding_window_pattern": array(U32, 1, bytes(4))}, ONE, DATA), "an array of 1;"),
    "a scaling that there is not": (
        gguf_file({**LLAMA, "llama.rope.scaling.type": string("magic")}, ONE, DATA), "scaling.type is 'magic'"
    ),
    "factors of the wrong type": (
        gguf_file(LLAMA, [*ONE, tensor("rope_freqs.weight", [8], 1, 512)], DATA + bytes(32)), "must be a short vector"
    ),
    "65,000 files": (gguf_file({**LLAMA, "split.count": u32(65_000)}, ONE, DATA), "names must end in -00001-of-65000"),
    "files of letters": (gguf_file({**LLAMA, "split.count": string("many")}, ONE, DATA), "one of 'many' files"),
    "60,000 experts": (
        gguf_file(LLAMA, [tensor("blk.0.ffn_up_exps.weight", [1, 1, 60_000], 1)], bytes(1 << 18)), "is of 60000 experts"
    ),
    "experts without end": (
        gguf_file(LLAMA, [tensor(f"blk.{i}.ffn_up_exps.weight", [1, 1, 4096], 1, i * 8192) for i in range(40)],
                  bytes(1 << 20)), "more than 131072 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    data, said = HOSTILE[name]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data)
    memory, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError, match=said) as error:
        check_checkpoint(file)
    assert time.process_time() - begin < 10, "as long as its sizes say, and not its bytes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 << 10
    assert str(error.value).startswith((str(file), "model: "))
    assert len(str(error.value)) < 900


def test_a_file_that_ends_anywhere_is_an_error(make: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(make("tied-gqa"), file)
    data = file.read_bytes()
    header = next(iter(open_checkpoint(file).weight_files().values()))
    for length in [*range(200), *range(200, header, 997), header, header + 1, len(data) - 1]:
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            _ = open_checkpoint(file).tensors


def test_a_header_of_too_many_bytes_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 1 << 20)
    file = tmp_path / "hostile.gguf"
    file.write_bytes(gguf_file({"x": array(0, 2 << 20, bytes(2 << 20))}, []))
    with pytest.raises(CheckpointError, match="its header has more than 1 MiB"):
        check_checkpoint(file)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("blk.0.attn_q.weight", [32, 31], r"attn_q\.weight has shape \(31, 32\); its metadata asks for \(32, 32\)"),
        ("blk.7.attn_q.weight", [32, 32], r"blk\.7\.attn_q\.weight has no place in this architecture"),
        ("blk.0.ssm_in.weight", [32, 32], r"blk\.0\.ssm_in\.weight has no place in this architecture"),
        ("blk.00.attn_q.weight", [32, 32], r"is layers\.0\.self_attn\.q_proj\.weight, which another tensor is as well"),
        ("blk.0.attn_norm.weight", [32], r"attn_norm\.weight has shape \(18,\); its metadata asks for \(32,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, sizes: list[int], said: str, tmp_path: Path) -> None:
    shapes = {"attn_q": [32, 32], "attn_k": [32, 32], "attn_v": [32, 32], "attn_output": [32, 32], "ffn_gate": [32, 32],
              "ffn_up": [32, 32], "ffn_down": [32, 32], "attn_norm": [32], "ffn_norm": [32]}  # fmt: skip
    wanted = {f"blk.0.{one}.weight": shape for one, shape in shapes.items()}
    wanted |= {"token_embd.weight": [32, 4], "output_norm.weight": [32], name: sizes}
    infos, at = [], 0
    for own, shape in wanted.items():
        kind = 2 if own == name and own.endswith("norm.weight") else 0
        infos.append(tensor(own, shape, kind, at))
        at += -(-int(np.prod(shape)) * 4 // 32) * 32
    tokens = {"tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.tokens": array(STRING, 1, text("a"))}
    (tmp_path / "x.gguf").write_bytes(gguf_file({**LLAMA, **tokens}, infos, bytes(at)))
    with pytest.raises(CheckpointError, match=said):
        check_checkpoint(tmp_path / "x.gguf")


def test_metadata_that_conversions_change_are_read_back(tmp_path: Path) -> None:
    values = {**LLAMA, "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", F32, 1e-5)}
    tokens = [text(one) for one in ("a", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>")]
    for ends, expected in ((tokens[:3], [0, 1, 2]), (tokens, [0, 1, 3, 4])):
        listed = {
            "tokenizer.ggml.tokens": array(STRING, len(ends), b"".join(ends)),
            "tokenizer.ggml.eos_token_id": u32(0),
        }
        (tmp_path / "x.gguf").write_bytes(gguf_file({**values, **listed}, ONE, DATA))
        _, fields = open_checkpoint(tmp_path / "x.gguf").config()
        assert fields["rms_norm_eps"] == 1e-5, "the shortest number that is this one in float32"
        assert fields["eos_token_id"] == expected
        assert json.dumps(fields)
        os.utime(tmp_path / "x.gguf", (1, 1))
