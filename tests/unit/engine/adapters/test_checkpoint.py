"""Adapters that are not trusted: each is rejected in a line that names the file and what is wrong with it."""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quire_engine import LoRARequest
from quire_engine.adapters.checkpoint import AdapterCheckpoint
from quire_engine.adapters.files import check_finite, digest_of, read_files
from quire_engine.adapters.registry import AdapterRegistry
from quire_engine.config import LoRAConfig
from quire_engine.errors import CheckpointError, RequestError, UnknownAdapterError
from quire_engine.lora import AdaptableModules
from quire_engine.stats import AdapterStats
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter
from support.checkpoints import POINTER, edit_json, make_small_checkpoint

SIZES = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
MODULES = AdaptableModules(
    {f"layers.{i}.self_attn.{name}": shape for i in range(2) for name, shape in SIZES.items()}
    | {f"layers.{i}.mlp.{name}": (24, 16) for i in range(2) for name in ("gate_proj", "up_proj")}
    | {f"layers.{i}.mlp.down_proj": (16, 24) for i in range(2)},
    fused={"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
    tables={"embed_tokens": (32, 16), "lm_head": (32, 16)},
    are_tied=True,
)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = make_small_checkpoint(tmp_path / "base")
    return make_adapter(tmp_path / "adapter", base, rank=4, targets=["q_proj", "v_proj"])


def read(folder: Path, max_rank: int = 64) -> AdapterCheckpoint:
    return AdapterCheckpoint.read(folder, MODULES, max_rank)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "adapter_config.json", **changes)


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return spoil


