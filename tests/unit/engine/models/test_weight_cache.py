"""Packed weights in files: the same model from them, for every form that weights have; and what is no valid file."""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.models import CheckpointConfig, loader, mapped, weight_cache
from quire_engine.models.checkpoints.safetensors import SafetensorsReader
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable, Weight
from quire_engine.models.loader import load_model
from quire_engine.models.weight_cache import WeightCache, cache_for
from quire_engine.system import memory
from quire_engine.worker.cache_memory import CpuCacheMemory
from quire_kernels import cpu
from support.every_kind import core_of
from support.processes import start_forked

TINYPY = Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
RANKS = [
    ParallelState(),
    ParallelState(rank=1, tensor_parallel_size=2),
    ParallelState(rank=1, pipeline_parallel_size=2),
]


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, no checkpoint is read."""

    def read(*_: object) -> None:
        raise AssertionError("the checkpoint is read")

    return lambda: monkeypatch.setattr(SafetensorsReader, "read", read)


def make_cache(
    folder: Path,
    checkpoint: Path = TINYPY,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    parallel: ParallelState = RANKS[0],
) -> WeightCache:
    config = CheckpointConfig.from_folder(checkpoint)
    cache = cache_for(str(folder), checkpoint, config, dtype, quantization, parallel)
    assert cache is not None
    return cache


def load(
    cache: WeightCache | None,
    checkpoint: Path = TINYPY,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    parallel: ParallelState = RANKS[0],
) -> Decoder:
    config = CheckpointConfig.from_folder(checkpoint)
    return load_model(checkpoint, config, dtype, 64, parallel, quantization, cache=cache)


def write(folder: Path, *arguments: Any) -> Decoder:
    """A model, whose packed weights are in the folder now."""
    cache = make_cache(folder, *arguments)
    model = load(cache, *arguments)
    assert cache.mapped_bytes == 0
    cache.save(lambda: model)
    return model


def state_of(model: Decoder) -> dict[str, Any]:
    """All numbers that the model computes with, by their paths."""
    found: dict[str, Any] = {}

    def gather(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, tuple | list):
            for number, one in enumerate(value):
                gather(f"{name}.{number}", one)
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                gather(f"{name}.{field}", getattr(value, field))
        elif not isinstance(value, cpu.Call):
            found[name] = value

    for path, module in model.named_modules():
        if isinstance(module, Weight | Packable):
            for name, parameter in module.named_parameters(recurse=False):
                gather(f"{path}.{name}", parameter.data)
        if isinstance(module, Packable):
            gather(path, module.packed_weight)
    return found


def assert_same(one: Decoder, other: Decoder) -> None:
    ours, theirs = state_of(one), state_of(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name
            assert theirs[name].data_ptr() % mapped.ALIGNMENT == 0
        else:
            assert value == theirs[name], name


# -- the same model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", RANKS, ids=["alone", "tensor parallel", "pipeline parallel"])
@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("tied-gqa", torch.float32, None),
        ("tied-gqa", torch.bfloat16, "int8"),
        ("tied-gqa", torch.bfloat16, "fp8"),
        ("qwen2", torch.bfloat16, None),
        ("qwen2-moe", torch.bfloat16, "int8"),
        ("deepseek-v2", torch.bfloat16, "int8"),
        ("gpt-oss", torch.float32, None),
    ],
)
def test_a_model_is_the_same_from_its_file(
    name: str,
    dtype: torch.dtype,
    quantization: str | None,
    parallel: ParallelState,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    unread: Callable[[], None],
) -> None:
    arguments = (checkpoint(name), dtype, quantization, parallel)
    model = write(tmp_path, *arguments)
    unread()
    cache = make_cache(tmp_path, *arguments)
    mapped = load(cache, *arguments)
    assert cache.mapped_bytes == cache.path.stat().st_size > 0
    assert_same(model, mapped)
    for (path, one), other in zip(model.named_modules(), mapped.modules(), strict=True):
        if isinstance(one, Packable) and one.packed_weight is not None and path.endswith("mlp.down_proj"):
            x = torch.randn(3, one.packed.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert isinstance(other, Packable)
            assert torch.equal(one.apply_linear(x), other.apply_linear(x))


def test_mapped_weights_of_an_unquantised_checkpoint_need_none_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path)
    monkeypatch.setattr(loader, "_named_tensors", lambda *_, **__: pytest.fail("they are gathered"))
    assert_same(model, load(make_cache(tmp_path)))


@pytest.mark.parametrize("kernels", ["", "torch"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tied-gqa", {"quantization": "int8"}),
        ("mixtral", {}),
        ("deepseek-v3", {}),
        ("gemma3", {"dtype": "bfloat16"}),
        ("gemma3n", {"quantization": "int8"}),
        ("hunyuan-dense", {}),
    ],
)
def test_a_second_start_says_the_same_and_reads_no_checkpoint(
    name: str,
    settings: dict[str, Any],
    kernels: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    unread: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, kernels)
    cpu.status.cache_clear()
    try:
        prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (4, 9, 30)]
        said = []
        for number in range(2):
            if number:
                unread()
            llm = LLM(checkpoint(name), weight_cache_dir=str(tmp_path), max_model_len=64, max_num_seqs=4, **settings)
            said.append([one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)])
            wait_for_background()
            llm.sleep(level=2)
            llm.wake_up()  # after the first start, too, from the file
            wait_for_background()
            said.append([one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)])
            core_of(llm).shutdown()
        assert said == said[:1] * 4
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        monkeypatch.undo()
        cpu.status.cache_clear()


def wait_for_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join(60)
            assert not thread.is_alive()


def test_what_is_written_to_mapped_weights_does_not_reach_the_file(tmp_path: Path) -> None:
    write(tmp_path)
    cache = make_cache(tmp_path)
    before = cache.path.read_bytes()
    model = load(cache)
    for tensor in state_of(model).values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    assert cache.path.read_bytes() == before


def test_mapped_weights_that_are_freed_are_no_memory(tmp_path: Path) -> None:
    write(tmp_path)
    cache = make_cache(tmp_path)
    model = load(cache)
    assert memory.mapped_ranges([cache.path])
    del model
    assert not memory.mapped_ranges([cache.path])
    cache.start_background(torch.nn.Module())
    wait_for_background()


def test_a_form_that_no_file_can_hold_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(tmp_path)
    model = load(cache)
    model.layers["0"].mlp.down_proj.use_packed(object())  # type: ignore[union-attr,operator]
    with caplog.at_level(logging.INFO):
        cache.start_background(model)
        wait_for_background()
    assert "a packed weight holds a builtins.object" in caplog.text
    assert not list(tmp_path.iterdir())


# -- which file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(TINYPY, tmp_path / "own", copy_function=shutil.copyfile))


@pytest.mark.parametrize(
    "change",
    [
        lambda file: os.utime(file, ns=(0, 1)),
        lambda file: file.rename(file.with_name("old")) and shutil.copyfile(file.with_name("old"), file),
    ],
    ids=["written", "replaced"],
)
def test_a_checkpoint_that_changes_gets_another_file(change: Callable[[Path], None], own: Path, tmp_path: Path) -> None:
    file = own / "model.safetensors"
    os.utime(file, ns=(0, 0))
    before = make_cache(tmp_path, own).path
    assert make_cache(tmp_path, own).path == before
    change(file)
    os.utime(file, ns=(0, file.stat().st_mtime_ns))
    assert make_cache(tmp_path, own).path != before


def test_what_changes_packed_weights_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def paths() -> list[Path]:
        ways: list[tuple[Any, ...]] = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]
        return [make_cache(tmp_path, TINYPY, *way, rank).path for way in ways for rank in RANKS]

    first = paths()
    assert len({*first}) == len(first)
    monkeypatch.setattr(weight_cache, "_packers_digest", lambda: "other code")
    second = paths()
    monkeypatch.setattr(
        weight_cache, "kernel_status", lambda: SimpleNamespace(instruction_set="x", interprets_triton=0)
    )
    assert len({*first, *second, *paths()}) == 3 * len(first)


def test_the_digest_of_the_code_is_of_all_that_packs() -> None:
    names = {path.name for path in weight_cache.packer_files()}
    assert {"linear.py", "grouped.py", "int8.py", "parallel.py", "latent_attention.py"} <= names
    if cpu.status().handle is not None:
        assert any(name.startswith(cpu.LIBRARY_NAME) for name in names)


def test_where_none_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CheckpointConfig.from_folder(TINYPY)

    def cache(setting: str | None, parallel: ParallelState = RANKS[0]) -> WeightCache | None:
        return cache_for(setting, TINYPY, config, torch.float32, None, parallel)

    assert cache("") is None
    assert cache(str(tmp_path), ParallelState(tensor_parallel_size=2, num_redundant_experts=1)) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = cache(None)
    assert default is not None
    assert default.path.parent == tmp_path / "quire" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache(None) is None, "there is no home"
    monkeypatch.setattr(weight_cache, "MIN_BYTES", 1 << 40)
    assert cache(str(tmp_path)) is None, "less than is worth it"


@pytest.mark.parametrize("value", ["folder", 3, ["/tmp"]])
def test_the_setting_is_an_absolute_path(value: Any) -> None:
    with pytest.raises(ValueError, match=r"weight_cache_dir is .*; it must be the absolute path of a folder, or empty"):
        EngineConfig.from_settings({"model": "m", "weight_cache_dir": value})


# -- what is no valid file ----------------------------------------------------------------------------------------


def truncated(path: Path, size: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: size if size >= 0 else len(content) + size])


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def linked(path: Path, _: int) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def another_model(path: Path, _: int) -> None:
    model = write(path.parent, TINYPY, torch.bfloat16)
    make_cache(path.parent, TINYPY, torch.bfloat16).path.rename(path)
    del model


def replaced(path: Path, kind: int) -> None:
    path.unlink()
    if kind:
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(b"")


DAMAGES: list[tuple[Callable[[Path, int], object], int]] = [
    *((truncated, size) for size in (0, 1, 15, 16, 24, 55, 56, 57, 1000, -1, -4096)),
    *((flipped, place) for place in (0, 16, 20, 23, 24, 60, 500)),
    (linked, 0), (another_model, 0), (replaced, 0), (replaced, 1),
    (lambda path, mode: path.chmod(mode), 0o620),
    (lambda path, size: path.write_bytes(path.read_bytes() + bytes(size)), 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_or_foreign_file_is_made_anew(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, path = write(tmp_path), make_cache(tmp_path).path
    damage, argument = DAMAGES[number]
    damage(path, argument)
    cache = make_cache(tmp_path)
    assert_same(model, load(cache))
    assert cache.mapped_bytes == 0
    assert "is not used, and made anew" in caplog.text
    cache.save(lambda: model)
    cache = make_cache(tmp_path)
    assert_same(model, load(cache))
    assert cache.mapped_bytes > 0


# -- how it is written --------------------------------------------------------------------------------------------


def test_files_are_private(tmp_path: Path) -> None:
    write(tmp_path / "made" / "here")
    (file,) = (tmp_path / "made" / "here").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("problem", ["others may write there", "it is a file"])
def test_without_a_folder_of_its_own_none_is_kept(
    problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    if problem == "it is a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    cache = make_cache(folder)
    model = load(cache)
    with caplog.at_level(logging.INFO):
        cache.start_background(model)
        wait_for_background()
    assert f"packed weights are not kept in {folder}" in caplog.text
    assert folder.is_file() or not list(folder.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path)
    model = load(cache)

    def pwrite(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        cache.save(lambda: model)
    assert not list(tmp_path.iterdir())


def test_a_writer_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys, torch
from pathlib import Path
from quire_engine.models import weight_cache
from quire_engine.distributed import ParallelState
from quire_engine.models import CheckpointConfig
from quire_engine.models.loader import load_model
weight_cache.MIN_BYTES = 0
folder = Path({str(TINYPY)!r})
config = CheckpointConfig.from_folder(folder)
cache = weight_cache.cache_for({str(tmp_path)!r}, folder, config, torch.float32, None, ParallelState())
model = load_model(folder, config, torch.float32, 64, cache=cache)
weight_cache.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
cache.save(lambda: model)
"""
    writer = start_forked(code)
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    assert_same(write(tmp_path), load(make_cache(tmp_path)))


