"""The library of C++ kernels: when it is used, and when it must not be."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quire_kernels import cpu
from quire_kernels.linear import pack_linear, quantize_per_token

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cpu.status.cache_clear()
    yield
    cpu.status.cache_clear()


def test_a_library_that_was_built_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it refused, all other tests of it would be skipped."""
    monkeypatch.delenv(cpu.KERNELS_VARIABLE, raising=False)
    if not [*Path(cpu.__file__).parent.glob(f"{cpu.LIBRARY_NAME}.*.so")]:
        pytest.skip(cpu.status().reason)
    assert cpu.library() is not None, cpu.status().reason


@pytest.mark.parametrize("constant", ["VERSION", "PANEL", "HEAD_SIZE_STEP", "MAX_HEAD_SIZE"])
def test_a_library_of_another_version_is_not_used(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    monkeypatch.setattr(cpu, constant, getattr(cpu, constant) + 1)
    cpu.status.cache_clear()
    assert cpu.library() is None
    assert "another version" in cpu.status().reason


SOURCE = (ROOT / "kernels/csrc/calls.h").read_text()
NAMES = sorted({call.__name__ for call in cpu.Call.__subclasses__()})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["swapped", "missing", "renamed", "retyped"])
def test_a_library_with_other_structures_is_not_used(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Swapped are two neighbours of one type: neither sizes nor offsets tell."""
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    fields = [*cpu._structures(SOURCE)[name]]
    if change == "swapped":
        i = next((i for i in range(len(fields) - 1) if fields[i][0] == fields[i + 1][0]), None)
        if i is None:
            pytest.skip("it has no two neighbours of one type")
        fields[i : i + 2] = fields[i + 1], fields[i]
    elif change == "missing":
        del fields[-1]
    elif change == "renamed":
        fields[0] = (fields[0][0], "another")
    else:
        fields[-1] = ("int64_t" if fields[-1][0] != "int64_t" else "void*", fields[-1][1])
    others = {**cpu._structures(SOURCE), name: fields}
    declarations = [
        f"struct {one} {{{' '.join(f'{kind} {field};' for kind, field in each)} }};" for one, each in others.items()
    ]
    header = tmp_path / "calls.h"
    header.write_text("\n".join(declarations))
    assert cpu._structures(header.read_text()) == others, "else this shows nothing"
    monkeypatch.setattr(cpu, "_HEADER", header)
    cpu.status.cache_clear()
    assert cpu.library() is None
    assert "another version" in cpu.status().reason


@pytest.mark.parametrize("name", NAMES)
def test_structures_have_the_fields_of_the_library(name: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    call = cpu.structure(name)
    assert [field for field, *_ in call._fields_] == [field for _, field in cpu._structures(SOURCE)[name]]
    assert next(other._fields_ for other in cpu.Call.__subclasses__() if other.__name__ == name) == call._fields_


@pytest.mark.parametrize("is_in_a_checkout", [True, False])
def test_a_library_without_its_source_beside_it_is_used(
    is_in_a_checkout: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    monkeypatch.setattr(cpu, "_HEADER", ROOT / "kernels/csrc/calls.h" if is_in_a_checkout else tmp_path / "calls.h")
    cpu.status.cache_clear()
    assert cpu.library() is not None


@pytest.mark.parametrize("name", cpu.INSTRUCTION_SETS)
def test_the_named_instruction_set_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the processor lacks are skipped here, by name; see conftest.py."""
    handle = cpu.library()
    if handle is None:
        pytest.skip(cpu.status().reason)
    if not handle.quire_select(name.encode()):
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, name)
    cpu.status.cache_clear()
    assert cpu.status().instruction_set == name


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, "mmx")
    with pytest.raises(ValueError, match=r"QUIRE_CPU_KERNELS is 'mmx'; known are amx, avx512_bf16, .* and torch"):
        cpu.library()


HAS_KERNELS = platform.machine() == "x86_64"
"""Whether there is something to build."""


def run_python(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    pytest.importorskip("setuptools")
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"QUIRE_BUILD_KERNELS": "1"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def build(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    folders = f"--build-temp={folder}/temp", f"--build-lib={folder}/lib"
    return run_python("setup.py", "-q", "build_ext", *folders, **variables)


def test_the_build_follows_every_file_of_the_source() -> None:
    program = "import runpy, setuptools; setuptools.setup = lambda **its: print(*(path for one in its['ext_modules']"
    program += " for path in one.sources + one.depends)); runpy.run_path('setup.py')"
    files = sorted(f"kernels/csrc/{path.name}" for path in (ROOT / "kernels" / "csrc").iterdir())
    assert sorted(run_python("-c", program).stdout.split()) == (files if HAS_KERNELS else [])


@pytest.mark.skipif(not HAS_KERNELS, reason="the kernels are for x86-64")
def test_a_build_that_fails_says_what_the_compiler_says(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'kernels.inc:7: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    for name, words in (str(compiler), "kernels.inc:7: error: no such thing"), ("no-compiler", "no-compiler"):
        process = build(tmp_path, CC=name, CXX=name)
        assert process.returncode != 0
        assert words in process.stderr
        assert "build without the C++ kernels, which is slow: QUIRE_BUILD_KERNELS=0" in process.stderr


def test_a_build_for_plain_torch_needs_no_compiler(tmp_path: Path) -> None:
    process = build(tmp_path, QUIRE_BUILD_KERNELS="0", CC="no-compiler", CXX="no-compiler")
    assert (process.returncode, list(tmp_path.iterdir())) == (0, []), process.stderr
    process = build(tmp_path, QUIRE_BUILD_KERNELS="no")
    assert process.returncode != 0
    assert "QUIRE_BUILD_KERNELS is 'no'; known are 0 and 1" in process.stderr


def test_what_the_kernels_write_is_float32_whatever_the_default_is() -> None:
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        weight = pack_linear(torch.ones(32, 64), torch.ones(32), quantize=True)
        assert quantize_per_token(x)[1].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.scales is not None
    assert weight.bias is not None
    assert weight.scales.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none_in_int8(value: float, cpu_kernels: str) -> None:
    x = torch.randn(2, 64)
    x[0, 63] = value
    _, scales = quantize_per_token(x)
    assert not scales[0].isfinite()
    assert scales[1].isfinite()
