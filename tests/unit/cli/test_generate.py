"""`quire generate`, with an engine that only repeats what it was asked."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire_engine
from quire_cli.main import run
from quire_engine.errors import EngineDeadError, RequestError

CHECKPOINT = str(Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model")


class Repeater:
    """Takes the place of LLM."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def stream(self, prompt: str, params: Any) -> Iterator[Any]:
        for text in (prompt, f" {params.max_tokens}", f" {params.temperature}", f" {self.settings.get('seed')}"):
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _repeater(monkeypatch: pytest.MonkeyPatch) -> None:
    # In its dict: asking the module for LLM, as setattr does, would import torch.
    monkeypatch.setitem(vars(quire_engine), "LLM", Repeater)


def test_streams_text_with_parameters_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello", "--temperature", "0", "seed=7"]) == 0
    assert capsys.readouterr().out == "hello 128 0.0 7\n"


def test_prompt_comes_from_stdin_without_its_last_line_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    assert run(["generate", "--model", CHECKPOINT, "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "two\nlines 3 1.0 None\n"


@pytest.mark.parametrize(
    "error", [ValueError("the KV cache is too small; raise it"), EngineDeadError("the KV cache is too small; raise it")]
)
def test_model_that_cannot_be_loaded_has_failed_and_is_no_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(**settings: Any) -> None:
        raise error

    monkeypatch.setitem(vars(quire_engine), "LLM", fail)
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello"]) == 1
    assert capsys.readouterr().err == "quire: the KV cache is too small; raise it\n"


def test_bad_checkpoint_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", str(tmp_path), "--prompt", "hello"]) == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--temperature", "-1"], ["max_num_seq=3"], ["block_size=x"]])
def test_bad_parameters_and_settings_are_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello", *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_request_that_the_model_refuses_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Iterator[Any]:
        raise RequestError("prompt", "prompt has 5000 tokens")

    monkeypatch.setattr(Repeater, "stream", refuse)
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello"]) == 2
    assert capsys.readouterr().err == "quire: prompt has 5000 tokens\n"


def test_prompt_that_is_not_utf8_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "ab\udcff"]) == 2
    assert capsys.readouterr().err == "quire: the prompt of --prompt is not valid UTF-8 at byte 2; convert it\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="ascii"))
    assert run(["generate", "--model", CHECKPOINT]) == 2
    assert capsys.readouterr().err == "quire: the prompt of stdin is not valid UTF-8 at byte 1; convert it\n"
