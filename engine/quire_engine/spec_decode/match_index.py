"""Match index: finds where the latest tokens of a text occurred before. Knows tokens and places, no requests.

The match finder of zlib (Deutsch 1996, RFC 1951, section 4), for tokens: a hash table leads from each n-gram to the
latest place where one with its hash ends, and a chain from each place to the one before. There is such a level for each
of a few lengths n. A search takes the longest n that occurs, walks a bounded number of steps along its chain, and
measures at each place how long the match is.

A *place* is the end of an n-gram: the index of the token that follows it. Place 0 is none.

::

    tokens   a b c d e   x b c d f   a b c d
    place            ▲           ▲           ▲ heads[hash of (b c d)]
                     ╰─previous──╯─previous──╯
    match            4           3               a search finds (4, [the place before e])
"""

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

SEPARATOR = -2
"""Stands between the texts of a `TextRing`. No token id is negative, so no match and no draft goes across it."""

MAX_STEPS = 8
"""Steps along one chain, at about 0.4 µs each, which bounds the time of a search. With 16, suffix decoding drafts
0.3 % more accepted tokens of Python source, and takes a quarter longer."""

_START = -1
"""What comes before the first token of a request. It differs from `SEPARATOR`, so that the two do not match."""
_HASH_BITS = 32
_HASH_MASK = 2**_HASH_BITS - 1
_BASE = 0x9E3779B1
"""Base of the polynomial hash: 2³² over the golden ratio, odd (Knuth, volume 3, section 6.4)."""
_MIN_BITS = 8
_MAX_BITS = 20
"""Least and most bits of the hash tables of a request's text. They grow with it: one or two places per bucket."""
_NUM_TOKENS_FOR_NUMPY = 96
"""From this many tokens on, numpy's fixed cost of about 65 µs on three levels is less than that of a loop."""

Match = tuple[int, list[int]]
"""`(length, places)`: of the longest match, and the places that match as far, latest first; `(0, [])` if none."""


