"""`quire doctor` finds what is missing and says so to people and programs."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from quire_cli import doctor
from quire_cli.doctor import Check
from quire_cli.main import run
from support.adapters import make_adapter
from support.checkpoints import edit_json, make_small_checkpoint
from support.serving import ROOT


def test_json_holds_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in report["checks"]]
    assert {
        "python",
        "cpu",
        "kernels",
        "cores",
        "memory",
        "gpu",
        "tritonserver",
        "ports",
        "/dev/shm",
        "leftovers",
    } <= set(names)
    assert all(check["mend"] for check in report["checks"] if check["status"] != "OK")
    assert code == (0 if report["fit"] else 1)


def test_what_serve_needs_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("a", "OK", "fine"), Check("b", "WARN", "so so", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(checks))
    assert run(["doctor"]) == 0
    checks.append(Check("c", "FAIL", "gone", "bring it back"))
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["FAIL", "c", "gone;", "bring", "it", "back"]


def test_lines_have_a_status_first(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor"])
    assert all(line.split()[0] in ("OK", "WARN", "FAIL") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("system", "machine", "status"),
    [("linux", "x86_64", "OK"), ("linux", "aarch64", "WARN"), ("darwin", "x86_64", "FAIL")],
)
def test_machines_that_quire_is_not_made_for_are_named(
    system: str, machine: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As README's requirements."""
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(platform=system, executable="python3"))
    monkeypatch.setattr(doctor, "platform", SimpleNamespace(machine=lambda: machine, python_version=lambda: "3.11.7"))
    check = doctor._python()
    assert check.status == status
    assert status == "OK" or "x86-64" in check.mend
    assert "Linux on x86-64" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_says_which_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_kernels import cpu

    def check(variable: str) -> Check:
        monkeypatch.setenv(cpu.KERNELS_VARIABLE, variable)
        cpu.status.cache_clear()
        return doctor._kernels()

    try:
        assert check("torch").status == "WARN"
        assert "plain torch, which is slow" in check("torch").detail
        wrong = check("sse2")
        assert (wrong.status, wrong.mend) == ("FAIL", "unset QUIRE_CPU_KERNELS")
        assert "known are amx, avx512_bf16" in wrong.detail
    finally:
        monkeypatch.undo()
        cpu.status.cache_clear()


PROC_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)  Thu Jan 23 2025
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
H200 = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0)
T4 = SimpleNamespace(name="Tesla T4", total_memory=15 * 2**30, major=7, minor=5)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Check]:
    """The check on a machine of these GPUs, as torch and the driver tell of them."""

    def check(has_driver: bool, has_cuda: bool, gpus: Sequence[SimpleNamespace] = (), warning: str = "") -> Check:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return bool(gpus)

        file = tmp_path / "version"
        if has_driver:
            file.write_text(PROC_VERSION)
        monkeypatch.setattr(doctor, "DRIVER_FILE", file)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: has_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
        monkeypatch.setattr(torch.version, "cuda", "12.8" if has_cuda else None)
        return doctor._gpu()

    return check


def test_names_every_gpu_and_what_drives_it(machine: Callable[..., Check]) -> None:
    check = machine(True, True, [H200, H200])
    gpu = "NVIDIA H200 (140 GiB, compute capability 9.0)"
    assert check.detail == f"{gpu}, {gpu}; driver 570.86.15, CUDA 12.8 of torch {torch.__version__}"
    assert check.status == "OK"
    assert machine(False, True, [H200]).detail.startswith(f"{gpu}; driver ")


def test_gpu_without_bfloat16_is_a_warning(machine: Callable[..., Check]) -> None:
    check = machine(True, True, [H200, T4])
    assert (check.status, "dtype float16" in check.mend) == ("WARN", True)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((False, False), "OK", f"none (torch {torch.__version__} has no CUDA, and there is no NVIDIA driver)"),
        ((True, False), "WARN", f"NVIDIA driver 570.86.15, but torch {torch.__version__} has no CUDA"),
        ((False, True), "OK", "none (there is no NVIDIA driver); models run on the CPU"),
        ((True, True, (), "CUDA initialization: The driver\n is too old."), "WARN",
         "but CUDA initialization: The driver is too old: models run on the CPU"),
        ((True, True), "WARN", "but torch finds no GPU"),
    ],
)  # fmt: skip
def test_says_why_there_is_no_gpu(
    arguments: tuple[Any, ...], status: str, words: str, machine: Callable[..., Check]
) -> None:
    check = machine(*arguments)
    assert check.status == status
    assert words in check.detail
    assert bool(check.mend) == (status != "OK")


CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"


