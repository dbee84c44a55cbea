"""A tokenizer is not trusted: no code of the checkpoint's runs, and nothing in tokenizer.json takes long."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine import SamplingParams
from quire_engine.errors import CheckpointError, RequestError
from quire_engine.frontend import tokenizer, tokenizer_limits
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.input_processor import InputProcessor
from quire_engine.frontend.output_processor import OutputProcessor
from quire_engine.frontend.tokenizer import TokenDecoder, load_tokenizer
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, FinishReason
from quire_engine.outputs import RequestOutput

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
READY = EngineCoreReady(vocab_size=4096, max_model_len=64, num_blocks=100, block_size=16, num_kv_cache_tokens=1600)


# -- code of the checkpoint's own --------------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A checkpoint whose files name a module of its own, which would leave a file."""
    folder = tmp_path / "evil"
    shutil.copytree(TINYPY, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('it ran')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": "evil.T"}}
    (folder / "config.json").write_text(json.dumps(config))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


LOAD = (
    "import sys, pathlib; from quire_engine.frontend.tokenizer import load_tokenizer\n"
    "load_tokenizer(pathlib.Path(sys.argv[1]))"
)
LLM = "import sys; from quire_engine import LLM; LLM(sys.argv[1], max_model_len=32)"


@pytest.mark.parametrize(
    "command",
    [
        ["-c", LOAD, "{}"],
        ["-c", LLM, "{}"],
        ["-m", "quire_cli", "generate", "--model", "{}", "--prompt", "x", "--max-tokens", "1", "max_model_len=32"],
        ["-m", "quire_cli", "model", "add", "{}", "--model-repository", "{}/repository"],
    ],
    ids=["tokenizer", "LLM", "generate", "add"],
)
def test_a_checkpoints_own_code_never_runs(command: list[str], evil: Path) -> None:
    result = subprocess.run(
        [sys.executable, *(part.replace("{}", str(evil)) for part in command)],
        input="y\n" * 20, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "HF_HOME": str(evil.parent / "cache")},
    )  # fmt: skip
    assert not (evil.parent / "ran").exists()
    assert "[y/N]" not in result.stdout + result.stderr
    if result.returncode:
        assert "never run" in result.stderr or "model_type" in result.stderr, result.stderr


# -- a tokenizer.json that takes long ----------------------------------------------------------------------------------

SLOW = "[^a]|" + 15 * "(?:a|a)" + "b"
"""A row of a's takes some milliseconds at each place: too few for the limit that the library itself has."""
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def doubling(text: str, number: int = 40) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": text}, "content": 2 * text} for _ in range(number)]


def split(regex: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, BYTE_LEVEL]}


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """tinypy's tokenizer with another tokenizer.json."""
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINYPY / name, folder)
    parsed = json.loads((TINYPY / "tokenizer.json").read_text())
    change(parsed)
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": doubling("zq")}}, "its normalizer can make a text 1.1e"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": doubling("zq")}]}},
         "its normalizer can make a text 1.1e"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 99}}, "100 times longer"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "1e.03 times longer"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}}, "its normalizer has 65 steps"),
        ({"decoder": {"type": "Sequence", "decoders": [*doubling("zq"), {"type": "Fuse"}]}}, "its decoder can make"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}}, "its decoder has the reg"),
        ({"pre_tokenizer": split(r"(")}, "tokenizer.json: "),
        ({"model": None}, "tokenizer.json: "),
    ],
    ids=["doubling", "nested", "between", "prepend", "steps", "decoder", "regex decoder", "syntax", "no model"],
)  # fmt: skip
def test_a_tokenizer_that_no_limit_makes_harmless_is_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tokenizer(changed(tmp_path, lambda parsed: parsed.update(change)))
    assert "\n" not in str(raised.value)


def test_a_token_longer_than_any_real_one_is_rejected(tmp_path: Path) -> None:
    token = {"id": 4096, "content": "x" * 5000, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}  # fmt: skip
    with pytest.raises(CheckpointError, match="it has a token of 5000 characters; at most 4096 are taken"):
        load_tokenizer(changed(tmp_path, lambda parsed: parsed["added_tokens"].append(token)))


def test_loading_has_limits_of_time_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "TRY_SECONDS", 1.0)
    slow = changed(tmp_path, lambda parsed: parsed.update(pre_tokenizer=split(SLOW)))
    with pytest.raises(CheckpointError, match="takes more than 1 s of processor time or 2 GiB, or crashes"):
        load_tokenizer(slow)


