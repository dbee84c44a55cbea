"""InputProcessor: truncation and bad words, which need the tokenizer and the model's limits."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire_engine import SamplingParams
from quire_engine.errors import RequestError
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import EngineCoreReady
from transformers import AutoTokenizer

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
READY = EngineCoreReady(
    vocab_size=4096, max_model_len=64, num_blocks=100, block_size=16, eos_token_ids=[1], num_kv_cache_tokens=1600
)


@pytest.fixture(scope="module")
def inputs() -> InputProcessor:
    return InputProcessor(load_tokenizer(TINYPY), READY)


def prompt_of(inputs: InputProcessor, prompt: Any, **params: Any) -> list[int]:
    return inputs.process(prompt, SamplingParams(**params)).prompt_token_ids


# -- truncate_prompt_tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "params", "kept"),
    [
        (30, {}, 30),
        (30, {"truncate_prompt_tokens": 7}, 7),
        (30, {"truncate_prompt_tokens": 30}, 30),
        (30, {"truncate_prompt_tokens": 50}, 30),
        (1000, {"truncate_prompt_tokens": 1}, 1),
        (1000, {"truncate_prompt_tokens": 63}, 63),
        (1000, {"truncate_prompt_tokens": -1, "max_tokens": 10}, 54),
        (1000, {"truncate_prompt_tokens": -1, "max_tokens": None}, 63),
        (1000, {"truncate_prompt_tokens": -1, "max_tokens": 64}, 1),
        (20, {"truncate_prompt_tokens": -1, "max_tokens": 10}, 20),
    ],
)
def test_the_last_tokens_of_a_prompt_are_kept(
    length: int, params: dict[str, Any], kept: int, inputs: InputProcessor
) -> None:
    token_ids = list(range(5, 5 + length))
    assert prompt_of(inputs, token_ids, **params) == token_ids[-kept:]
    text = inputs.tokenizer.decode(token_ids)
    assert isinstance(text, str)
    tokenized = inputs.tokenizer.encode(text)
    if len(tokenized) < 64 or "truncate_prompt_tokens" in params:
        assert prompt_of(inputs, text, **params) == tokenized[-kept:]


def test_the_text_of_a_truncated_prompt_stays_whole(inputs: InputProcessor) -> None:
    request = inputs.process("a b c d e f g", SamplingParams(truncate_prompt_tokens=2))
    assert (request.prompt, len(request.prompt_token_ids)) == ("a b c d e f g", 2)


def test_a_text_that_is_far_too_long_is_truncated_without_tokenizing_it_all(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "some text " * 1_000_000 + "def the_end(): pass"
    expected = inputs.tokenizer.encode(" some text def the_end(): pass")[-6:]
    encode, lengths = inputs.tokenizer.encode, []

    def counting(text: str, **settings: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **settings)

    monkeypatch.setattr(inputs.tokenizer, "encode", counting)
    assert prompt_of(inputs, text, truncate_prompt_tokens=6) == expected
    assert max(lengths) < 10_000
    with pytest.raises(RequestError, match="cannot fit"):
        prompt_of(inputs, text)


@pytest.mark.parametrize("number", [64, 10**9])
def test_truncating_to_more_than_the_context_is_refused(number: int, inputs: InputProcessor) -> None:
    with pytest.raises(
        RequestError, match=f"^truncate_prompt_tokens is {number}; it must be less than max_model_len=64"
    ):
        prompt_of(inputs, [5], truncate_prompt_tokens=number)


# -- bad words ---------------------------------------------------------------------------------------------------------


def test_bad_words_are_tokenized_with_and_without_a_leading_space(inputs: InputProcessor) -> None:
    def encode(text: str) -> list[int]:
        token_ids: list[int] = inputs.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    words = ["return", "  return", "zqx", "self.name = name"]
    got = inputs.process("x", SamplingParams(bad_words=words)).params
    assert got.bad_words == words
    pairs = [(encode(word.lstrip()), encode(" " + word.lstrip())) for word in words]
    expected = []
    for plain, spaced in pairs:
        expected += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    assert got.bad_words_token_ids == expected
    assert len(expected) > len(words), "no word has a token of its own after a space, so this test shows little"
    again = inputs.process("x", got).params
    assert again.bad_words_token_ids == expected, "tokenized anew, not twice"


def test_a_bad_word_without_tokens_is_refused(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match=r"^bad_words holds '  '"):
        inputs.process("x", SamplingParams(bad_words=["ok", "  "]))


def test_a_bad_word_beyond_the_models_vocabulary_is_refused() -> None:
    small = InputProcessor(load_tokenizer(TINYPY), EngineCoreReady(vocab_size=100, max_model_len=64, num_blocks=9,
                                                                   block_size=16))  # fmt: skip
    with pytest.raises(RequestError, match=r"^bad_words holds \d+; ids must be in \[0, 100\)"):
        small.process([5], SamplingParams(bad_words=["return"]))


def test_without_bad_words_the_params_are_the_callers_own(inputs: InputProcessor) -> None:
    params = SamplingParams(temperature=0)
    assert inputs.process("x", params).params is params


# -- the tokenizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_tokenizer_is_the_one_that_transformers_finds(tokenizer_class: str | None, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(TINYPY / name, tmp_path)
    config = json.loads((TINYPY / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = tokenizer_class
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, expected = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(ours) is type(expected)
    assert ours.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert repr(ours.init_kwargs) == repr(expected.init_kwargs)
    assert ours.special_tokens_map == expected.special_tokens_map
    assert ours.chat_template == expected.chat_template is not None


def test_tokenizer_and_chat_template_do_without_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from quire_engine.frontend.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]))\n"
        "tokenizer.decode(tokenizer.encode('import os'))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'Hello'}], tokenize=False)\n"
        "print(sorted({'torch', 'xgrammar', 'transformers.modeling_utils'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, str(TINYPY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
