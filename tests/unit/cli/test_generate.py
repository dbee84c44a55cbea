"""`quire generate`, with an engine that only repeats what it was asked."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire_engine
from quire_cli.main import run

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
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run(["generate", "--model", CHECKPOINT, "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "two\nlines 3 1.0 None\n"
