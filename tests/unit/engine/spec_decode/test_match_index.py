"""A match index finds what a search of the whole text finds, however the text came."""

from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.spec_decode import match_index
from quire_engine.spec_decode.match_index import MAX_STEPS, Match, RequestText, TextRing

ALL = 10**6
WINDOW = 6
LENGTHS = st.sampled_from([(1,), (2,), (1, 3), (2, 4), (1, 3, 6), (2, 3, 6)])
TEXTS = st.integers(1, 4).flatmap(lambda vocab_size: st.lists(st.integers(0, vocab_size - 1), max_size=60))


@pytest.fixture(autouse=True, scope="module")
def every_step():
    """Searches are exact where they may take all the steps they need."""
    with mock.patch.object(match_index, "MAX_STEPS", ALL):
        yield


def matched(text: Sequence[int], end: int, suffix: Sequence[int]) -> int:
    """How many tokens before `end` are like the last of `suffix`, within the window."""
    length = 0
    while length < min(end, len(suffix), WINDOW) and text[end - 1 - length] == suffix[-1 - length]:
        length += 1
    return length


def longest(candidates: list[tuple[int, int]], shortest: int) -> Match:
    """Of `(length, place)`, latest first."""
    best = max((length for length, _ in candidates), default=0)
    return (best, [place for length, place in candidates if length == best]) if best >= shortest else (0, [])


def in_own_text(token_ids: Sequence[int], shortest: int) -> Match:
    ends = range(len(token_ids) - 1, 0, -1)
    length, places = longest([(matched(token_ids, end, token_ids), end) for end in ends], shortest)
    return length, [place + WINDOW for place in places]


def filled(token_ids: Sequence[int], lengths: Sequence[int], pieces: Sequence[int] = ()) -> RequestText:
    """A text that came in pieces, the last of which is the rest."""
    text = RequestText(lengths, WINDOW)
    for size in pieces:
        text.extend(token_ids[text.num_tokens : text.num_tokens + size])
    text.extend(token_ids[text.num_tokens :])
    return text


@given(TEXTS, LENGTHS, st.lists(st.integers(0, 9)), st.sampled_from([1, 5, ALL]))
def test_a_text_knows_its_longest_matches(
    token_ids: list[int], lengths: tuple[int, ...], pieces: list[int], num_tokens_for_numpy: int
) -> None:
    with mock.patch.object(match_index, "_NUM_TOKENS_FOR_NUMPY", num_tokens_for_numpy):
        text = filled(token_ids, lengths, pieces)
    assert text.num_tokens == len(token_ids)
    assert text.find(text.suffix(), ALL) == in_own_text(token_ids, lengths[0])
    assert text.hashes() == filled(token_ids, lengths).hashes()


@given(st.lists(TEXTS, max_size=20), TEXTS, LENGTHS, st.integers(1, 9), st.booleans())
def test_a_ring_knows_the_longest_matches_in_the_latest_texts(
    texts: list[list[int]], token_ids: list[int], lengths: tuple[int, ...], max_texts: int, longest_only: bool
) -> None:
    text = filled(token_ids, lengths)
    if longest_only:
        lengths = lengths[-1:]  # the ring may lack the shorter ones
    ring = TextRing(lengths, WINDOW, 64, max_texts)
    for other in texts:
        ring.add(other)
        assert ring.num_texts <= max_texts
        assert ring.num_tokens < 64
    texts = [other for other in texts if other]
    alive = [other[-15:] for other in texts[len(texts) - ring.num_texts :]]  # of a long text, a quarter of the ring
    candidates = [
        (matched(other, end, token_ids), other[end:]) for other in reversed(alive) for end in range(len(other), 0, -1)
    ]
    length, expected = longest(candidates, lengths[0])
    found_length, places = ring.find(text.suffix(), text.hashes(), ALL)
    assert found_length == length
    assert len(places) == len(expected)
    for place, after in zip(places, expected, strict=True):
        assert ring.after(place, len(after) + 1).tolist() == [*after, match_index.SEPARATOR]


