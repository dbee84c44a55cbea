"""`quire generate`, with an engine that only repeats what it was asked."""

import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quire_engine
from quire_cli import generate as generate_module
from quire_cli.main import run
from quire_engine.errors import EngineDeadError, RequestError
from quire_engine.models import progress
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput

CHECKPOINT = str(Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model")


class Repeater:
    """Takes the place of LLM."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def stream(self, prompt: str, params: Any) -> Iterator[Any]:
        for text in (prompt, f" {params.max_tokens}", f" {params.temperature}", f" {self.settings.get('seed')}"):
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])

    def generate_each(self, entries: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """The last first; a prompt that begins with "bad" is refused, one that begins with "die" is the end."""
        for number, (prompt, params) in reversed(list(enumerate(entries))):
            text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            if text.startswith("die"):
                raise EngineDeadError("the engine died")
            if text.startswith("bad"):
                yield number, RequestError("prompt", "prompt is bad")
                continue
            logprobs: Any = [{7: Logprob(float("-inf"), 1, "é")}] if params.logprobs else None
            sequence = CompletionOutput(0, f"{text} {params.max_tokens} é", [7], None, logprobs, "stop")
            yield number, RequestOutput("x", text, [1, 2], [sequence], finished=True)

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _repeater(monkeypatch: pytest.MonkeyPatch) -> None:
    # In its dict: asking the module for LLM, as setattr does, would import torch.
    monkeypatch.setitem(vars(quire_engine), "LLM", Repeater)


def test_streams_text_with_parameters_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello", "--temperature", "0", "seed=7"]) == 0
    assert capsys.readouterr().out == "hello 128 0.0 7\n"


def test_the_checkpoints_defaults_hold_for_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 9}')
    command = ["generate", "--model", CHECKPOINT, "--prompt", "hello", f"generation_config={tmp_path}"]
    assert run(command) == 0
    assert capsys.readouterr().out == "hello 9 0.25 None\n"
    assert run([*command, "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "hello 5 0.0 None\n"
    file = tmp_path / "prompts"
    file.write_text('"a"\n{"prompt": "b", "max_tokens": 4}\n{"prompt": "c", "temperature": -1}\n')
    assert run(["generate", "--model", CHECKPOINT, "--input", str(file), f"generation_config={tmp_path}"]) == 1
    texts = [json.loads(line).get("outputs", [{}])[0].get("text") for line in capsys.readouterr().out.splitlines()]
    assert texts == ["a 9 é", "b 4 é", None]
    assert run([*command, 'override_generation_config={"top_p": 2}']) == 1
    assert "override_generation_config: top_p is 2" in capsys.readouterr().err


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


def test_what_a_model_writes_controls_no_terminal_and_reaches_a_pipe_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, said in ((True, "two\nlines \\x1b[2J"), (False, "two\nlines \x1b[2J")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        generate_module._write("two\nlines \x1b[2J")
        assert capsys.readouterr().out == said


# -- JSON, and many prompts --------------------------------------------------------------------------------------------


def results(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What is on stdout: nothing but JSON lines, in ASCII."""
    out = capsys.readouterr().out
    assert out.isascii()
    return [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]


def test_json_is_one_object_with_the_names_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello", "--max-tokens", "3", "--json"]) == 0
    (result,) = results(capsys)
    assert result == {
        "prompt": "hello", "prompt_token_ids": [1, 2], "prompt_logprobs": None, "num_cached_tokens": 0,
        "outputs": [{"index": 0, "text": "hello 3 é", "token_ids": [7], "cumulative_logprob": None, "logprobs": None,
                     "finish_reason": "stop", "stop_reason": None}],
    }  # fmt: skip


def test_json_of_a_request_that_is_refused_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "bad", "--json"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "quire: prompt is bad\n")


GOOD = [
    '{"prompt": "a", "custom_id": "first", "max_tokens": 3}', '"b"', "", '{"prompt_token_ids": [5]}',
    '{"messages": [{"role": "user", "content": "c"}], "logprobs": 1}',
]  # fmt: skip


def test_a_file_of_prompts_becomes_as_many_results_in_its_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(GOOD))
    assert run(["generate", "--model", CHECKPOINT, "--input", str(file), "--max-tokens", "9"]) == 0
    first, second, third, fourth = results(capsys)
    assert (first["line"], first["custom_id"], first["outputs"][0]["text"]) == (1, "first", "a 3 é")
    assert (second["line"], "custom_id" in second, second["outputs"][0]["text"]) == (2, False, "b 9 é")
    assert (third["line"], third["prompt"]) == (4, '{"prompt_token_ids": [5]}')
    assert fourth["prompt"].startswith('{"messages"')
    assert fourth["outputs"][0]["logprobs"] == [{"7": {"logprob": None, "rank": 1, "decoded_token": "é"}}]


@pytest.mark.parametrize(
    ("line", "message", "parameter"),
    [
        (b'{"prompt": "x", "temprature": 1}', "did you mean 'temperature'", "temprature"),
        (b'{"prompt": "x", "temperature": -1, "custom_id": 5}', "temperature", "temperature"),
        (b"{", "the line is no JSON that can be used: ", None),
        (b"\xff", "the line is no JSON that can be used: ", None),
        (b"[" * 100_000, "nested too deeply", None),
        (b"7", "it must be an object, or a string", None),
        (b'{"max_tokens": 1}', "the line has no prompt; give one of prompt, prompt_token_ids, messages", None),
        (b'{"prompt": "x", "messages": []}', "the line has prompt and messages; give one of", None),
        (b'{"prompt": ["x"]}', "prompt must be a string", "prompt"),
        (b'{"messages": "x"}', "messages must be a list", "messages"),
        (b'"bad"', "prompt is bad", "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_fails_fails_alone(
    line: bytes, message: str, parameter: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"a"\n' + line + b'\n"b"\n')
    assert run(["generate", "--model", CHECKPOINT, "--input", str(file)]) == 1
    captured = capsys.readouterr()
    first, failed, last = map(json.loads, captured.out.splitlines())
    assert [first["prompt"], last["prompt"]] == ["a", "b"]
    assert failed["line"] == 2
    assert message in failed["error"]["message"]
    assert failed["error"]["param"] == parameter
    assert ("custom_id" in failed) == (b"custom_id" in line)
    assert captured.err.splitlines()[-1] == ("quire: 1 of 3 prompts failed; each says why in its line of the output")


def test_what_is_done_is_written_when_the_engine_dies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'"die"\n"a"\n"b"\n')))
    assert run(["generate", "--model", CHECKPOINT, "--input", "-"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["line"] for line in captured.out.splitlines()] == [2, 3]
    assert captured.err.splitlines()[-1] == "quire: the engine died"


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "cannot be read: No such file or directory"),
        ("\n \n", [], "holds no prompt; write one per line"),
        ('"a"', ["--prompt", "x"], "--prompt and --input are both given"),
        ('"a"', ["--temperature", "-1"], "temperature"),
    ],
)
def test_a_file_that_cannot_be_used_is_wrong_usage(
    content: str | None, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    assert run(["generate", "--model", CHECKPOINT, "--input", str(file), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_share_that_is_loaded_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(Repeater):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
            loading = progress.LoadProgress(200)
            loading.add(90)

    monkeypatch.setattr("quire_cli.console._PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setitem(vars(quire_engine), "LLM", Slow)
    assert run(["generate", "--model", CHECKPOINT, "--prompt", "hello"]) == 0
    assert capsys.readouterr().err == f"quire: loading {CHECKPOINT} (45%, 0 s)\n"