def test_a_text_that_takes_long_is_rejected_and_the_next_one_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "ENCODE_SECONDS", 0.5)
    folder = changed(tmp_path, lambda parsed: parsed.update(pre_tokenizer=split(SLOW)))
    monkeypatch.setattr(tokenizer, "try_tokenizer", lambda folder: None)  # which would have found it
    loaded = load_tokenizer(folder)
    inputs = InputProcessor(loaded, EngineCoreReady(vocab_size=4096, max_model_len=4096, num_kv_cache_tokens=99999))
    expected = loaded.encode("for x in y:")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^prompt: tokenizing it takes more than 0 s of"):
            inputs.process("a" * 4000, SamplingParams())
        assert inputs.process("for x in y:", SamplingParams()).prompt_token_ids == expected
    inputs.shutdown()


def test_known_tokenizers_need_no_process() -> None:
    assert tokenizer_limits.LimitedEncoder(load_tokenizer(TINYPY))._process is None


# -- a tokenizer that fails --------------------------------------------------------------------------------------------

SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+|\S+"
"""Like the end of Llama 3's: many spaces before a letter overrun the limit of the regular expressions' library."""


@pytest.fixture(scope="module")
def panicking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = changed(tmp_path_factory.mktemp("panic"), lambda parsed: parsed.update(pre_tokenizer=split(SPACES)))
    return load_tokenizer(folder)


@pytest.mark.parametrize("is_known", [True, False], ids=["in this process", "in another one"])
def test_a_panic_of_the_tokenizer_fails_the_request_alone(
    is_known: bool, panicking: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if is_known:
        monkeypatch.setattr(tokenizer_limits, "LINEAR_REGEXES", frozenset({SPACES}))
    monkeypatch.setattr(tokenizer_limits, "ENCODE_SECONDS", 60.0)
    inputs = InputProcessor(panicking, EngineCoreReady(vocab_size=4096, max_model_len=2**20, num_kv_cache_tokens=2**20))
    text = " " * 10_500_000 + "x"
    with pytest.raises(RequestError, match=r"^prompt: the tokenizer fails on this text: Onig: ") as raised:
        inputs.process(text, SamplingParams())
    assert "\n" not in str(raised.value)
    assert ".rs" not in str(raised.value)
    assert inputs.process("x", SamplingParams()).prompt_token_ids == panicking.encode("x")
    inputs.shutdown()


class _Panic(BaseException):
    """What a library in Rust raises."""

    __module__ = "pyo3_runtime"


class _Failing:
    """A decoder that panics at one token."""

    byte_ids = special_ids = frozenset[int]()

    def __init__(self, tokenizer: Any, token_id: int) -> None:
        self._tokenizer, self._token_id = tokenizer, token_id

    def decode(self, token_ids: list[int], **settings: Any) -> Any:
        if self._token_id in token_ids:
            raise _Panic("at\nsrc/main.rs")
        return self._tokenizer.decode(token_ids, **settings)


def test_a_panic_while_decoding_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TINYPY)
    inputs, outputs = InputProcessor(tokenizer, READY), OutputProcessor(tokenizer)
    decoder = outputs._decoder
    monkeypatch.setattr(decoder, "_tokenizer", _Failing(decoder._tokenizer, 99))
    got: dict[str, list[RequestOutput]] = {"good": [], "bad": []}
    for name, deltas in got.items():
        outputs.add_request(inputs.process([5, 6], SamplingParams(), name), deltas.append)
    message = EngineCoreOutputs([EngineCoreOutput("bad", [99]), EngineCoreOutput("good", [7])])
    _, to_abort = outputs.process(message)
    assert to_abort == ["bad"]
    assert got["bad"][-1].finished
    assert got["bad"][-1].error == "its output could not be processed"
    assert outputs.request_ids == ["good"]
    outputs.finish("good", FinishReason.ABORT)
    assert got["good"][-1].finished
    assert not outputs.has_requests()


