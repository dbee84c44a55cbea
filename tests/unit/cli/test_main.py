"""Command lines: exit codes, one-line errors, and help that comes fast."""

import json
import os
import re
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
    "arguments",
    [[], ["--help"], ["serve", "--help"], ["model"], ["model", "add", "-h"], ["keys"], ["bench"], ["generate", "-h"]],
)
def test_help(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert capfd.readouterr().out.startswith("Usage: quire")


def test_help_of_serve_is_one_screen_with_its_options_in_groups(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["serve", "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) <= 40
    groups = [line for line in lines if re.fullmatch(r"\w.*:", line)]
    assert groups == ["Models:", "Addresses:", "OpenAI gateway:", "Options:"]
    options = {line.split()[0].rstrip(",") for line in lines if line.startswith("  -")}
    assert {"--model", "--host", "--health-port", "--api-key-file", "--drain-timeout", "--debug"} <= options


@pytest.mark.parametrize("entered", ["quire mod", "quire model sc", "quire keys ho", "quire serve --health-p"])
def test_the_shell_completes_nouns_verbs_and_options(entered: str) -> None:
    variables = {"_QUIRE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": entered}
    result = subprocess.run(
        [sys.executable, "-m", "quire_cli"],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    completed = {"mod": "model", "sc": "scale", "ho": "host", "--health-p": "--health-port"}[entered.split()[-1]]
    assert completed in result.stdout
    assert result.stderr == ""


def test_models_of_a_repository_are_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, version, content in (
        ("ours", "2", f'{{"model": "{CHECKPOINT}"}}'),
        ("ours", "10", '{"model": "org/name"}'),
        ("broken", "1", "[]"),
        ("deep", "1", "[" * 100_000),
        ("wrong", "1", '{"model": 7}'),
    ):
        (tmp_path / name / version).mkdir(parents=True)
        (tmp_path / name / version / "model.json").write_text(content)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.pbtxt").touch()
    (tmp_path / "no model").mkdir()
    assert run(["model", "list", "--model-repository", str(tmp_path), "--json"]) == 0
    assert [tuple(model.values()) for model in json.loads(capfd.readouterr().out)] == [
        ("broken", "1", None),
        ("deep", "1", None),
        ("other", None, None),
        ("ours", "10", "org/name"),
        ("wrong", "1", None),
    ]
    assert run(["model", "list", "--model-repository", str(tmp_path)]) == 0
    assert capfd.readouterr().out.splitlines()[3].split() == ["ours", "10", "org/name"]
    (tmp_path / "empty").mkdir()
    for folder, word in (("empty", "holds no model"), ("none", "there is no folder")):
        assert run(["model", "list", "--model-repository", str(tmp_path / folder)]) == 1
        assert word in capfd.readouterr().err


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


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("arguments", ["model list", "top --once --metrics 127.0.0.1:1"])
def test_what_stdout_cannot_take_is_one_line(arguments: str) -> None:
    command = f"{sys.executable} -m quire_cli {arguments} > /dev/full"
    result = subprocess.run(command, shell=True, env=BUFFERED, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "quire: stdout cannot be written: No space left on device\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quire_cli", "model", "list"]
    result = subprocess.run(command, env=BUFFERED, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, b"")


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "modèle" / "1").mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-m", "quire_cli", "model", "list", "--model-repository", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.startswith("mod\\xe8le ")


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

    monkeypatch.setattr("quire_cli.models._ask", fail)
    assert run(["model", "scale", "m", "2", *debug]) == 1
    said = capfd.readouterr().err
    assert r"quire: the server says \x1b[2J\x9b\rowned" in said
    assert all(line.isprintable() for line in said.split("\n"))


def test_doctor_shows_no_control_characters(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("quire_cli.doctor.examine", lambda: iter([Check("gpu", "OK", "GPU \x1b[2J")]))
    assert run(["doctor"]) == 0
    assert capfd.readouterr().out.endswith(r"GPU \x1b[2J" + "\n")
