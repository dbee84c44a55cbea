"""tests/benchmarks/gpu_machine: what can be known without a GPU machine, and without its packages."""

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.measured_load import Measured

NEEDED = ["token_exact", "triton_kernels", "shutdown"]
"""In float32 as transformers; steps ahead and graphs in bf16; memory that is given back."""
FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu_machine"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("arguments", [[], ["all"]], ids=str)
def test_a_stage_has_to_be_named(arguments: list[str]) -> None:
    done = subprocess.run([str(FOLDER / "run.sh"), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "run.sh tests|bench|server" in done.stderr


def test_the_tests_for_a_device_are_named_and_take_no_more_than_one() -> None:
    files = re.findall(r"^ +(tests/unit/\S+)$", (FOLDER / "run.sh").read_text(), re.MULTILINE)
    root = FOLDER.parents[2]
    assert {"tests/unit/kernels/gpu", *(f"tests/unit/engine/test_{name}.py" for name in NEEDED)} <= set(files)
    for path in (root / file for file in files):
        assert path.exists()
        for file in [path] if path.is_file() else path.glob("test_*.py"):
            several = re.search(r"import ray|support\.multiproc|support\.distributed_rank", file.read_text())
            assert several is None, f"{file.name} takes several processes, each with a GPU of its own"


@pytest.mark.parametrize("script", ["pack"], indirect=True)
def test_wheels_are_packed_without_what_no_program_reads(script: Any, tmp_path: Path) -> None:
    with script.zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in ("a/__init__.py", "a/tests/test_a.py", "a/lib/a.so", "a/include/a.h", "a-1.dist-info/METADATA"):
            wheel.writestr(name, "")
    script.unpack([tmp_path / "a.whl"], tmp_path / "site")
    files = {str(file.relative_to(tmp_path / "site")) for file in tmp_path.glob("site/**/*") if file.is_file()}
    assert files == {"a/__init__.py", "a/lib/a.so", "a-1.dist-info/METADATA"}


@pytest.mark.parametrize("script", ["server"], indirect=True)
def test_streams_that_end_badly_are_told(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    good = Measured(ttft_seconds=0.5, num_tokens=8, finish_reason="length")
    assert script.report([good, good], 2.0, 8)
    assert "8 tokens/s (16 tokens in 2.00 s)" in capsys.readouterr().out
    for bad in (
        Measured(error="no blocks"),
        Measured(ttft_seconds=0.1, num_tokens=7, finish_reason="length"),
        Measured(ttft_seconds=0.1, num_tokens=8, finish_reason="stop"),
    ):
        assert not script.report([good, bad], 2.0, 8)
        assert "1 of 2 streams" in capsys.readouterr().out
