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
from quire_engine.frontend.tokenizer import PlainTokenizer, TokenDecoder, load_tokenizer
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


@pytest.mark.parametrize(("modality", "called"), [("image", "images"), ("video", "a video")])
def test_a_model_of_text_alone_says_what_it_was_sent(modality: str, called: str, inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match=f"holds {called}; this model takes text alone"):
        prompt_of(inputs, {"prompt": "def", "multi_modal_data": {modality: b"?"}})


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
    got = inputs.process("x", SamplingParams(bad_words=words)).sampling_params
    assert got.bad_words == words
    pairs = [(encode(word.lstrip()), encode(" " + word.lstrip())) for word in words]
    expected = []
    for plain, spaced in pairs:
        expected += [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
    assert got.bad_words_token_ids == expected
    assert len(expected) > len(words), "no word has a token of its own after a space, so this test shows little"
    again = inputs.process("x", got).sampling_params
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
    assert inputs.process("x", params).sampling_params is params


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


def tokenizer_folder(folder: Path, **config: Any) -> Path:
    """The demo model's tokenizer, with other fields in `tokenizer_config.json`; None takes one out."""
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(TINYPY / name, folder / name)
    fields = {**json.loads((TINYPY / "tokenizer_config.json").read_text()), **config}
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


ADDED = {
    "content": "</s>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}


@pytest.mark.parametrize(
    "config",
    [
        {}, {"tokenizer_class": "TokenizersBackend"}, {"add_prefix_space": True}, {"pad_token": None},
        {"bos_token": None, "eos_token": None, "pad_token": None},
        {"added_tokens_decoder": {"1": ADDED}}, {"clean_up_tokenization_spaces": True}, {"unk_token": "<s>"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("with_template", [True, False])
def test_a_plain_tokenizer_is_what_transformers_makes_of_it(
    config: dict[str, Any], with_template: bool, tmp_path: Path
) -> None:
    tokenizer_folder(tmp_path, **config)
    if not with_template:
        (tmp_path / "chat_template.jinja").unlink()
    ours, theirs = load_tokenizer(tmp_path, plain=True), load_tokenizer(tmp_path)
    assert isinstance(ours, PlainTokenizer)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert list(ours.special_tokens_map) == list(theirs.special_tokens_map), "a template may iterate over them"
    assert (ours.eos_token_id, ours.all_special_ids) == (theirs.eos_token_id, theirs.all_special_ids)
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    ids = list(range(len(theirs) + 1))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(9) == theirs.convert_ids_to_tokens(9)
    for text in ("", "import os\n", "<s>def f(x):\n\treturn x</s>  ", "naïve ☃ 🦉 日本語\x00", " a" * 2000):
        for special in (True, False):
            token_ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == token_ids
            decoded = [TokenDecoder(one).decode(token_ids, special) for one in (ours, theirs)]
            assert decoded[0] == decoded[1]


@pytest.mark.parametrize(
    ("config", "file", "content"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "", ""),
        ({"add_bos_token": True}, "", ""),
        ({"extra_special_tokens": ["<x>"]}, "", ""),
        ({"unk_token": "<unk>"}, "", ""),
        ({"unk_token": "import"}, "", ""),
        ({"eos_token": {"__type": "AddedToken", **ADDED}}, "", ""),
        ({"added_tokens_decoder": {"1": {**ADDED, "lstrip": True}}}, "", ""),
        ({"added_tokens_decoder": {"5000": {**ADDED, "content": "<new>"}}}, "", ""),
        ({"fix_mistral_regex": True}, "", ""),
        ({}, "special_tokens_map.json", '{"unk_token": "<unk>"}'),
        ({}, "added_tokens.json", '{"<new>": 5000}'),
        ({}, "additional_chat_templates/rag.jinja", "{{ messages }}"),
        ({}, "tokenizer.json", {"post_processor": None}),
    ],
    ids=str,
)
def test_another_tokenizer_is_left_to_transformers(
    config: dict[str, Any], file: str, content: Any, tmp_path: Path
) -> None:
    tokenizer_folder(tmp_path, **config)
    if isinstance(content, dict):
        content = json.dumps({**json.loads((tmp_path / file).read_text()), **content})
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    ours, theirs = load_tokenizer(tmp_path, plain=True), load_tokenizer(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()  # type: ignore[union-attr]


def test_an_engine_is_made_without_transformers() -> None:
    script = (
        "import sys; from quire_engine import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20, max_num_seqs=2)\n"
        "llm.generate('import os', SamplingParams(max_tokens=4), use_tqdm=False)\n"
        "print(sorted({'transformers', 'huggingface_hub', 'sympy', 'xgrammar', 'torch._dynamo'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, str(TINYPY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


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