def added(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    return tensors(lambda found: found.update({name: torch.ones(shape, dtype=dtype)}))


def changed(change: Callable[[torch.Tensor], torch.Tensor], half: str = "A") -> Callable[[Path], None]:
    name = f"{LAYER}.lora_{half}.weight"
    return tensors(lambda found: found.update({name: change(found[name])}))


def content(change: Callable[[bytes], bytes], name: str = "adapter_model.safetensors") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoiled(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        fields = json.loads(data[8 : 8 + size])
        change(fields)
        new = json.dumps(fields).encode()
        return struct.pack("<Q", len(new)) + new + data[8 + size :]

    return content(spoiled)


def with_nan(one: torch.Tensor) -> torch.Tensor:
    one[0, 0] = torch.nan
    return one


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def as_fifo(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def sparse(folder: Path) -> None:
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)


def dora(folder: Path) -> None:
    config(use_dora=True)(folder)
    for layer in range(2):
        for name, (rows, _) in SIZES.items():
            if name in ("q_proj", "v_proj"):
                own = LAYER.replace("layers.0", f"layers.{layer}").replace("q_proj", name)
                added(f"{own}.lora_magnitude_vector", rows)(folder)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another method": (config(peft_type="IA3"), "peft_type is 'IA3'; it must be 'LORA'"),
    "no method": (config(peft_type=None), "peft_type is None"),
    "biases": (config(bias="lora_only"), "bias is 'lora_only'; it must be 'none'"),
    "DoRA without magnitudes": (config(use_dora=True), "there is no lora_magnitude_vector beside it"),
    "DoRA of text": (config(use_dora="yes"), "use_dora is 'yes'; it must be true or false"),
    "transposed": (config(fan_in_fan_out=True), "fan_in_fan_out is True"),
    "biases of B": (config(lora_bias=True), "lora_bias is True"),
    "a head that is not there": (config(modules_to_save=["lm_head"]), "modules_to_save is .* names 'lm_head', which"),
    "modules of text": (config(modules_to_save="lm_head"), "modules_to_save is 'lm_head'; it must be a list of names"),
    "whole tokens": (config(trainable_token_indices=[1, 2]), "trainable_token_indices"),
    "repeated layers": (config(layer_replication=[[0, 2]]), "layer_replication"),
    "parameters": (config(target_parameters=["mlp.experts.down"]), "target_parameters"),
    "QALoRA": (config(use_qalora=True), "use_qalora"),
    "activated": (config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "a changed base": (config(init_lora_weights="pissa_niter_16"), "init_lora_weights is 'pissa_niter_16'"),
    "no rank": (config(r=0), "r is 0; it must be 1 or more"),
    "a rank of text": (config(r="8"), "r is '8'"),
    "no alpha": (config(lora_alpha=1e300), "lora_alpha is 1e\\+300"),
    "rsLoRA of text": (config(use_rslora="yes"), "use_rslora is 'yes'"),
    "no targets": (config(target_modules=None), "target_modules is None"),
    "odd targets": (config(target_modules=[1]), r"target_modules is \[1\]"),
    "other targets": (config(target_modules=["q_proj"]), "leave that layer out"),
    "targets without matrices": (config(target_modules=["q_proj", "v_proj", "o_proj"]), "no matrices of 'o_proj'"),
    "layers left out": (config(layers_to_transform=[1]), "leave that layer out"),
    "odd layers": (config(layers_to_transform=["x"]), "layers_to_transform"),
    "an endless pattern": (config(target_modules="(.*)*(.*)*(.*)*(a|a)*b$"), "too long to match|leave that"),
    "a broken pattern": (config(rank_pattern={"(": 3}), "rank_pattern or alpha_pattern has"),
    "a pattern of lists": (config(alpha_pattern=[1]), r"alpha_pattern is \[1\]; it must be an object"),
    "another rank": (config(r=5), r"has shape \[4, 16\]; the model and adapter_config.json ask for \[5, 16\]"),
    "a rank above the setting": (
        config(rank_pattern={"q_proj": 65}), "it has rank 65; max_lora_rank is 64"
    ),
    "no matrices": (tensors(dict.clear), "it holds no LoRA matrices"),
    "half a pair": (tensors(lambda found: found.__delitem__(f"{LAYER}.lora_B.weight")), "there is no lora_B beside it"),
    "an unknown layer": (added("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", 4, 16), "no lora_B"),
    "a twin": (added(f"{LAYER}.lora_A.default.weight", 4, 16), "there is another lora_A of the same layer"),
    "half an embedding": (
        added("base_model.model.model.embed_tokens.lora_embedding_A", 4, 32), "there is no lora_B beside it"
    ),
    "a linear layer's of an embedding": (
        tensors(lambda found: found.update({
            f"base_model.model.model.embed_tokens.lora_{half}.weight": torch.ones(shape)
            for half, shape in (("A", (4, 16)), ("B", (32, 4)))
        })), "this model has no such linear layer",
    ),
    "a base that nothing changes": (
        added("base_model.model.model.embed_tokens.base_layer.weight", 32, 16), "that is no matrix of LoRA"
    ),
    "magnitudes without DoRA": (
        added(f"{LAYER}.lora_magnitude_vector", 16), "and use_dora in adapter_config.json is not true"
    ),
    "magnitudes of other rows": (
        lambda folder: [
            dora(folder), added(f"{LAYER}.lora_magnitude_vector", 15)(folder)
        ], "it has 15 numbers; the model asks for 16",
    ),
    "magnitudes alone": (
        lambda folder: [
            dora(folder), added(f"{LAYER.replace('q_', 'o_')}.lora_magnitude_vector.weight", 16)(folder)
        ], "a magnitude of DoRA, and there are no matrices beside it",
    ),
    "another whole module": (added("base_model.model.score.modules_to_save.weight", 2, 16), "a whole module"),
    "a head of other columns": (added("base_model.model.lm_head.weight", 32, 12), "the model asks for 16 columns"),
    "too many tokens": (
        added("base_model.model.model.embed_tokens.weight", 33, 16),
        "it has 33 tokens, and the model's vocabulary 32: tokens that an adapter adds must fit",
    ),
    "two heads": (
        tensors(lambda found: found.update({
            f"base_model.model.lm_head{one}.weight": torch.ones(32, 16) for one in ("", ".modules_to_save.default")
        })), "another tensor replaces lm_head, too",
    ),
    "an infinite embedding": (
        tensors(lambda found: found.update({
            "base_model.model.model.embed_tokens.weight": torch.full((32, 16), torch.inf)
        })), "a value that is not finite",
    ),
    "another tensor": (added("base_model.model.model.norm.weight", 16, 1), "no matrix of LoRA"),
    "other columns": (changed(lambda one: one[:, :12].contiguous()), r"has shape \[4, 12\]"),
    "other rows": (changed(lambda one: one[:8].contiguous(), "B"), r"has shape \[8, 4\]"),
    "not a number": (changed(with_nan), r"layers\.0\..*q_proj\.lora_A\.weight: it holds a value that is not finite"),
    "infinite": (changed(lambda one: (one * 1e30).to(torch.float16)), "a value that is not finite"),
    "not a number in bfloat16": (
        changed(lambda one: with_nan(one).bfloat16(), "B"),
        r"layers\.0\..*q_proj\.lora_B\.weight: it holds a value that is not finite",
    ),
    "integers": (changed(lambda one: one.to(torch.int32)), "is 'I32'; it must be one of F32, F16, BF16"),
    "three sizes": (changed(lambda one: one[None]), r"has shape \[1, 4, 16\]"),
    "a pickle": (pickled, "adapter_model.bin is a pickle, which is not read"),
    "a FIFO": (as_fifo, "is a FIFO; it must be a regular file"),
    "a pointer": (content(lambda data: POINTER.encode()), "is a git-LFS pointer"),
    "a file that never ends": (sparse, "LoRA of rank 256 of all layers has less than"),
    "truncated": (content(lambda data: data[:-8]), "truncated or not a safetensors file"),
    "too much": (content(lambda data: data + b"x"), "its header speaks of"),
    "empty": (content(lambda data: b""), "truncated or not a safetensors file"),
    "no safetensors": (content(lambda data: b"\x80\x02}q\x00." * 20), "truncated or not a safetensors file"),
    "overlapping": (
        header(lambda fields: fields[f"{LAYER}.lora_B.weight"].update(data_offsets=[0, 256])),
        "truncated or not a safetensors file",
    ),
    "odd offsets": (
        header(lambda fields: fields[f"{LAYER}.lora_A.weight"].update(data_offsets="ab")),
        "an entry that cannot be read",
    ),
    "no JSON": (content(lambda data: b"{", "adapter_config.json"), "not JSON"),
    "nested JSON": (content(lambda data: b"[" * 100_000, "adapter_config.json"), "nested too deeply|not JSON"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "there is no adapter_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_adapter_is_rejected_by_name(folder: Path, name: str) -> None:
    read(folder)
    spoil, message = HOSTILE[name]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        read(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1500


def test_only_what_takes_as_long_as_the_file_is_large_runs_elsewhere(folder: Path) -> None:
    functions: list[Any] = []

    def run_large(function: Any) -> Any:
        functions.append(function.func)
        return function()

    assert AdapterCheckpoint.read(folder, MODULES, 64, run_large) == read(folder)
    assert functions == [read_files, digest_of, check_finite]


def test_names_and_patterns_are_as_peft_has_them(folder: Path) -> None:
    config(
        target_modules=r".*\.(q|v)_proj",
        rank_pattern={r"layers\.1\.self_attn\.v_proj": 4},
        alpha_pattern={"v_proj": 3.0},
    )(folder)
    found = read(folder)
    assert set(found.modules) == {f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qv"}
    assert found.modules["layers.0.self_attn.q_proj"].scaling == 8 / 4
    assert found.modules["layers.1.self_attn.v_proj"].scaling == 3 / 4
    assert (found.rank, found.target_modules) == (4, ["q_proj", "v_proj"])
    config(use_rslora=True, target_modules="all-linear")(folder)
    assert read(folder).modules["layers.0.self_attn.q_proj"].scaling == 8 / 2
    assert read(folder).digest != found.digest


def test_magnitudes_are_beside_their_matrices(folder: Path) -> None:
    dora(folder)
    found = read(folder).modules
    shapes = {name: module.magnitude.shape for name, module in found.items() if module.magnitude is not None}
    assert shapes == {
        f"layers.{i}.self_attn.{name}": (SIZES[name][0], 1) for i in range(2) for name in ("q_proj", "v_proj")
    }
    modules = msgspec.structs.replace(MODULES, why_not_dora="on a GPU")
    with pytest.raises(CheckpointError, match="use_dora is True; it must be false on a GPU"):
        AdapterCheckpoint.read(folder, modules, 64)
    embedding = "base_model.model.model.embed_tokens"
    for name, *shape in (
        (f"{embedding}.lora_embedding_A", 4, 32), (f"{embedding}.lora_embedding_B", 16, 4),
        (f"{embedding}.lora_magnitude_vector", 16),
    ):  # fmt: skip
        added(name, *shape)(folder)
    config(target_modules=["q_proj", "v_proj", "embed_tokens"])(folder)
    with pytest.raises(CheckpointError, match="DoRA of the embedding or of the head is not supported"):
        read(folder)


def test_tables_replace_what_they_are_named_after(folder: Path) -> None:
    added("base_model.model.model.embed_tokens.weight", 30, 16)(folder)
    config(modules_to_save=["embed_tokens"])(folder)
    found = read(folder)
    assert {name: one.shape for name, one in found.tables.items()} == {"embed_tokens": (30, 16)}
    assert found.target_modules == ["embed_tokens", "q_proj", "v_proj"]
    config(ensure_weight_tying=True)(folder)
    assert set(read(folder).tables) == {"embed_tokens", "lm_head"}


def test_lora_of_an_embedding_and_of_a_head(folder: Path) -> None:
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    for name, *shape in (
        (f"{embedding}.lora_embedding_A", 4, 32), (f"{embedding}.lora_embedding_B", 16, 4),
        (f"{embedding}.base_layer.weight", 32, 16), (f"{head}.lora_A.weight", 4, 16), (f"{head}.lora_B.weight", 32, 4),
    ):  # fmt: skip
        added(name, *shape)(folder)
    config(target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])(folder)
    found = read(folder)
    assert found.changes_tables
    assert not found.tables
    own = found.modules["embed_tokens"], found.modules["lm_head"]
    assert [(one.a.shape, one.b.shape) for one in own] == [((4, 32), (16, 4)), ((4, 16), (32, 4))]
    added(f"{head}.weight", 32, 16)(folder)
    with pytest.raises(CheckpointError, match="another tensor changes the same layer"):
        read(folder)


def test_a_fused_layer_is_divided_among_its_parts(folder: Path) -> None:
    names = {"A": (4, 16), "B": (32, 4)}
    config(target_modules=["qkv_proj"])(folder)
    own = {
        f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{half}.weight": torch.ones(shape)
        for half, shape in names.items()
    }
    save_file(own, folder / "adapter_model.safetensors")
    found = read(folder).modules
    rows = {name.rpartition(".")[2]: module.b_rows.start for name, module in found.items()}
    assert rows == {"q_proj": 0, "k_proj": 16, "v_proj": 24}


def test_the_registry_knows_names_by_their_nearest(folder: Path) -> None:
    registry = AdapterRegistry(LoRAConfig(enable_lora=True, lora_modules={"alice": str(folder)}), MODULES)
    with pytest.raises(
        UnknownAdapterError, match="lora_name is 'alcie'; there is no such adapter; did you mean 'alice'"
    ):
        registry.find(LoRARequest("alcie"))
    for name in ("", "a\nb"):
        with pytest.raises(RequestError, match="it must be 1 to 256 printable characters"):
            registry.add(LoRARequest(name, lora_path=str(folder)))
    with pytest.raises(RequestError, match="lora_path is ''"):
        registry.add(LoRARequest("bob"))
    with pytest.raises(CheckpointError, match="there is no such folder"):
        registry.add(LoRARequest("bob", lora_path=str(folder / "nowhere")))
    with pytest.raises(CheckpointError, match="there is no such folder"):  # the system has no such names
        registry.add(LoRARequest("bob", lora_path="/" + 300 * "x"))
    alice = registry.find(LoRARequest("alice"))
    assert alice is not None
    stats = AdapterStats(running={"alice": 2}, waiting={"alice": 1}, in_use=[alice.digest], loads={alice.digest: 3})
    (info,) = registry.infos([stats, AdapterStats(ready=[alice.digest])])
    assert (info.state, info.num_running, info.num_waiting, info.num_loads) == ("in use", 2, 1, 3)
    assert registry.pin("alice").is_pinned
    registry.remove("alice")
    assert registry.take_unpinned() == [msgspec.structs.replace(alice, is_pinned=True)]
    assert registry.names == registry.take_unpinned() == []
    with pytest.raises(UnknownAdapterError):
        registry.remove("alice")


def test_a_pin_ends_with_the_last_name_that_has_it(tmp_path: Path, folder: Path) -> None:
    other = make_adapter(tmp_path / "other", tmp_path / "base", targets=["q_proj"], seed=9)
    names = {"alice": str(folder), "bob": str(folder)}
    registry = AdapterRegistry(LoRAConfig(enable_lora=True, lora_modules=names), MODULES)
    pinned = [registry.pin(name) for name in names]
    assert registry.add(LoRARequest("alice", lora_path=str(folder))).is_pinned
    assert not registry.add(LoRARequest("alice", lora_path=str(other))).is_pinned
    assert registry.take_unpinned() == []
    registry.add(LoRARequest("bob", lora_path=str(other)))
    assert registry.take_unpinned() == pinned[1:]


def test_so_many_may_be_pinned(tmp_path: Path, folder: Path) -> None:
    base = tmp_path / "base"
    folders = {str(i): str(make_adapter(tmp_path / str(i), base, targets=["q_proj"], seed=i)) for i in range(3)}
    registry = AdapterRegistry(
        LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=2, lora_modules=folders), MODULES
    )
    registry.pin("0")
    registry.pin("0")
    with pytest.raises(RequestError, match="at most 1 of max_cpu_loras=2 may be"):
        registry.pin("1")


EXPERTS = "base_model.model.model.layers.0.mlp.experts"
MIXTURE = AdaptableModules(
    {f"layers.0.mlp.experts.{i}.{name}": (6, 16) for i in range(3) for name in ("gate_proj", "up_proj")}
    | {f"layers.0.mlp.experts.{i}.down_proj": (16, 6) for i in range(3)}
)


def stacked(folder: Path, shapes: Mapping[str, tuple[int, int]], **changes: Any) -> None:
    own = {
        f"{EXPERTS}{name}.weight": torch.arange(float(rows * columns)).view(rows, columns)
        for name, (rows, columns) in shapes.items()
    }
    save_file(own, folder / "adapter_model.safetensors")
    fields = {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], **changes}
    config(r=2, rank_pattern={"gate_up_proj": 4}, **fields)(folder)


STACKED = {
    ".base_layer.lora_A": (12, 16), ".base_layer.lora_B": (12, 12), ".lora_A": (6, 6), ".lora_B": (16, 6),
}  # fmt: skip


@pytest.mark.parametrize("are_interleaved", [False, True])
def test_stacks_are_divided_among_their_experts(folder: Path, are_interleaved: bool) -> None:
    """As `ParamWrapper` of PEFT has A and B."""
    stacked(folder, STACKED)
    modules = msgspec.structs.replace(MIXTURE, are_experts_interleaved=are_interleaved)
    found = AdapterCheckpoint.read(folder, modules, 64)
    assert set(found.modules) == set(MIXTURE.shapes)
    assert (found.rank, found.target_modules) == (4, ["down_proj", "gate_proj", "up_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, (size, infix, rank) in {"gate_up": (6, ".base_layer", 4), "down": (16, "", 2)}.items():
        a = tensors[f"{EXPERTS}{infix}.lora_A.weight"].view(3, rank, -1)
        b = tensors[f"{EXPERTS}{infix}.lora_B.weight"].view(-1, rank, 3)
        delta = torch.einsum("ore,eri->eoi", b, a)
        for part, projection in enumerate(("gate", "up") if name == "gate_up" else ("down",)):
            for expert in range(3):
                module = found.modules[f"layers.0.mlp.experts.{expert}.{projection}_proj"]
                own_a = a.flatten(0, 1)[module.a_rows]
                own_b = b.flatten(1)[module.b_rows, module.b_columns]
                rows = slice(part, None, 2) if are_interleaved and name == "gate_up" else slice(part * size, None)
                assert torch.equal(own_b @ own_a, delta[expert, rows][:size])
                assert (module.rank, module.scaling) == (rank, 8 / rank)


@pytest.mark.parametrize(
    ("shapes", "changes", "message"),
    [
        ({**STACKED, ".lora_A": (4, 6)}, {}, r"has shape \[4, 6\]; the model and .* ask for \[6, 6\]"),
        ({**STACKED, ".base_layer.lora_B": (6, 12)}, {}, r"ask for \[12, 12\]"),
        (STACKED, {"target_parameters": ["experts.down_proj"]}, "target_parameters in .* leaves that layer out"),
        (STACKED, {"target_parameters": ["experts.gate"], "target_modules": ["experts"]}, "leaves that layer out"),
        ({name: STACKED[name] for name in (".lora_A", ".lora_B")}, {}, "no matrices of 'experts.gate_up_proj', which"),
        (
            {**STACKED, **{f".base_layer{name}": STACKED[f".base_layer{name}"] for name in (".lora_A", ".lora_B")},
             ".base_layer.base_layer.lora_A": (6, 16), ".base_layer.base_layer.lora_B": (6, 6)},
            {}, "leaves that layer out",
        ),
        (STACKED, {"target_parameters": "experts.down_proj"}, "target_parameters is .* it must be a list of names"),
        (STACKED, {"rank_pattern": {"gate_up_proj": 65}}, "it has rank 65; max_lora_rank is 64"),
    ],
)  # fmt: skip
def test_a_hostile_stack_is_rejected_by_name(
    folder: Path, shapes: dict[str, tuple[int, int]], changes: dict[str, Any], message: str
) -> None:
    stacked(folder, shapes)
    config(**changes)(folder)
    with pytest.raises(CheckpointError, match=message):
        AdapterCheckpoint.read(folder, MIXTURE, 64)


def test_experts_are_rejected_where_they_cannot_be_changed(folder: Path) -> None:
    modules = AdaptableModules(why_not_experts="on a GPU")
    stacked(folder, STACKED)
    with pytest.raises(CheckpointError, match="LoRA of experts is not supported on a GPU"):
        AdapterCheckpoint.read(folder, modules, 64)
    stacked(folder, {".1.down_proj.lora_A": (2, 6), ".1.down_proj.lora_B": (16, 2)}, target_modules=["down_proj"])
    with pytest.raises(CheckpointError, match="LoRA of experts is not supported on a GPU"):
        AdapterCheckpoint.read(folder, modules, 64)


def test_a_parameter_may_be_the_weight_of_a_linear_layer(folder: Path) -> None:
    own = {"A": torch.ones(4, 16), "B": torch.ones(16, 4)}
    save_file({f"{LAYER}.lora_{half}.weight": one for half, one in own.items()}, folder / "adapter_model.safetensors")
    config(target_modules=None, target_parameters=["q_proj.weight"])(folder)
    assert set(read(folder).modules) == {"layers.0.self_attn.q_proj"}
