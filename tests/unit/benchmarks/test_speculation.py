"""tests/benchmarks/speculation.py: all of it runs on the demo model."""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from quire_engine import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OWN_MODULES = ("speculation", "checkpoints", "workload", "harness")


@pytest.fixture
def speculation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, as it finds its own when it is started."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)  # these are the tests' cores, too
    yield importlib.import_module("speculation")
    for name in list(sys.modules):
        if name.split(".")[0] in OWN_MODULES:
            del sys.modules[name]


class WrongLLM(LLM):
    """With drafts it says something else now and then."""

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        outputs = super().generate(*arguments, **keywords)
        if self.get_stats().drafts is not None:
            outputs[0].outputs[0].token_ids[0] += 1
        return outputs


def run(speculation: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, arguments: Sequence[str]) -> int:
    command = ["speculation.py", "--models", "tinypy", "--quantizations", "bf16", "--tokens", "8", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--no-lookups", "--out", str(out), *arguments])
    monkeypatch.setattr(speculation, "MIN_SECONDS", 0.0)
    code: int = speculation.main()
    return code


def test_all_workloads_run_and_are_judged(
    speculation: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workloads = ["copy", "agentic", "chat", "random", "greedy", "misleading"]
    options = ["--methods", "ngram", "suffix", "--streams", "2", "1", "--workloads", *workloads]
    assert run(speculation, monkeypatch, tmp_path, options) == 0
    told = capsys.readouterr()
    lines = [line.split(" | ") for line in told.out.splitlines() if " | ngram | " in line]
    assert len(lines) == sum(" | suffix | " in line for line in told.out.splitlines())
    expected = [f"| {name}" for name in ["files", "files_sampled", *workloads[1:]] for _ in range(2)]
    assert sorted(line[0] for line in lines) == sorted(expected)
    assert {line[1] for line in lines} == {"1", "2"}
    assert sum(": ngram, tinypy bf16" in line for line in told.out.splitlines()) == 4  # random and greedy
    assert "tokens that differ between on and off: 0" in told.out
    assert (tmp_path / "table.md").read_text().strip() == told.out.strip()
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(cells) == 2 * len(lines)
    assert all(len(cell["off"]) == len(cell["on"]) == 1 for cell in cells)


def test_another_token_is_a_failure(
    speculation: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speculation, "LLM", WrongLLM)
    options = ["--methods", "ngram", "--streams", "1", "--workloads", "random"]
    assert run(speculation, monkeypatch, tmp_path, options) == 1
    assert "tokens that differ between on and off: 1" in capsys.readouterr().out


def test_processes_measure_one_after_the_other(
    speculation: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--processes", "2", "--methods", "ngram", "--streams", "1", "--workloads", "random"]
    assert run(speculation, monkeypatch, tmp_path, options) == 0
    told = capsys.readouterr()
    assert "medians of 1 rounds in each of 2 processes" in told.out
    assert "tokens that differ between on and off: 0" in told.out
    (cell,) = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert {batch["process"] for batch in cell["on"]} == {0, 1}


def test_models_draft_the_models_own_text(
    speculation: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here tinypy drafts for itself."""
    monkeypatch.setattr(speculation, "DRAFTS", {"draft_model": "model", "medusa": "nowhere"})
    workloads = ["files", "files_sampled", "agentic"]
    options = ["--methods", "draft_model", "medusa", "--streams", "2", "--workloads", *workloads]
    assert run(speculation, monkeypatch, tmp_path, options) == 0
    told = capsys.readouterr()
    lines = [line.split(" | ") for line in told.out.splitlines() if "draft_model" in line]
    assert [(line[0], line[2], line[-1]) for line in lines] == [
        ("| files", "draft_model", "0 |"),
        ("| files_sampled", "draft_model", "0 |"),
        ("| files_sampled", "draft_model, rejection", "- |"),
    ]
    assert "medusa is passed over: there is no folder" in told.err
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["acceptance"] for cell in cells] == ["exact", "exact", "rejection"]


def test_other_models_have_none_that_drafts_for_them(
    speculation: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = speculation.Model("s60", speculation.TINYPY, 8)
    assert list(model.configs(["suffix", "eagle3", "mtp"], ["exact"], {})) == ["suffix"]
    told = capsys.readouterr().err
    assert "eagle3 is passed over: no model was trained to draft for s60" in told
    assert "mtp is passed over: s60 has no layer of multi-token prediction" in told
    model.has_mtp = True
    assert list(model.configs(["mtp"], ["exact", "rejection"], {})) == ["mtp", "mtp, rejection"]


def test_every_walk_is_another_one_until_there_are_no_more(speculation: ModuleType) -> None:
    model = speculation.Model("m400-walk", speculation.TINYPY, 512)
    tasks = model.tasks("walk", 16)
    assert len({tuple(task.prompt) for task in tasks}) == 16
    assert all(task.text is None and len(task.prompt) == 256 for task in tasks)
    with pytest.raises(speculation.NoMoreTextsError, match="the walk has no more"):
        model.tasks("walk", 64)


@pytest.mark.parametrize(
    ("options", "error"), [(["--streams", "65"], "may be 1 to 64"), (["--processes", "0"], "must be at least 1")]
)
def test_what_cannot_be_measured_is_refused(
    speculation: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    error: str,
) -> None:
    with pytest.raises(SystemExit):
        run(speculation, monkeypatch, tmp_path, options)
    assert error in capsys.readouterr().err