@pytest.mark.parametrize("place", ["built", "delivered", "told of the end"])
def test_a_panic_over_an_output_ends_that_request_only(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any call of foreign code while an output is built or delivered; the others of the same message go on."""
    tokenizer = load_tokenizer(TINYPY)
    inputs, outputs = InputProcessor(tokenizer, READY), OutputProcessor(tokenizer)
    bad: list[RequestOutput] = []
    good: list[RequestOutput] = []

    def panic(*_: Any) -> Any:
        raise _Panic("at\nsrc/main.rs")

    def deliver(output: RequestOutput) -> None:
        if place == "told of the end" or (place == "delivered" and not output.finished):
            panic()
        bad.append(output)

    monkeypatch.setattr(outputs._logprobs, "_token_bytes", panic)
    outputs.add_request(
        inputs.process([5, 6], SamplingParams(logprobs=0 if place == "built" else None), "bad"), deliver
    )
    outputs.add_request(inputs.process([5, 6], SamplingParams(), "good"), good.append)
    logprobs = [[(99, -1.0, 1)]] if place == "built" else None
    message = EngineCoreOutputs([EngineCoreOutput("bad", [99], logprobs=logprobs), EngineCoreOutput("good", [7])])
    assert outputs.process(message)[1] == ["bad"]
    assert (outputs.request_ids, good[-1].error) == (["good"], None)
    assert [output.error for output in bad] == ([] if place == "told of the end" else [
        "its output could not be processed"
    ])  # fmt: skip


def test_an_interrupt_over_an_output_is_no_failure() -> None:
    tokenizer = load_tokenizer(TINYPY)
    inputs, outputs = InputProcessor(tokenizer, READY), OutputProcessor(tokenizer)

    def interrupt(_: RequestOutput) -> None:
        raise KeyboardInterrupt

    outputs.add_request(inputs.process([5, 6], SamplingParams(), "x"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        outputs.process(EngineCoreOutputs([EngineCoreOutput("x", [7])]))


@pytest.mark.parametrize("n", [1, 3])
def test_a_panic_on_the_prompts_tokens_rejects_the_request(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TINYPY)
    inputs, outputs = InputProcessor(tokenizer, READY), OutputProcessor(tokenizer)
    monkeypatch.setattr(outputs._decoder, "_tokenizer", _Failing(tokenizer, 99))
    with pytest.raises(RequestError, match=r"^the tokenizer fails on these tokens: at src/main.rs$"):
        outputs.add_request(inputs.process([99], SamplingParams(n=n, temperature=1.0), "x"), lambda output: None)
    assert not outputs.has_requests()
    outputs.add_request(inputs.process([5], SamplingParams(), "x"), lambda output: None)


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(TINYPY)
    decoder, encoder = TokenDecoder(tokenizer), tokenizer_limits.LimitedEncoder(tokenizer)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "encode", interrupt)
    monkeypatch.setattr(decoder, "_tokenizer", type("", (), {"decode": interrupt}))
    with pytest.raises(KeyboardInterrupt):
        encoder.encode("x", "prompt", add_special_tokens=False)
    with pytest.raises(KeyboardInterrupt):
        decoder.decode([5], skip_special_tokens=True)


# -- what cannot fit ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> InputProcessor:
    return InputProcessor(load_tokenizer(TINYPY), READY)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "user", "content": "x"}] * 300_000,
            "messages has 300000 messages, which cannot fit; with",
        ),
        ([{"role": "user", "content": "x" * 10_000_000}], "messages has more than .* characters, which cannot fit"),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 10}] * 1_000_000}], "messages has more than"),
        ([{"role": "user", "content": [[]] * 1_000_000}], "messages has more than"),
    ],
    ids=["messages", "characters", "parts", "values"],
)
def test_a_conversation_that_cannot_fit_is_not_rendered(
    messages: list[Any], message: str, inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs._conversations, "_render", lambda *_: pytest.fail("it was rendered"))
    with pytest.raises(RequestError, match=message):
        inputs.apply_chat_template(Conversation(messages))


def test_a_rendered_conversation_that_cannot_fit_is_not_tokenized(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs._conversations, "_render", lambda *_, **__: "x" * 10_000_000)
    monkeypatch.setattr(inputs.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(RequestError, match=r"^messages has 10000000 characters, which cannot fit"):
        inputs.apply_chat_template(Conversation([{"role": "user", "content": "x"}]))


def test_of_a_long_text_the_beginning_says_that_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputProcessor(load_tokenizer(TINYPY), msgspec.structs.replace(READY, max_model_len=1000))
    encode, lengths = inputs.tokenizer.encode, []

    def counting(text: str, **settings: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **settings)

    monkeypatch.setattr(inputs.tokenizer, "encode", counting)
    monkeypatch.setattr(inputs, "_max_characters", 10**9)
    with pytest.raises(RequestError, match=r"^prompt has more than 1000 tokens; with max_model_len=1000 it must have"):
        inputs.process("x = 1\n" * 20_000, SamplingParams())
    assert max(lengths) < 40_000


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}, True),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}}, False),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, False),
    ],
)
def test_a_text_may_be_longer_where_characters_are_dropped(
    change: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    """So spaces that become one do not count as a text that is too long."""
    tokenizer = load_tokenizer(changed(tmp_path, lambda parsed: parsed.update(change)))
    longest = max(map(len, tokenizer.get_vocab()))
    assert tokenizer_limits.characters_per_token(tokenizer) == (longest if is_kept else 16 * longest)
