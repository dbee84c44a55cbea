"""Limits on a tokenizer, which comes with the checkpoint and is not trusted.

`tokenizer.json` is a program: its normalizer and decoder can double a text at every step, and its regular expressions
can take hours for a line. The limits, in this order:

1. It is loaded and tested in a process with limits of the kernel, `python -m quire_engine.frontend.tokenizer_limits`.
2. Steps that make a text grow without bound, and tokens longer than any real one, are rejected.
3. If it has regular expressions that are not known to take linear time, all texts are tokenized in such a process,
   which costs a request about 0.1 ms. Decoders with such expressions are rejected: a decoder runs for every token.
"""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.errors import CheckpointError, RequestError, cut, is_failure, one_line
from quire_engine.system.limited_process import LimitedProcess, serve

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_FILE_BYTES = 128 << 20
"""The largest real tokenizer.json has a quarter of that."""
MAX_TOKEN_CHARACTERS = 4096
MAX_STEPS = 64
"""Steps of a normalizer, a pre-tokenizer, a decoder or a post-processor."""
MAX_GROWTH = 64
"""The factor by which a normalizer or decoder may lengthen a text, besides Unicode's own steps."""
TRY_SECONDS = 30.0
"""CPU time to load and test a tokenizer; the largest real ones take some seconds."""
ENCODE_SECONDS = 5.0
"""CPU time for one text, as for a chat template."""
MEMORY_BYTES = 2 << 30
"""On top of the idle process."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN_3_5 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
GPT_4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}")
TEKKEN = _CASED % ("", "", "")
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)  # fmt: skip
LINEAR_REGEXES = frozenset({
    LLAMA_3,  # and GPT-4
    QWEN_2,  # and Qwen 2.5 and 3
    GPT_4O,  # gpt-oss and Llama 4
    TEKKEN,  # Mistral's
    GPT_2,
    *DEEPSEEK_V3,
    QWEN_3_5,
    r" {2,}|\n| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s",  # tinypy
    r"[0-9][0-9][0-9]", r" {2,}", r"\s+", r"\p{N}",
})  # fmt: skip
"""Regular expressions of real tokenizers, which take linear time for any text."""

_SHRINKAGE = 16
"""How many characters of a real text may become one."""

_LISTS = {"normalizers", "pretokenizers", "decoders", "processors"}
_SAMPLES = ("a", " ", "\n", "Hello, world! ", "12345", "日本語", "e\u0301", "\U0001f600", "\ufdfa", "\x00")
_SAMPLE_LENGTHS = (1, 100, 10_000)


def try_tokenizer(folder: Path) -> None:
    """Load and test a folder's tokenizer.json, if there is one, in a separate process.

    Raises:
        CheckpointError: it does not load, fails on plain texts, or exceeds its time or memory.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    if file.stat().st_size > MAX_FILE_BYTES:
        raise CheckpointError(f"{file}: more than {MAX_FILE_BYTES >> 20} MiB; that is the most that is read")
    process = LimitedProcess(__name__, os.fspath(file))
    try:
        answer = process.ask(msgspec.json.encode(_Job(seconds=TRY_SECONDS)))
    finally:
        process.shutdown()
    if not answer:
        raise CheckpointError(
            f"{file}: loading and trying it takes more than {TRY_SECONDS:.0f} s of processor time or "
            f"{MEMORY_BYTES >> 30} GiB, or crashes"
        )
    error = msgspec.json.decode(answer, type=_Result).error
    if error is not None:
        raise CheckpointError(f"{file}: {error}")


