"""Modules that are started as child processes."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine.system.child_process import start_module
from support.engines import engine, run, until
from support.fork_server import is_forked
from support.processes import children, parent

BOTH_WAYS = pytest.mark.parametrize("how", ["forked", "started as ever"])
CHILD = """
import json, os, sys
arguments = json.loads(sys.stdin.buffer.readline())
words = open("/proc/self/cmdline").read().split("\\0")[1:3]
shown = [arguments, os.environ["COLOUR"], os.getcwd(), os.getpgid(0) == os.getpid(), sys.orig_argv[1:], words]
print(json.dumps(shown), flush=True)
assert sys.stdin.buffer.read() == b"", "the end of the parent"
"""


@pytest.fixture
def way(how: str, request: pytest.FixtureRequest) -> None:
    """What the tests' fork server (`support.fork_server`) starts is what a user gets."""
    if how == "started as ever":
        request.getfixturevalue("started_as_ever")


@BOTH_WAYS
@pytest.mark.usefixtures("way")
def test_a_child_gets_its_arguments_and_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    modules, folder = tmp_path / "modules", tmp_path / "folder"
    modules.mkdir()
    folder.mkdir()
    (modules / "child_of_a_test.py").write_text(CHILD)
    (folder / "json.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLOUR", "red")
    child = start_module(
        "child_of_a_test",
        {"a": [1]},
        stdout=subprocess.PIPE,
        start_new_session=True,
        environment={"COLOUR": "blue"},
    )
    words = ["-m", "child_of_a_test"]
    with child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == [{"a": [1]}, "blue", str(folder), True, words, words]
        assert parent(child.pid) == os.getpid()
        assert is_forked(child.pid) == (how == "forked")
        assert child.poll() is None, "its stdin is open"
    assert child.returncode == 0


@BOTH_WAYS
@pytest.mark.usefixtures("way")
def test_a_child_that_dies_at_once_is_the_callers_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dead_child_of_a_test.py").write_text("import os; os.close(0); os._exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with start_module("dead_child_of_a_test", "x" * 1_000_000) as child:  # more than a pipe holds
        assert child.wait(30) == 3


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_processes_of_the_tests_engines_are_forked(expert_parallel: bool, checkpoint: Callable[[str], Path]) -> None:
    """Each process that imports its libraries itself would cost a second more."""

    async def main() -> None:
        (core, *_) = llm.engine_pids
        await until(lambda: len(children(core)) == 3)  # two ranks, and the grammar compiler
        assert [pid for pid in (core, *children(core)) if not is_forked(pid)] == []

    together = {"data_parallel_size": 2, "enable_expert_parallel": True} if expert_parallel else {}
    with engine(checkpoint("mixtral"), tensor_parallel_size=2, kv_cache_memory_bytes=1 << 22, **together) as (llm, _):
        run(llm, main)
