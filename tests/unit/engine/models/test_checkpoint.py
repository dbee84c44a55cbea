"""Checkpoints that are broken, or made to do harm: each is refused in one line, before anything is loaded."""

import json
import math
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.checkpoints.files import MAX_JSON_BYTES
from quire_engine.models.loader import load_model
from quire_engine.models.registry import ARCHITECTURES, OTHER_NAMES
from safetensors.torch import load_file, save_file
from support.checkpoints import POINTER, edit_json, make_small_checkpoint

SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
READ = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors", "model.safetensors.index.json")  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_small_checkpoint(tmp_path / "small")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(folder)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 400 + len(", ".join(ARCHITECTURES))  # it may name them all, and no value as long as it is
    return message


def load(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    load_model(folder, CheckpointConfig.from_folder(folder), dtype, 64)


def test_the_small_checkpoint_is_fine(folder: Path) -> None:
    assert check_checkpoint(folder).num_layers == 2
    load(folder)


# -- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1e9, 4.0, 10**30, "4", [4], math.nan], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_an_integer_within_bounds(name: str, value: Any, folder: Path) -> None:
    edit_json(folder / "config.json", **{name: value})
    message = refusal(folder)
    assert f"config.json: {name} is {value!r}; it must be an integer from " in message


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers"])
def test_a_size_that_is_missing_is_named(name: str, folder: Path) -> None:
    edit_json(folder / "config.json", **{name: None})
    assert refusal(folder).endswith(f"config.json: {name} is missing")


def test_more_layers_than_the_files_hold_cost_nothing(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10_000)
    assert "hold no layers.2.input_layernorm.weight, " in refusal(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"hold no layers\.2\."):
        load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000, "kilobytes: no layer was built"


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "intermediate_size", "head_dim"])
def test_sizes_that_the_files_do_not_bear_out_are_refused_before_anything_is_built(name: str, folder: Path) -> None:
    edit_json(folder / "config.json", **{name: 1 << 24})
    assert "config.json asks for (" in refusal(folder)
    with pytest.raises(CheckpointError, match=r"config\.json asks for \("):
        load(folder)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 0, -1e-5, True, "1e-5", 10**400], ids=lambda value: repr(value)[:9]
)
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_number_is_finite_and_above_zero(name: str, value: Any, folder: Path) -> None:
    edit_json(folder / "config.json", **{name: value})
    assert f"config.json: {name} is {repr(value)[:20]}" in (message := refusal(folder))
    assert message.endswith("it must be a finite number above 0")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": 0}, "rope_scaling.factor is 0; it must be a finite number above 0"),
        ({"rope_type": "linear", "factor": math.nan}, "rope_scaling.factor is nan; "),
        ({"rope_type": "llama3", "low_freq_factor": 5}, "rope_scaling.high_freq_factor is None; it must be at least "
         "low_freq_factor=5.0"),
        ({"rope_type": "llama3", "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0; "),
        ({"rope_type": "mrope"}, "rope_scaling.rope_type is 'mrope'; it must be one of default, linear, llama3"),
        ({"type": ["linear"]}, "rope_scaling.type is ['linear']; it must be one of"),
        ([8.0], "rope_scaling is [8.0]; it must be an object"),
    ],
    ids=str,
)  # fmt: skip
def test_rope_that_is_no_rope_is_refused(rope: Any, message: str, folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling=rope)
    assert message in refusal(folder)
    if isinstance(rope, dict):
        edit_json(folder / "config.json", rope_scaling=None, rope_parameters=rope)
        assert message.replace("rope_scaling", "rope_parameters") in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "unknown architecture '(none named)'"),
        ({"architectures": {"0": "x"}}, "unknown architecture '(none named)'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "unknown architecture ['LlamaForCausalLM']"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu']; it must be one of silu, "),
        ({"dtype": "float8"}, "dtype is 'float8'; it must be one of float32, bfloat16, float16"),
        ({"dtype": {"a": 1}}, "dtype is {'a': 1}; it must be one of"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads=3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be an integer from 1 to 4"),
        ({"head_dim": 5}, "the head size is 5; it must be even"),
        ({"head_dim": None, "num_attention_heads": 64}, "the head size is 0; it must be even"),
        ({"eos_token_id": -1}, "eos_token_id is -1; it must be an integer from 0 to"),
        ({"eos_token_id": [1, None]}, "eos_token_id is [1, None]; it must be"),
        ({"quantization_config": "int8"}, "quantization_config is 'int8'; it must be an object"),
        ({"quantization_config": {"config_groups": [1]}}, "quantization_config has quant_method not named"),
        ({"quantization_config": {"quant_method": "x" * 10**6}}, "quantization_config has quant_method xxx"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_field_of_another_kind_is_refused_by_its_name(changes: dict[str, Any], message: str, folder: Path) -> None:
    edit_json(folder / "config.json", **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize("name", ["Ernie4_5_ForCausalLM", "ExaoneMoEForCausalLM", "PhiMoEForCausalLM"])
def test_a_model_is_known_by_its_publishers_name_too(name: str, folder: Path) -> None:
    edit_json(folder / "config.json", architectures=[name])
    assert CheckpointConfig.from_folder(folder).architecture == OTHER_NAMES[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_that_is_missing_is_that_of_most_weights(dtype: torch.dtype, folder: Path) -> None:
    """As of gpt-oss."""
    edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    tensors = {name: one.to(dtype) for name, one in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, folder / "model.safetensors")
    assert f"torch.{CheckpointConfig.from_folder(folder).dtype}" == str(dtype)
    (folder / "model.safetensors").unlink()
    assert CheckpointConfig.from_folder(folder).dtype == "float32"


def test_a_text_model_may_have_the_names_of_the_whole_model(folder: Path) -> None:
    """As `AutoModelForCausalLM` saves a Qwen3.5 that it has loaded from a checkpoint with a vision model."""
    weights = folder / "model.safetensors"
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in load_file(weights).items()}
    save_file(renamed, weights)
    load(folder)


def test_the_end_of_text_is_checked_where_it_is_said(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json: eos_token_id is 'x'; it must be an integer from 0 to" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a":' + b"[" * 200_000, "it is nested too deeply"),
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON: "),
        (b"\xff\xff", "not JSON: "),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON: "),
        (b'{"a": "' + b" " * MAX_JSON_BYTES + b'"}', "that is the most that is read"),
    ],
    ids=["deep", "list", "cut", "bytes", "digits", "long"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_by_the_files_name(
    name: str, content: bytes, message: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    assert f"{name}: " in refusal(folder)
    assert message in refusal(folder)


# -- files ------------------------------------------------------------------------------------------------------------


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("make", [a_fifo, a_device, Path.mkdir], ids=["FIFO", "device", "folder"])
def test_what_is_no_regular_file_is_not_opened(
    make: Callable[[Path], None], name: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    kind = request.node.callspec.id.split("-")[0]
    assert f"{name} is a {kind}; it must be a regular file, or a link to one" in refusal(folder)
    if name.startswith("tokenizer"):
        with pytest.raises(CheckpointError, match=f"{name} is a {kind}"):
            load_tokenizer(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer.model"])
def test_a_git_lfs_pointer_is_named_as_one(name: str, folder: Path) -> None:
    (folder / name).write_text(POINTER)
    assert f"{folder / name} is a git-LFS pointer, not the file itself; fetch it with: git lfs pull" in refusal(folder)


def test_files_that_nobody_reads_may_be_anything(folder: Path) -> None:
    (folder / "NOTICE.txt").symlink_to("../../blobs/gone")
    (folder / "consolidated.safetensors").write_text(POINTER)
    os.mkfifo(folder / "log.txt")
    check_checkpoint(folder)
    load(folder)


def test_files_of_a_cache_are_links_to_elsewhere(folder: Path, tmp_path: Path) -> None:
    """As Hugging Face's hub lays them out: snapshots/REVISION/FILE -> ../../blobs/HASH."""
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    check_checkpoint(snapshot)
    load(snapshot)
    os.unlink((snapshot / "model.safetensors").resolve())
    assert "model.safetensors is a link to ../../blobs/1, which is not there" in refusal(snapshot)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd.safetensors", "../other/model.safetensors", "sub/model.safetensors", "", ".", "..", "config.json", 5,
     None, ["model.safetensors"]],
    ids=repr,
)  # fmt: skip
def test_an_index_names_only_files_of_its_folder(name: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (folder / "sub").mkdir()
    for elsewhere in (tmp_path / "other", folder / "sub"):
        (elsewhere / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(folder)
    assert f"weight_map has {name!r} for 'model.norm.weight'; it must be the name of a .safetensors file" in message
    with pytest.raises(CheckpointError, match="weight_map has"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3], ids=repr)
def test_an_index_without_a_map_is_refused(weight_map: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert f"weight_map is {weight_map!r}; it must map each tensor's name to its file" in refusal(folder)


def test_shards_are_found_by_their_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_checkpoint(folder)
    load(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: this shard is missing, though model.safetensors.index.json names it" in refusal(folder)


# -- weights ----------------------------------------------------------------------------------------------------------


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated; it has 0 bytes"),
        (b"\x01", "truncated; it has 1 bytes"),
        (struct.pack("<Q", 2**63), "it ends within its header"),
        (struct.pack("<Q", 12) + b"[" * 12, "not JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "nested too deeply"),
        (header(x=5), "its header has 5 for 'x'"),
        (header(x={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), "its header has {'dtype'"),
        (header(x={"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}), "its header has {'dtype'"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}), "its header has {'dtype'"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}), "its header has {'dtype'"),
        (header(x={"dtype": ["F32"], "shape": [1], "data_offsets": [0, 0]}), "its header has {'dtype'"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}), "truncated; it has"),
        (header(), "hold no embed_tokens.weight, norm.weight, lm_head.weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_is_none_is_refused(content: bytes, message: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert message in refusal(folder)


def spoil(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: change(tensors[name])}, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_kind_of_number_are_refused(dtype: torch.dtype, folder: Path) -> None:
    spoil(folder, "model.norm.weight", lambda tensor: tensor.to(dtype))
    assert "tensor model.norm.weight is " in refusal(folder)
    assert "asks for a floating-point type (F64, F32, BF16, F16)" in refusal(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=repr)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_no_finite_numbers_are_refused(
    dtype: torch.dtype, name: str, value: float, folder: Path
) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-2] = value
        return tensor

    spoil(folder, name, change)
    with pytest.raises(CheckpointError) as raised:
        load(folder, dtype)
    path = folder / "model.safetensors"
    assert str(raised.value) == f"{path}: tensor {name} holds {value}; weights must be finite numbers"


def test_infinities_that_cancel_out_are_seen(folder: Path) -> None:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, :2] = torch.tensor([math.inf, -math.inf])
        return tensor

    spoil(folder, "lm_head.weight", change)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds inf; "):
        load(folder)


def test_weights_whose_sum_overflows_are_fine_but_not_those_that_do_so_themselves(folder: Path) -> None:
    spoil(folder, "lm_head.weight", lambda tensor: torch.full_like(tensor, 60_000.0))
    load(folder, torch.float16)
    spoil(folder, "lm_head.weight", lambda tensor: torch.full_like(tensor, 70_000.0))
    load(folder, torch.float32)
    message = r"lm_head\.weight holds 70000\.0; that is too large for float16; set dtype to float32 or bfloat16"
    with pytest.raises(CheckpointError, match=message):
        load(folder, torch.float16)
