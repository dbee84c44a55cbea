"""Incremental text: equal to decoding it all at once, never half a character, never part of a stop string."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.frontend.detokenizer import Decode, IncrementalDetokenizer
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.sampling_params import SamplingParams
from tokenizers import Tokenizer, decoders, models

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
TOKENIZER = load_tokenizer(TINYPY)


def decode(token_ids: object) -> str:
    text = TOKENIZER.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)  # type: ignore[call-overload]
    assert isinstance(text, str)
    return text


def run(token_ids: list[int], params: SamplingParams, decode: Decode = decode) -> tuple[list[str], str, str | None]:
    """(deltas, text, stop string) of feeding the tokens until a stop string is found."""
    detokenizer = IncrementalDetokenizer(decode, params)
    deltas = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        if stop is not None:
            deltas.append(detokenizer.next_delta(finished=True))
            return deltas, detokenizer.text, stop
        deltas.append(detokenizer.next_delta(finished=False))
    detokenizer.finish()
    deltas.append(detokenizer.next_delta(finished=True))
    return deltas, detokenizer.text, None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_whole(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    deltas, result, _ = run(token_ids, SamplingParams())
    assert "".join(deltas) == result == decode(token_ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas), "half a character was shown"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_tokens_end_in_the_text_of_all(token_ids: list[int]) -> None:
    deltas, result, _ = run(token_ids, SamplingParams())
    assert "".join(deltas) == result


def byte_tokens(text: str) -> list[int]:
    """One token per byte, so that every character of more than one byte is split."""
    vocabulary = TOKENIZER.get_vocab()
    names = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    return [vocabulary[symbol] for symbol in "".join(piece for piece, _ in names(text))]


TEXTS = st.text(max_size=40).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False))
TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.one_of(TEXTS, TOKENS), st.lists(st.integers(1, 9), min_size=1))
def test_several_tokens_at_once_give_the_text_that_they_give_one_by_one(token_ids: list[int], sizes: list[int]) -> None:
    one_by_one, at_once = (IncrementalDetokenizer(decode, SamplingParams()) for _ in range(2))
    rest, was_extended = token_ids, [True]
    for size in itertools.cycle(sizes):
        if not rest:
            break
        group, rest = rest[:size], rest[size:]
        was_extended.append(at_once.extend(group))
        if not was_extended[-1]:
            for token_id in group:
                at_once.append(token_id)
        for token_id in group:
            one_by_one.append(token_id)
        assert at_once.text == one_by_one.text
        assert at_once.token_ids == one_by_one.token_ids
        assert at_once.next_delta(finished=False) == one_by_one.next_delta(finished=False)
    if "\N{REPLACEMENT CHARACTER}" not in decode(token_ids):
        assert was_extended[-1], "nothing is pending at the end"


def test_tokens_are_taken_in_one_by_one_where_a_stop_string_may_end_among_them() -> None:
    detokenizer = IncrementalDetokenizer(decode, SamplingParams(stop=["b"]))
    assert not detokenizer.extend(TOKENIZER.encode("abc", add_special_tokens=False))
    assert detokenizer.token_ids == []
    assert detokenizer.text == ""


def test_a_character_split_over_tokens_is_shown_when_complete() -> None:
    text = "naïve ☃ 🦉 end"
    deltas, result, _ = run(byte_tokens(text), SamplingParams())
    assert result == text
    assert "🦉" in deltas
    assert "☃" in deltas


def test_invalid_bytes_do_not_hold_the_text_back_for_ever() -> None:
    lead_byte = byte_tokens("é")[0]
    detokenizer = IncrementalDetokenizer(decode, SamplingParams())
    shown = ""
    for _ in range(50):
        detokenizer.append(lead_byte)
        shown += detokenizer.next_delta(finished=False)
    assert len(shown) > 30


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(include: bool) -> None:
    params = SamplingParams(stop=["STOP", "XX"], include_stop_str_in_output=include)
    deltas, text, stop = run(byte_tokens("abc ST STOPPED XX"), params)
    assert stop == "STOP"
    assert text == "".join(deltas) == ("abc ST STOP" if include else "abc ST ")
    if not include:
        for end in range(len(deltas)):
            assert text.startswith("".join(deltas[:end])), "text was shown and then taken back"


def test_the_stop_string_that_comes_first_wins() -> None:
    assert run(byte_tokens("one two three"), SamplingParams(stop=["three", "two"]))[1:] == ("one ", "two")


def test_stop_string_within_one_token() -> None:
    tokens = TOKENIZER.encode("    def function(self):\n        return", add_special_tokens=False)
    _, text, stop = run(tokens, SamplingParams(stop=["sel"]))
    assert (text, stop) == ("    def function(", "sel")


def test_stop_strings_before_min_tokens_do_not_count() -> None:
    tokens = byte_tokens("ab ab ab")
    assert run(tokens, SamplingParams(stop=["ab"], min_tokens=0))[1] == ""
    assert run(tokens, SamplingParams(stop=["ab"], min_tokens=3))[1] == "ab "
    assert run(tokens, SamplingParams(stop=["ab"], min_tokens=4))[1] == "ab ", "it ends after min_tokens, so it counts"
    assert run(tokens, SamplingParams(stop=["ab"], min_tokens=5))[1] == "ab ab "


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_counted_but_not_shown(include: bool) -> None:
    detokenizer = IncrementalDetokenizer(decode, SamplingParams(include_stop_str_in_output=include))
    first, last = byte_tokens("ab")
    detokenizer.append(first)
    detokenizer.append(last, is_stop_token=True)
    detokenizer.finish()
    assert detokenizer.token_ids == [first, last]
    assert detokenizer.next_delta(finished=True) == ("ab" if include else "a")


def test_cost_is_linear() -> None:
    decoded = 0

    def counting(token_ids: object) -> str:
        nonlocal decoded
        decoded += len(token_ids)  # type: ignore[arg-type]
        return decode(token_ids)

    tokens = byte_tokens("x = 1\n" * 400)
    run(tokens, SamplingParams(stop=["never"]), counting)
    assert decoded < 6 * len(tokens)


def test_the_first_space_after_a_prompt_is_kept() -> None:
    """A SentencePiece-like decoder strips the leading space of whatever it is given."""
    pieces = {1: "\u2581The", 2: "\u2581capital", 3: "\u2581is", 4: "\u2581Paris", 5: "\u2581now"}

    def metaspace(token_ids: object) -> str:
        return "".join(pieces[i] for i in token_ids).replace("\u2581", " ").removeprefix(" ")  # type: ignore[attr-defined]

    detokenizer = IncrementalDetokenizer(metaspace, SamplingParams(stop=["zzz"]), [1, 2, 3])
    detokenizer.append(4)
    detokenizer.append(5)
    detokenizer.finish()
    assert detokenizer.next_delta(finished=True) == " Paris now"
    assert detokenizer.token_ids == [4, 5]


def test_a_prompt_that_ends_within_a_character() -> None:
    *first, last = byte_tokens("\N{SNOWMAN}")
    detokenizer = IncrementalDetokenizer(decode, SamplingParams(), first)
    detokenizer.append(last)
    detokenizer.append(byte_tokens("a")[0])
    detokenizer.finish()
    assert detokenizer.next_delta(finished=True).endswith("a")


def llama_like(token_ids: object) -> str:
    """A decoder with byte fallback that strips the first space, as Llama's SentencePiece has it; 0 is special."""
    return LLAMA.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[call-overload, no-any-return]


