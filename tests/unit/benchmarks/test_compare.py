"""compare.py: which engine runs which checkpoint and workload; accuracy.py: what is read and compared."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A script as a module, as it finds its own when it is started."""
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def compare(load: Load) -> ModuleType:
    return load("compare")


def make_job(compare: ModuleType, tmp_path: Path, *workloads: str) -> Any:
    return compare.Job(model=tmp_path / "m", workloads=workloads, cache=tmp_path, peers=tmp_path, threads=1)


def engine(compare: ModuleType, name: str) -> Any:
    return compare.Engine(name=name, label=name, script="fake.py", variant="", precision="bf16")


def test_workloads_behind_a_context_run_with_prefix_caching(compare: ModuleType, tmp_path: Path) -> None:
    job = make_job(compare, tmp_path, "long_context", "one_stream", "mixed")
    split = [(one.workloads, one.prefix_caching) for one in compare.split_by_caching(job)]
    assert split == [(["one_stream", "mixed"], False), (["long_context"], True)]
    assert [one.workloads for one in compare.split_by_caching(replace(job, workloads=["mixed"]))] == [["mixed"]]


def test_an_engine_that_cannot_run_a_checkpoint_still_runs_others(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(engine: Any, job: Any, log: Path) -> None:
        if engine.name == "b" and job.model.name == "m":
            raise compare.RunError("b: no such type")

    monkeypatch.setattr(sys.modules["harness.engines"], "prepare", prepare)
    engines = [engine(compare, name) for name in "ab"]
    job = make_job(compare, tmp_path, "mixed")
    for model, names in (("m", ["a"]), ("n", ["a", "b"])):
        found = compare.runnable(engines, replace(job, model=tmp_path / model), tmp_path, compare.say)
        assert [one.name for one in found] == names
    assert capsys.readouterr().err == "b: no such type\n"


def test_an_engine_that_fails_is_left_out_of_that_job_only(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(engine: Any, job: Any, log: Path) -> list[Any]:
        ran.append((engine.name, job.workloads[0]))
        if ran[-1] == ("b", "mixed"):
            raise compare.RunError("b: died")
        return []

    monkeypatch.setattr(compare, "run", run)
    engines = [engine(compare, name) for name in "abc"]
    jobs = [make_job(compare, tmp_path, name) for name in ("mixed", "one_stream")]
    compare.run_rounds([(job, list(engines)) for job in jobs], 2, tmp_path)
    assert ran == [
        *[(name, "mixed") for name in "abc"], *[(name, "one_stream") for name in "abc"],
        *[(name, "mixed") for name in "ca"], *[(name, "one_stream") for name in "cba"],
    ]  # fmt: skip


@pytest.fixture
def llama_cpp(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """With a `llama-quantize` that appends the type's name to the file."""
    module = load("llama_cpp")
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\n[ "$1" = --allow-requantize ] && { cat "$2"; echo "$4"; } > "$3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(module, "program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(module.gguf_file, "convert", lambda folder, out: out.write_text("converted\n"))
    (tmp_path / "m").mkdir()
    return module


def made(llama_cpp: ModuleType, tmp_path: Path, variant: str) -> str:
    """What a prepared file holds."""
    arguments = Namespace(model=tmp_path / "m", converted=tmp_path / "converted", variant=variant, threads=1)
    llama_cpp.prepare(arguments)
    return " ".join(llama_cpp.model_file(arguments, variant).read_text().split())


def test_a_type_is_made_of_the_checkpoint_in_bf16(llama_cpp: ModuleType, tmp_path: Path) -> None:
    assert made(llama_cpp, tmp_path, "q4_k_m") == "converted q4_k_m"
    assert made(llama_cpp, tmp_path, "bf16") == "converted"
    assert not list((tmp_path / "converted").rglob("*.partial"))


def test_types_of_a_published_file_are_made_of_it(llama_cpp: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "m" / "model.gguf").write_text("published\n")
    assert made(llama_cpp, tmp_path, "gguf") == "published"
    assert made(llama_cpp, tmp_path, "q4_0") == "published bf16 q4_0"


def test_a_checkpoint_that_was_not_published_as_gguf_says_so(llama_cpp: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="m was not published as GGUF"):
        made(llama_cpp, tmp_path, "gguf")


def test_ours_reads_the_file_that_llama_cpp_reads(llama_cpp: ModuleType, load: Load, tmp_path: Path) -> None:
    quire = load("quire")
    arguments = Namespace(model=tmp_path / "m", converted=tmp_path / "c", variant="q4_0", prefix_caching=False)
    arguments.settings = "{}"
    assert quire.settings(arguments)["model"] == str(llama_cpp.model_file(arguments, "q4_0"))
    arguments.variant = "int4"
    assert quire.settings(arguments)["model"] == str(tmp_path / "m")
    assert quire.settings(arguments)["quantization"] == "int4"


def test_perplexity_is_read_from_what_llama_perplexity_prints(load: Load) -> None:
    accuracy = load("accuracy")
    assert accuracy.read_perplexity("[1]9.9,[2]8.8,\nFinal estimate: PPL = 18.2312 +/- 0.4\n") == 18.2312
    with pytest.raises(accuracy.ProgramError, match="no estimate: out of memory"):
        accuracy.read_perplexity("out of memory")


def test_answers_are_compared_until_ours_ends(load: Load) -> None:
    accuracy = load("accuracy")
    assert accuracy.first_difference([1, 2, 3], [1, 2, 3], 9) is None
    assert accuracy.first_difference([1, 2, 3], [1, 5, 3], 9) == 1
    assert accuracy.first_difference([1, 9, 3], [1, 5, 4], 9) is None
