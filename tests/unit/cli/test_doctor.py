"""`quire doctor` finds what is missing and says so to people and programs."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_cli import doctor
from quire_cli.doctor import Check
from quire_cli.main import run
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