def _llama() -> Tokenizer:
    vocabulary = {"<s>": 0, "\u2581The": 1, "\u2581cat": 2, "s": 3, "\u2581": 4, "\N{REPLACEMENT CHARACTER}": 5}
    vocabulary |= {f"<0x{byte:02X}>": 16 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


LLAMA = _llama()
BYTES = frozenset(range(16, 272))


def llama_bytes(data: bytes) -> list[int]:
    return [16 + byte for byte in data]


def stream(prompt: list[int], output: list[int], **params: Any) -> list[str]:
    """The deltas, the last one of the end."""
    detokenizer = IncrementalDetokenizer(
        llama_like, SamplingParams(**params), prompt, byte_ids=BYTES, skipped_ids=frozenset({0})
    )
    deltas = []
    for token_id in output:
        stop = detokenizer.append(token_id)
        deltas.append(detokenizer.next_delta(finished=stop is not None))
        if stop is not None:
            return deltas
    detokenizer.finish()
    return [*deltas, detokenizer.next_delta(finished=True)]


@pytest.mark.parametrize(
    ("prompt", "output", "deltas"),
    [
        ([0, 1], [0, 2, 3], ["", " cat", "s", ""]),
        ([1, 0, 0, 0, 0, 0, 0, 0, 0], [2], [" cat", ""]),
        ([0], [2, 3], ["cat", "s", ""]),
        ([], [4, 0, 4, 2], ["", "", " ", " cat", ""]),
        ([1, *llama_bytes("☃".encode()[:2])], [*llama_bytes("☃".encode()[2:]), 2], ["", "☃ cat", ""]),
        ([1], [*llama_bytes("☃".encode()), 2], ["", "", "", "☃ cat", ""]),
        ([1], [*llama_bytes(b"\n"), 2], ["", "\n cat", ""]),
        ([1], [*llama_bytes(b"a\xff"), 3], ["", "", "\N{REPLACEMENT CHARACTER}" * 2 + "s", ""]),
        ([1], [5, *llama_bytes("☃".encode())], ["\N{REPLACEMENT CHARACTER}", "", "", "", "☃"]),
    ],
    ids=["special", "specials", "first", "spaces", "prompt", "character", "newline", "invalid", "literal"],
)
def test_with_byte_fallback_the_text_is_that_of_all_tokens(
    prompt: list[int], output: list[int], deltas: list[str]
) -> None:
    assert stream(prompt, output) == deltas
    whole = llama_like([*prompt, *output])
    assert whole.endswith("".join(deltas))


def test_a_stop_string_of_byte_tokens_is_found_at_once() -> None:
    assert stream([1], [2, *llama_bytes(b"\n"), 2], stop=["\n"]) == [" cat", ""]
    assert stream([1], [2, *llama_bytes(b"a\n"), 2], stop=["a\n"], include_stop_str_in_output=True) == [
        " cat", "", "a\n",
    ]  # fmt: skip


def test_many_byte_tokens_in_a_row_are_given_out_before_they_end() -> None:
    text = "☃" * 100
    deltas = stream([1], llama_bytes(text.encode()))
    assert "".join(deltas) == text
    assert len(deltas[-1]) < 30


@pytest.mark.parametrize("number", [1, 7, 8, 9, 30])
def test_literal_replacement_characters_do_not_harm_the_character_behind_them(number: int) -> None:
    text = number * "\N{REPLACEMENT CHARACTER}" + "☃"
    assert run(byte_tokens(text), SamplingParams())[1] == text


def test_special_tokens_without_end_cost_nothing() -> None:
    num_decoded = 0

    def counting(token_ids: object) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)  # type: ignore[arg-type]
        return llama_like(token_ids)

    detokenizer = IncrementalDetokenizer(counting, SamplingParams(), [1], skipped_ids=frozenset({0}))
    for _ in range(1000):
        detokenizer.append(0)
    detokenizer.append(2)
    assert detokenizer.text == " cat"
    assert num_decoded < 10


def test_without_text_nothing_is_decoded() -> None:
    detokenizer = IncrementalDetokenizer(None, SamplingParams(detokenize=False), [1])
    detokenizer.append(2)
    assert detokenizer.extend([3, 3])
    detokenizer.finish()
    assert (detokenizer.token_ids, detokenizer.next_delta(finished=True)) == ([2, 3, 3], "")