def test_weights_that_are_freed_are_not_written_to_the_end(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    model = load(cache)
    answers: Iterator[Decoder | None] = iter([model, model, model, None])
    cache.save(lambda: next(answers))
    assert not list(tmp_path.iterdir())


def test_one_of_several_writers_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_ino
    monkeypatch.setattr(WeightCache, "_write", lambda *_: pytest.fail("it is there"))
    make_cache(tmp_path).save(lambda: model)
    assert file.stat().st_ino == before


def test_what_was_used_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").touch()
    model = write(tmp_path)
    size = make_cache(tmp_path).path.stat().st_size
    for number in range(3):
        make_cache(tmp_path).path.rename(tmp_path / f"{number:064x}.weights")
        os.utime(tmp_path / f"{number:064x}.weights", ns=(number, number))
        if number < 2:
            make_cache(tmp_path).save(lambda: model)
    os.utime(tmp_path / f"{0:064x}.weights", ns=(5, 5))
    others, new = {"notes.txt", f"{0:064x}.weights", f"{2:064x}.weights"}, make_cache(tmp_path).path
    for free, kept in ((3 * size, {*others, new.name}), (-size, others)):  # half of 6 sizes, and half of one
        monkeypatch.setattr(os, "fstatvfs", lambda file, free=free: SimpleNamespace(f_bavail=free, f_frsize=1))
        make_cache(tmp_path).save(lambda: model)
        assert {path.name for path in tmp_path.iterdir()} == kept
        new.unlink(missing_ok=True)


def test_files_of_other_code_are_deleted_unless_it_may_still_run(tmp_path: Path) -> None:
    model = write(tmp_path)
    cache, installed = make_cache(tmp_path), max(path.stat().st_mtime for path in weight_cache.packer_files())
    old, used, own = (f"{code}{'0' * 48}.weights" for code in ("0" * 16, "1" * 16, cache.path.name[:16]))
    for name, seconds in ((old, -60), (used, 60), (own, -60), ("notes.txt", -60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (installed + seconds, installed + seconds))
    cache.start_background(model)
    wait_for_background()
    assert {path.name for path in tmp_path.iterdir()} == {used, own, "notes.txt", cache.path.name}


# -- memory -------------------------------------------------------------------------------------------------------


def test_the_kv_cache_has_no_memory_that_mapped_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.worker.cache_memory.available_memory_bytes", lambda: 1000)
    cpu_memory = CpuCacheMemory(EngineConfig.from_settings({"model": "m"}).core)
    planned = [cpu_memory.measure(lambda: None, lambda: 0, mapped).planned_bytes for mapped in (0, 600)]
    assert planned == [450, 180]


def test_pages_of_files_are_no_activations(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    mapped = torch.from_file(str(tmp_path / "file"), size=size, dtype=torch.uint8)

    def read() -> None:
        mapped.max()

    assert memory.peak_memory_growth(read) < size / 2
