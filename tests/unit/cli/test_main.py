"""Command lines: exit codes, one-line errors, and help that comes fast."""

import subprocess
import sys
from pathlib import Path

import pytest
from quire_cli.doctor import Check
from quire_cli.errors import CommandError
from quire_cli.main import run
from support.sweeps import sweeping

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "--grpc-port", "70000"], "65535"),
        (["serve", "stray"], "unexpected argument 'stray'"),
        (["serve", "--model", "a", "--model-repository", "b"], "give one of them"),
        (["serve", "--name", "a"], "--name"),
        (["serve", "--", "--allow-http=false"], "--allow-http=false"),
        (["serve", "--grpc-port", "18765", "--http-port", "18765"], "are both 18765"),
        (["serve", "--", "--http-port=seven"], "'seven'"),
        (["nonsense"], "nonsense"),
        (["model", "add"], "PATH"),
        (["model", "add", str(CHECKPOINT), "max_modell_len=5"], "did you mean 'max_model_len'?"),
        (["generate"], "--model"),
        (["generate", "--model", str(CHECKPOINT), "--prompt", "x", "--top-p", "7"], "top_p is 7"),
        (["generate", "--model", str(CHECKPOINT), "--prompt", "x", "block_sizes=1"], "did you mean 'block_size'?"),
        (["generate", "--model", str(CHECKPOINT), "--prompt", ""], "--prompt"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with sweeping():  # some of `serve`'s come after its sweep
        assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("quire: ")
    assert len(err.splitlines()) == 1
    assert part in err


@pytest.mark.parametrize("arguments", [["model", "add", "/nowhere"], ["generate", "--model", "/nowhere"]])
def test_failure_is_one_line_and_exit_code_1(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert "/nowhere" in err


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["model", "add", "/nowhere", "--debug"]) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["serve", "--help"], ["model"], ["model", "add", "-h"], ["generate", "-h"]]
)
def test_help(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert capfd.readouterr().out.startswith("Usage: quire")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom quire_cli.main import run\nrun(['--help'])\n"
        "assert not {'torch', 'transformers', 'numpy', 'quire_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_traceback(closed: str) -> None:
    command = f"{sys.executable} -m quire_cli generate --model /nowhere --prompt x {closed}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == (0 if "2>" in closed else 1)


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--model", "x"], ["model", "add", "x"]])
def test_deleted_working_directory_is_named(tmp_path: Path, arguments: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir({str(gone)!r}); from quire_cli.main import run; sys.exit(run({arguments!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=gone, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "quire: the working directory no longer exists; change to one that does\n"


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_an_error_that_a_server_worded_controls_no_terminal(
    debug: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All commands that ask a server end so: bench, scale, drain, health, tune, and doctor's checks in the same way."""

    def fail(*_: object) -> None:
        raise CommandError("the server says \x1b[2J\x9b\rowned")

    monkeypatch.setattr("quire_cli.scale.scale", fail)
    assert run(["scale", "m", "2", *debug]) == 1
    said = capfd.readouterr().err
    assert r"quire: the server says \x1b[2J\x9b\rowned" in said
    assert all(line.isprintable() for line in said.split("\n"))


def test_doctor_shows_no_control_characters(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("quire_cli.doctor.examine", lambda: iter([Check("gpu", "OK", "GPU \x1b[2J")]))
    assert run(["doctor"]) == 0
    assert capfd.readouterr().out.endswith(r"GPU \x1b[2J" + "\n")