def checks_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the checks of a checkpoint by name."""
    code = run(["doctor", "--json", "--model", *arguments])
    return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.fixture
def fit_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([Check("machine", "OK", "fine")]))


@pytest.mark.usefixtures("fit_machine")
def test_a_checkpoint_that_runs_has_its_family_and_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = checks_of(capsys, str(CHECKPOINT), "kv_cache_memory_bytes=9830400", "device=cpu")
    assert code == 0
    assert list(checks) == ["machine", "model", "weights", "KV cache"]
    assert {check["status"] for check in checks.values()} == {"OK"}
    assert "LlamaForCausalLM runs on the CPU" in checks["model"]["detail"]
    assert "for generate, embed" in checks["model"]["detail"]
    assert "family llama, with 1024 tokens of context" in checks["model"]["detail"]
    assert checks["weights"]["detail"] == "5.5 M parameters, 10.4 MiB in bfloat16"
    assert checks["KV cache"]["detail"].startswith("3072 bytes per token; 3200 tokens fit into 9.4 MiB")


@pytest.mark.usefixtures("fit_machine")
def test_too_few_tokens_are_a_warning_with_the_length_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["kv_cache_memory_bytes=983040", "quantization=int8", "device=cpu"]
    code, checks = checks_of(capsys, str(CHECKPOINT), *settings)
    assert code == 0
    assert checks["weights"]["detail"].endswith("MiB in int8")
    assert checks["KV cache"]["status"] == "WARN"
    assert "set max_model_len to at most 320" in checks["KV cache"]["mend"]


@pytest.mark.usefixtures("fit_machine")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere"], "no folder /nowhere"),
        ([str(CHECKPOINT), "max_modell_len=5"], "did you mean 'max_model_len'?"),
        ([str(CHECKPOINT), "max_model_len=2000000"], "the checkpoint's positions end at 1024"),
        ([str(CHECKPOINT), "tensor_parallel_size=3"], "num_attention_heads=8 is no multiple of it"),
        ([str(CHECKPOINT), "kv_cache_memory_bytes=100"], "one block of 16 tokens takes 49152 bytes"),
    ],
)
def test_what_does_not_run_is_said_with_the_reason(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = checks_of(capsys, *arguments)
    assert code == 1
    assert checks["model"]["status"] == "FAIL"
    assert words in f"{checks['model']['detail']}; {checks['model']['mend']}"
    assert checks["model"]["mend"]


@pytest.mark.usefixtures("fit_machine")
def test_an_unknown_architecture_and_a_damaged_file_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_small_checkpoint(tmp_path / "small")
    edit_json(folder / "config.json", architectures=["Unheard"])
    code, checks = checks_of(capsys, str(folder))
    assert (code, checks["model"]["status"]) == (1, "FAIL")
    assert "Unheard" in checks["model"]["detail"]
    edit_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    code, checks = checks_of(capsys, str(folder))
    assert (code, checks["model"]["status"]) == (1, "FAIL")
    assert "model.safetensors" in checks["model"]["detail"]


@pytest.mark.usefixtures("fit_machine")
def test_weights_of_a_hub_checkpoint_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, *, local_files_only: bool, **options: Any) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is here")
        asked.append({"name": name, **options})
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CHECKPOINT / file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    code, checks = checks_of(capsys, "org/name", "revision=v2", "device=cpu")
    assert code == 0
    assert "weights are not on this machine" in checks["model"]["detail"]
    assert checks["weights"]["detail"] == "5.5 M parameters, 10.4 MiB in bfloat16"
    ((options),) = asked
    assert (options["name"], options["revision"]) == ("org/name", "v2")
    assert "*.safetensors" in options["ignore_patterns"]


@pytest.mark.usefixtures("fit_machine")
def test_an_adapter_is_checked_with_the_checkpoint_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_adapter(tmp_path / "sql", CHECKPOINT, rank=8, targets=("q_proj", "v_proj"))
    code, checks = checks_of(capsys, str(folder), "device=cpu")
    assert (code, checks["adapter"]["status"]) == (0, "OK")
    detail = "sql: LoRA of rank 8 for LlamaForCausalLM, 12 layers (q_proj, v_proj), 0.2 MiB"
    assert checks["adapter"]["detail"] == detail
    code, checks = checks_of(capsys, str(folder), "max_lora_rank=4")
    assert (code, checks["adapter"]["status"]) == (1, "FAIL")
    assert "it has rank 8" in checks["adapter"]["detail"]
    edit_json(folder / "adapter_config.json", base_model_name_or_path="/nowhere/base")
    code, checks = checks_of(capsys, str(folder))
    assert (code, checks["model"]["status"]) == (1, "FAIL")
    assert "quire doctor --model BASE enable_lora=true" in checks["model"]["mend"]
    code, checks = checks_of(capsys, str(CHECKPOINT), "enable_lora=true", f'lora_modules={{"sql": "{folder}"}}')
    assert (code, checks["adapter"]["detail"]) == (0, detail)


def test_settings_need_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "max_model_len=5"]) == 2
    assert "--model" in capsys.readouterr().err