def check_limits(tokenizer: "Tokenizer") -> None:
    """Reject what no real tokenizer has, and what no timeout makes harmless.

    Raises:
        ValueError: a limit is exceeded; the message names it.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(_steps(tokenizer, name))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"its {name} has {len(steps)} steps; at most {MAX_STEPS} are taken")
        growth = 1.0
        for step in steps:
            if name == "decoder" and _regex(step) not in (None, *LINEAR_REGEXES):
                raise ValueError(
                    f"its decoder has the regular expression {cut(str(_regex(step)))!r}; there must be none"
                )
            growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} can make a text {growth:.3g} times longer; at most {MAX_GROWTH} times is taken"
            )
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"it has a token of {longest} characters; at most {MAX_TOKEN_CHARACTERS} are taken")
    limit = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if limit > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"max_input_chars_per_word is {limit}; at most {MAX_TOKEN_CHARACTERS} are taken")


class LimitedEncoder:
    """Tokenizes texts: in this process, or in a limited one if the tokenizer has unknown regular expressions.

    Args:
        tokenizer: the checkpoint's, within the limits.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:  # an embedder's file may say to pad every text
            backend.no_padding()
            backend.no_truncation()
        regexes = {_regex(step) for name in ("normalizer", "pre_tokenizer") for step in _steps(backend, name)}
        is_linear = regexes <= {None, *LINEAR_REGEXES}
        self._process = None if is_linear else LimitedProcess(__name__, {"json": backend.to_str()})

    def encode(self, text: str, name: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: of any length.
            name: the caller's name for it, for the message.
            add_special_tokens: as at the beginning of a prompt.

        Raises:
            RequestError: the tokenizer fails, or exceeds its time or memory.
        """
        if self._process is None:
            token_ids: list[int]
            try:
                token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            except BaseException as error:
                if not is_failure(error):
                    raise
                raise _failure(name, one_line(error)) from None
            return token_ids
        return self._ask(_Job(text, add_special_tokens, ENCODE_SECONDS), name).token_ids

    def encode_within(
        self, text: str, pair: str | None, name: str, max_tokens: int | None
    ) -> tuple[list[int], int | None]:
        """Token ids of a text, or of a pair of texts, with special tokens; and where the second text begins, if the
        tokenizer tells the segments apart.

        Args:
            text: the first.
            pair: the second, if any.
            name: the caller's name for it, for messages.
            max_tokens: cut the texts' ends off, the longer one's first, so that there are no more tokens.

        Raises:
            RequestError: the tokenizer fails, or exceeds its time or memory, or there is no room for any text.
        """
        if self._process is not None:
            result = self._ask(_Job(text, True, ENCODE_SECONDS, pair, max_tokens), name)
            return result.token_ids, result.segment_start
        try:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is not None:
                return _encode_within(backend, text, pair, max_tokens)
            settings = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
            found = self._tokenizer(text, pair, return_token_type_ids=True, **settings)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise _failure(name, one_line(error)) from None
        token_ids: list[int] = found["input_ids"]
        return token_ids, _segment_start(found["token_type_ids"])

    def _ask(self, job: "_Job", name: str) -> "_Result":
        assert self._process is not None
        answer = self._process.ask(msgspec.json.encode(job))
        if not answer:
            raise RequestError.because(
                name, f"tokenizing it takes more than {ENCODE_SECONDS:.0f} s of processor time, or crashes"
            )
        result = msgspec.json.decode(answer, type=_Result)
        if result.error is not None:
            raise _failure(name, result.error)
        return result

    def shutdown(self) -> None:
        """End the process, if there is one. Idempotent."""
        if self._process is not None:
            self._process.shutdown()


def _encode_within(tokenizer: Any, text: str, pair: str | None, max_tokens: int | None) -> tuple[list[int], int | None]:
    first = tokenizer.encode(text, add_special_tokens=False)
    second = None if pair is None else tokenizer.encode(pair, add_special_tokens=False)
    if max_tokens is not None:
        room = max_tokens - tokenizer.num_special_tokens_to_add(pair is not None)
        lengths = (len(first), 0 if second is None else len(second))
        if room < 1 and max(lengths) > 0:
            raise ValueError(f"{max_tokens} tokens have no room for text beside the special tokens")
        one = min(lengths[0], max(room - lengths[1], (room + 1) // 2))  # as if tokens left the longer one in turn
        first.truncate(one)
        if second is not None:
            second.truncate(min(lengths[1], room - one))
    whole = tokenizer.post_process(first, second, True)
    return whole.ids, _segment_start(whole.type_ids) if pair is not None else None


def _segment_start(type_ids: list[int]) -> int | None:
    return type_ids.index(1) if 1 in type_ids else None


def _failure(name: str, reason: str) -> RequestError:
    return RequestError.because(name, f"the tokenizer fails on this text: {reason}")


def characters_per_token(tokenizer: Any) -> int:
    """Upper bound on a text's characters for each of its tokens.

    It is the longest token's length, unless a step drops or joins characters, such as spaces or accents: then no bound
    holds for every text, and this one holds for real texts.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    model = getattr(backend, "model", None)
    keeps_all = type(model).__name__ == "BPE" and (not model.fuse_unk or model.byte_fallback)  # type: ignore[union-attr]
    steps = (step for name in ("normalizer", "pre_tokenizer") for step in _steps(backend, name))
    if not keeps_all or not all(map(_keeps_characters, steps)):
        return _SHRINKAGE * longest
    takes_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return _SHRINKAGE * longest if takes_spaces else longest


def has_step(tokenizer: Any, name: str, kind: str) -> bool:
    """Whether a tokenizer's part, such as its normalizer, has a step of a kind."""
    return any(step.get("type") == kind for step in _steps(tokenizer, name))


class _Job(msgspec.Struct, array_like=True):
    text: str | None = None
    """None: load and test the tokenizer."""
    add_special_tokens: bool = False
    seconds: float = 0.0
    pair: str | None = None
    max_tokens: int | None = None
    """Set, or with a pair: `LimitedEncoder.encode_within`."""


class _Result(msgspec.Struct, array_like=True):
    token_ids: list[int] = []
    error: str | None = None
    segment_start: int | None = None


def _steps(tokenizer: Any, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a tokenizer's part, such as its normalizer, in order."""
    part = getattr(tokenizer, name, None)
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop(0)
        inner = next((step[key] for key in _LISTS if key in step), None)
        if inner is None:
            yield step
        else:
            pending[:0] = inner


def _regex(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, dict) else None


def _keeps_characters(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return _regex(step) is None and len(step["content"]) >= len(step["pattern"]["String"])
    return kind in ("Prepend", "ByteLevel", "Metaspace", "Digits") or (
        kind in ("Split", "Punctuation") and step["behavior"] != "Removed"
    )


def _growth(step: dict[str, Any]) -> float:
    """The factor by which a step may lengthen a text."""
    kind = step.get("type")
    if kind == "Replace":
        found = step["pattern"].get("String", "")  # a regular expression may match nothing, anywhere
        content = len(step["content"])
        return max(1.0, content / len(found)) if found else 1.0 + content
    if kind == "Precompiled":  # its size in bytes, a trie, and the replacements
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return float(max(1, *map(len, texts)))
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "TemplateProcessing":
        copies = max(sum("Sequence" in piece for piece in step[form]) - (form == "pair") for form in ("single", "pair"))
        tokens = sum(len(special["ids"]) for special in step["special_tokens"].values())
        return max(copies, 1) * (1 + (len(step["single"]) + tokens) / MAX_STEPS)
    return 1.0


def _load(source: Any) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source["json"]) if isinstance(source, dict) else Tokenizer.from_file(source)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _try(tokenizer: "Tokenizer") -> None:
    check_limits(tokenizer)
    for sample in _SAMPLES:
        for length in _SAMPLE_LENGTHS:
            tokenizer.encode(sample * (length // len(sample) or 1))
    size = tokenizer.get_vocab_size()
    tokenizer.decode_batch([[token_id] for token_id in range(size)])
    tokenizer.decode(list(range(size)))


def main() -> None:
    """Entry point of the process: its first line of input is the tokenizer's file or text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import sys

    import tokenizers  # noqa: F401  # before the limits are set

    source = json.loads(sys.stdin.buffer.readline())
    tokenizer = _load(source) if isinstance(source, dict) else None  # it has been tested

    def run(job: _Job) -> _Result:
        try:
            if tokenizer is None or job.text is None:
                _try(_load(source))
                return _Result()
            if job.pair is not None or job.max_tokens is not None:
                token_ids, start = _encode_within(tokenizer, job.text, job.pair, job.max_tokens)
                return _Result(token_ids, segment_start=start)
            return _Result(tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens).ids)
        except BaseException as error:
            if not is_failure(error):
                raise
            return _Result(error=one_line(error))

    serve(_Job, run, MEMORY_BYTES)


if __name__ == "__main__":
    main()
