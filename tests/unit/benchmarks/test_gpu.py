"""tests/benchmarks/gpu.py: all of it runs, on tiny shapes; what fails or takes too long is said, the rest goes on."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.mark.slow
def test_every_section_runs(gpu: Any, tmp_path: Path) -> None:
    tables, numbers = tmp_path / "gpu.md", tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--in-process"]
    done = subprocess.run(
        [*command, "--output", str(tables), "--json", str(numbers)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(numbers.read_text())["sections"]
    assert list(sections) == list(gpu.SECTIONS)
    for name, section in sections.items():
        assert section["figures"], name
        assert f"## {gpu.SECTIONS[name].title}" in tables.read_text()
    assert all(figure["bar"] for figure in sections["steps"]["figures"])
    assert sections["throughput"]["figures"][-1]["bar"] == {"value": 3, "at_least": True}


def test_a_section_in_a_process_of_its_own(gpu: Any) -> None:
    result = gpu.run_apart("roofline", gpu.Bench(is_smoke=True), 120)
    assert result.error == ""
    assert len(result.figures) == 3
    assert result.roofline.copy_bytes_per_second == pytest.approx(1e9 * result.figures[0].value)


def test_a_section_that_takes_too_long_is_ended(gpu: Any) -> None:
    assert gpu.run_apart("steps", gpu.Bench(is_smoke=True), 0.01).error == "stopped after its 0 s"


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_section_that_fails_says_why(gpu: Any, is_apart: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Here for lack of a roofline."""
    bench = gpu.Bench(is_smoke=True)
    result = gpu.run_apart("decode", bench, 120) if is_apart else gpu.run_here("decode", bench)
    assert result.error == "failed: RuntimeError: the section roofline has not been measured"
    assert "Traceback" in capfd.readouterr().err


def test_the_others_go_on(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(bench: Any) -> Iterator[Any]:
        yield gpu.Figure(name="half", value=50, unit="%")
        raise ValueError("no more\nthan this")

    section = gpu.Section(title="Broken", seconds=1, measure=fail)
    monkeypatch.setattr(gpu, "SECTIONS", {"broken": section, **gpu.SECTIONS})
    output = tmp_path / "gpu.md"
    arguments = ["gpu.py", "--smoke", "--in-process", "--only", "broken", "decode", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu.main() == 1
    assert "| half | 50% |  |  |  |\n\n**failed: ValueError: no more**\n" in output.read_text()
    assert "heads 4/2" in capsys.readouterr().out


def test_goals(gpu: Any) -> None:
    goals = importlib.import_module("gpu_sections.figures")
    figure = gpu.Figure(name="n", value=1.3, unit="x", bar=goals.at_most(1.5), aim=goals.at_most(1.25))
    assert figure.cells == ["n", "1.30x", "≤ 1.50x met", "≤ 1.25x missed", ""]
    assert gpu.Figure(name="n", value=79.9, unit="%", bar=goals.at_least(80)).cells[2] == "≥ 80% missed"
    assert gpu.figure_from(json.loads(json.dumps(gpu.dataclasses.asdict(figure)))) == figure