class _Level:
    """The places of the n-grams of one length n.

    `heads[bucket]` is the latest place of an n-gram in this bucket, `previous[place]` the one before it. A bucket is
    the high bits of the hash: the token k before the last counts `token · BASE^(k+1)`, modulo 2³².
    """

    __slots__ = ("drop", "hash", "heads", "length", "previous", "shift")

    def __init__(self, length: int, bits: int, num_places: int) -> None:
        self.length = length
        self.drop = pow(_BASE, length, 2**_HASH_BITS)
        """What the token that leaves the n-gram counts, before the sum is shifted by the next one."""
        self.hash = sum(_START * pow(_BASE, k + 1, 2**_HASH_BITS) for k in range(length)) & _HASH_MASK
        """Hash of the last n tokens."""
        self.previous = _zeros(num_places)
        self.resize(bits)

    def resize(self, bits: int) -> None:
        """Use 2^`bits` buckets. All are empty then."""
        self.shift = _HASH_BITS - bits
        self.heads = _zeros(2**bits)

    def index(self, tokens: "array[int]", begin: int, end: int) -> None:
        """Add the n-grams whose last tokens are `tokens[begin:end]`. `previous` has places for them."""
        length, num_tokens = self.length, end - begin
        recent = np.frombuffer(tokens, np.int32)[begin - length + 1 : end].astype(np.uint32)
        hashes = np.zeros(num_tokens, np.uint32)
        for k in range(length):
            factor = np.uint32(pow(_BASE, k + 1, 2**_HASH_BITS))
            hashes += recent[length - 1 - k : length - 1 - k + num_tokens] * factor
        self.hash = int(hashes[-1])
        buckets = hashes >> np.uint32(self.shift)
        # Stable, so the places of a bucket come in order. Of 16-bit numbers it is a radix sort, ten times as fast.
        order = np.argsort(buckets.astype(np.uint16), kind="stable")
        if self.shift < _HASH_BITS - 16:
            order = order[np.argsort((buckets >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
        places, buckets = (order + (begin + 1)).astype(np.int32), buckets[order]
        is_first = np.ones(num_tokens, np.bool_)
        np.not_equal(buckets[1:], buckets[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], num_tokens) - 1
        before = np.empty_like(places)
        before[1:] = places[:-1]
        heads = np.frombuffer(self.heads, np.int32)
        before[firsts] = heads[buckets[firsts]]
        heads[buckets[lasts]] = places[lasts]
        np.frombuffer(self.previous, np.int32)[places] = before


class _Text:
    """Tokens with their levels.

    Args:
        lengths: of the n-grams, ascending.
        window: how long a match is measured, in tokens; at least the longest of `lengths`.
        bits: of the hash tables.
        num_places: to begin with.
        filler: before the first token.
        place_mask: differences of places are modulo this plus one.
    """

    __slots__ = ("_end", "_levels", "_num_live", "_place_mask", "tokens", "window")

    def __init__(
        self, lengths: Sequence[int], window: int, bits: int, num_places: int, filler: int, place_mask: int
    ) -> None:
        self.window = window
        self.tokens = array("i", [filler]) * window
        """The tokens begin at index `window`, so that there are `window` tokens before every place."""
        self._levels = [_Level(length, bits, num_places) for length in reversed(lengths)]
        self._end = window
        """Where the next token goes."""
        self._num_live = 0
        """A place is alive if it is this far before `_end`, or nearer."""
        self._place_mask = place_mask

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens and levels take."""
        arrays = [self.tokens, *(part for level in self._levels for part in (level.heads, level.previous))]
        return sum(len(part) * part.itemsize for part in arrays)

    def _search(self, starts: Sequence[int], suffix: int, enough: int) -> Match:
        """The longest match.

        Args:
            starts: the latest place of each level, the longest length first.
            suffix: the tokens to match, the last `window`, as one number: 32 bits each, the last token highest.
            enough: stop once there are so many places that match all of `suffix`.
        """
        tokens, window, end, mask, num_live = self.tokens, self.window, self._end, self._place_mask, self._num_live
        number = int.from_bytes
        places: list[int] = []
        for level, place in zip(self._levels, starts, strict=True):
            previous, longest, age_before = level.previous, level.length, -1
            # The tokens are numbers of 32 bits, so a match of n leaves none but the lowest `window - n` of them.
            bound = 1 << 32 * (window - longest)
            for _ in range(MAX_STEPS):
                age = (end - place) & mask
                # The last one is followed by 0, or by a link to what was overwritten, so to a younger place.
                if not place or not age_before < age <= num_live:
                    break
                difference = number(tokens[place - window : place], "little") ^ suffix
                if difference < bound:
                    length = window - (difference.bit_length() + 31) // 32
                    if length > longest:
                        longest = length
                        bound = 1 << 32 * (window - length)
                        places = [place]
                    else:
                        places.append(place)
                    if not difference and len(places) >= enough:
                        break
                age_before = age
                place = previous[place]
            if places:
                return longest, places
        return 0, places


class RequestText(_Text):
    """The tokens of one request, which only grow.

    Takes 4 bytes per token, and on each level 4 for its place and 2 to 4 for the hash table.

    Args:
        lengths: of the n-grams, ascending.
        window: how long a match is measured, in tokens; at least the longest of `lengths`.
    """

    __slots__ = ()

    def __init__(self, lengths: Sequence[int], window: int) -> None:
        super().__init__(lengths, window, _MIN_BITS, window + 1, _START, -1)

    @property
    def num_tokens(self) -> int:
        """How many were added."""
        return self._num_live

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end: about 0.8 µs for each on three levels, less than 0.1 µs where there are many."""
        tokens, begin = self.tokens, self._end
        tokens.extend(array("i", token_ids))
        end = self._end = len(tokens)
        self._num_live = end - self.window
        bits = _HASH_BITS - self._levels[0].shift
        if self._num_live > 2 ** (bits + 1) and bits < _MAX_BITS:
            bits = min(self._num_live.bit_length() - 1, _MAX_BITS)
            for level in self._levels:
                level.resize(bits)
                level.previous = _zeros(end + 1)
                level.index(tokens, self.window, end)
        elif end - begin >= _NUM_TOKENS_FOR_NUMPY:
            for level in self._levels:
                level.previous.frombytes(bytes(4 * (end - begin)))
                level.index(tokens, begin, end)
        else:
            for level in self._levels:
                length, drop, shift, heads = level.length, level.drop, level.shift, level.heads
                add_previous, value = level.previous.append, level.hash
                for index in range(begin, end):
                    value = (value + tokens[index] - tokens[index - length] * drop) * _BASE & _HASH_MASK
                    bucket = value >> shift
                    add_previous(heads[bucket])
                    heads[bucket] = index + 1
                level.hash = value

    def suffix(self) -> int:
        """The last `window` tokens, as `find` takes them."""
        return int.from_bytes(self.tokens[-self.window :], "little")

    def hashes(self) -> list[int]:
        """Hashes of the last n-gram of each level, the longest first."""
        return [level.hash for level in self._levels]

    def find(self, suffix: int, enough: int) -> Match:
        """Earlier places that match the longest part of the text's end, which may reach into it.

        Args:
            suffix: what `suffix()` returns.
            enough: stop once there are so many places that match as far as is measured.
        """
        return self._search([level.previous[self._end] for level in self._levels], suffix, enough)

    def after(self, place: int, num_tokens: int) -> "array[int]":
        """The tokens that follow a place. At the end of the text they repeat, as in a copy that reads what it wrote."""
        text = self.tokens[place : place + num_tokens]
        if len(text) < num_tokens:
            text = (text * (num_tokens // len(text) + 1))[:num_tokens]
        return text


class TextRing(_Text):
    """The latest texts of many, in a ring of tokens.

    Takes 4 bytes per token, and on each level 8.

    ::

        tokens   │ … text 7 │S│ text 8 │S│ (free) │ text 5 │S│ text 6 │S│ unused │      S: SEPARATOR
                                          ▲ end     ▲ oldest                     each text lies in one piece

    Args:
        lengths: of the n-grams, ascending.
        window: how long a match is measured, in tokens; at least the longest of `lengths`.
        num_tokens: at most so many, with a separator for each text; a power of two.
        num_texts: at most so many. The oldest makes room.
    """

    __slots__ = ("_sizes", "max_texts")

    def __init__(self, lengths: Sequence[int], window: int, num_tokens: int, num_texts: int) -> None:
        assert num_tokens & (num_tokens - 1) == 0
        super().__init__(
            lengths, window, num_tokens.bit_length() - 1, window + num_tokens + 1, SEPARATOR, num_tokens - 1
        )
        self.tokens.extend(array("i", [SEPARATOR]) * (num_tokens + window))
        self.max_texts = num_texts
        self._sizes: deque[int] = deque()
        """Sizes of the texts that are alive, oldest first, with their separators and what was left unused before."""

    @property
    def num_texts(self) -> int:
        """How many are alive."""
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        """How many of the ring's tokens are in use."""
        return self._num_live

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a text, unless it is empty; of one that is longer than a quarter of the ring, only the end."""
        if not token_ids:
            return
        num_tokens = self._place_mask + 1
        text = array("i", token_ids[-(num_tokens // 4) + 1 :])
        begin, size = self._end, len(text) + 1
        if begin + size > self.window + num_tokens:
            size += self.window + num_tokens - begin
            begin = self.window
        while self._sizes and (len(self._sizes) >= self.max_texts or self._num_live + size > self._place_mask):
            self._num_live -= self._sizes.popleft()
        self._sizes.append(size)
        self._num_live += size
        end = begin + len(text)
        self.tokens[begin:end] = text
        self.tokens[end] = SEPARATOR
        self._end = end + 1
        for level in self._levels:
            level.index(self.tokens, begin, end)

    def find(self, suffix: int, hashes: Sequence[int], enough: int) -> Match:
        """Places that match the longest part of the end of a `RequestText`.

        It has the same window, and the ring's lengths are its longest.

        Args:
            suffix: what its `suffix()` returns.
            hashes: what its `hashes()` returns.
            enough: stop once there are so many places that match as far as is measured.
        """
        starts = [level.heads[value >> level.shift] for level, value in zip(self._levels, hashes, strict=False)]
        return self._search(starts, suffix, enough)

    def after(self, place: int, num_tokens: int) -> "array[int]":
        """The tokens that follow a place; from the end of its text on, they mean nothing."""
        return self.tokens[place : place + num_tokens]


def _zeros(length: int) -> "array[int]":
    return array("i", bytes(4 * length))