@pytest.mark.parametrize("size", range(1, 16))
def test_a_ring_that_has_gone_round_often_knows_what_is_alive_and_where_it_ends(size: int) -> None:
    text = filled([7] * 10, (1, 3))
    ring = TextRing((1, 3), WINDOW, 64, 100)
    for count in range(200):
        ring.add([7] * size)
        length, places = ring.find(text.suffix(), text.hashes(), ALL)
        assert length == min(size, WINDOW)
        assert len(places) == len(set(places)) == ring.num_texts * (size + 1 - length)
        # As many as fit, but for the end of the ring, where the next did not.
        assert ring.num_texts == count + 1 or 64 - 3 * (size + 1) < ring.num_texts * (size + 1) < 64
        ends = [place for place in places if ring.after(place, 1)[0] == match_index.SEPARATOR]
        assert len(ends) == ring.num_texts


@pytest.mark.parametrize("size", range(1, 16))
def test_a_link_to_what_was_overwritten_is_not_followed(size: int) -> None:
    text = filled([3, 7], (1,))
    ring = TextRing((1,), WINDOW, 64, 100)
    for _ in range(12):
        ring.add([7, *[8] * 9])
    ring.add([7] * size)
    length, places = ring.find(text.suffix(), text.hashes(), ALL)
    assert length == 1
    assert len(places) == len(set(places)) == size + ring.num_texts - 1


@pytest.mark.parametrize("size", range(1, 16))
def test_the_end_of_a_chain_is_no_place_even_if_all_tokens_are_0(size: int) -> None:
    text = filled([0] * 10, (1,))
    for count in range(10):
        ring = TextRing((1,), WINDOW, 64, 1)
        for _ in range(count):
            ring.add([1] * size)
        ring.add([0] * size)
        length, places = ring.find(text.suffix(), text.hashes(), ALL)
        assert (length, len(places)) == (min(size, WINDOW), max(size - WINDOW, 0) + 1)


@pytest.mark.parametrize("num_tokens", [511, 513, 2049, 140_000])
def test_a_text_that_grew_is_like_one_that_came_at_once(num_tokens: int) -> None:
    token_ids = [i * i % 101 for i in range(num_tokens)]
    grown = filled(token_ids, (1, 3, 6), [num_tokens // 3, 1, num_tokens // 2, 1])
    at_once = filled(token_ids, (1, 3, 6))
    assert grown.find(grown.suffix(), ALL) == at_once.find(at_once.suffix(), ALL)
    length, places = grown.find(grown.suffix(), ALL)
    assert length == WINDOW
    assert places == [place + WINDOW for place in range(num_tokens - 101, WINDOW - 1, -101)]


def test_a_search_takes_so_many_steps() -> None:
    text = filled([7] * 5000, (1, 3))
    with mock.patch.object(match_index, "MAX_STEPS", MAX_STEPS):
        assert len(text.find(text.suffix(), ALL)[1]) == MAX_STEPS
    assert text.find(text.suffix(), enough=1) == (WINDOW, [WINDOW + 4999])


def test_memory_of_a_text_is_in_proportion() -> None:
    for num_tokens in (1000, 30_000, 300_000):
        text = filled([i * 7919 % 32_003 for i in range(num_tokens)], (1, 3, 6))
        assert text.num_bytes < 30 * num_tokens + 10_000


def test_memory_of_a_ring_never_changes() -> None:
    ring = TextRing((1, 3), WINDOW, 1024, 100)
    num_bytes = ring.num_bytes
    for size in (0, 1, 100, 500, 5000, 3) * 20:
        ring.add([7] * size)
        assert ring.num_bytes == num_bytes
    assert num_bytes < 1.1 * 1024 * (4 + 2 * 8)
