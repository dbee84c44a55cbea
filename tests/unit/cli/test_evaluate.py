"""`quire eval`: which tokens are scored, the figures, and what is rejected."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire_cli import evaluate
from quire_cli.errors import CommandError
from quire_cli.evaluate import Scores, Text, compare, cut_windows, read_text
from quire_cli.main import run
from quire_engine import LLM, SamplingParams
from support.checkpoints import edit_json

CHECKPOINT = Path(__file__).resolve().parents[3] / "model_repository" / "tinypy" / "1" / "model"
TEXT = "".join(f"def function_{i}(argument):\n    return argument + {i}\n\n\n" for i in range(40))


def tokenizer(bos: int | None = None) -> Any:
    """One token a character."""
    return SimpleNamespace(
        bos_token_id=bos, encode=lambda text: [*([] if bos is None else [bos]), *(ord(one) for one in text)]
    )


def test_windows_are_whole_and_begin_with_bos_if_texts_do() -> None:
    text = Text("a text", "abcdefghijk")
    assert cut_windows(tokenizer(), text, 100, 4) == [[97, 98, 99, 100], [101, 102, 103, 104]]
    assert cut_windows(tokenizer(), text, 7, 4) == [[97, 98, 99, 100]]
    assert cut_windows(tokenizer(bos=1), text, 100, 4) == [[1, 97, 98, 99], [1, 101, 102, 103], [1, 105, 106, 107]]
    for content in ("", "abc"):
        with pytest.raises(CommandError, match=f"a text has {len(content)} tokens; give a text that fills"):
            cut_windows(tokenizer(), Text("a text", content), 100, 4)


def test_scores_are_those_of_the_second_half_of_each_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    command = ["eval", str(CHECKPOINT), "dtype=float32", "--text", str(tmp_path / "text"), "--tokens", "100"]
    assert run([*command, "--window", "32", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    llm = LLM(CHECKPOINT, dtype="float32")
    token_ids = llm._inputs.tokenizer.encode(TEXT)
    losses = []
    for first in range(0, 96, 32):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([token_ids[first : first + 32]], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token_id, entry in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[17:]:
            assert entry is not None
            losses.append(-entry[token_id].logprob)
    llm.shutdown()
    assert figures["num_scored_tokens"] == len(losses) == 3 * 15
    assert figures["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert figures["settings"] == {"dtype": "float32"}
    assert figures["text_sha256"] == Text("", TEXT[: 100 * 32]).digest


def test_a_reference_is_compared_by_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    command = ["eval", str(CHECKPOINT), "quantization=int8", "--text", str(tmp_path / "text"), "--tokens", "256"]
    command += ["--window", "64", "--reference", str(CHECKPOINT), "--reference-setting", "dtype=float32"]
    assert run([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0.5 < figures["top1_agreement"] <= 1
    assert 0 < figures["mean_abs_logprob_difference"] < 0.5
    assert figures["reference"]["settings"] == {"dtype": "float32"}
    assert figures["reference"]["perplexity"] != figures["perplexity"]
    assert run(command) == 0
    assert f"{figures['perplexity']:.4f}" in capsys.readouterr().out


def test_figures() -> None:
    own, reference = Scores([5, 6], [-1.0, -3.0], [5, 7]), Scores([5, 6], [-1.5, -3.0], [5, 6])
    assert own.perplexity == pytest.approx(math.e**2)
    assert compare(own, reference) == {"top1_agreement": 0.5, "mean_abs_logprob_difference": 0.25}
    assert math.isfinite(Scores([5], [-1e9], [6]).perplexity)
    with pytest.raises(CommandError, match="another tokenizer"):
        compare(own, Scores([5, 8], [-1.0, -3.0], [5, 7]))


def test_the_text_is_read_only_as_far_as_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("aé" * 5000)
    assert read_text(tmp_path / "long", 10).content == ("aé" * 5000)[:320]
    assert read_text(None, 4).digest == read_text(None, 4).digest
    assert len(read_text(None, 4096).content) == 4096 * evaluate._CHARACTERS_PER_TOKEN


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--text", "/nowhere"], 2, "--text: /nowhere cannot be read: No such file"),
        (["--text", "{binary}"], 2, "is not valid UTF-8"),
        (["--text", "{short}"], 1, "has 2 tokens; give a text that fills a window of 512"),
        (["--reference-setting", "dtype=float32"], 2, "without --reference"),
        (["--reference", "/nowhere"], 1, "/nowhere"),
        (["quantization=int3"], 2, "quantization is 'int3'; it must be unset or one of int8, int4, fp8"),
        (["--window", "9000"], 1, "max_model_len is 9001"),
        (["--window", "2"], 2, "--window"),
        (["--tokens", "100"], 1, "has 100 tokens"),
    ],
)
def test_what_is_rejected(
    arguments: list[str], code: int, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "short").write_text("a b")
    names = {"{binary}": str(tmp_path / "binary"), "{short}": str(tmp_path / "short")}
    assert run(["eval", str(CHECKPOINT), *(names.get(one, one) for one in arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err


def test_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    """A checkpoint that cannot be read is an error before the first one is evaluated."""
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", architectures=["NoSuchModel"])
    assert run(["eval", str(CHECKPOINT), "--reference", str(tmp_path)]) == 1
