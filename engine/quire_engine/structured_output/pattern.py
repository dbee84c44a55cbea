"""Regular expressions of JSON schemas (ECMA-262) over the characters of JSON strings, as xgrammar's EBNF.

A pattern may match anywhere in the string, unless it has `^` and `$`. Characters are written as `json.dumps` does
without `ensure_ascii`: only quotes, backslashes and control characters are escaped.
"""

import re
from collections.abc import Callable, Iterable

Ranges = list[tuple[int, int]]
"""Code points, sorted, both ends included."""

_MAX_NESTING = 50
_MAX_COUNT = (1 << 31) - 1
"""Limit of a repetition: xgrammar takes a larger count modulo 2**32."""
_LAST = 0x10FFFF
_DIGITS: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Ranges = [
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED: Ranges = [(0, 31), (34, 34), (92, 92)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_CODE = {"x": re.compile("([0-9a-fA-F]{2})"), "u": re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})")}
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]+)(?:(,)([0-9]*))?\})")


class PatternError(ValueError):
    """A pattern is malformed, or cannot be enforced; the message says why."""


def literal(text: str) -> str:
    """A string of xgrammar's EBNF."""
    return '"' + "".join(f"\\x{ord(c):02x}" if c in '"\\' or ord(c) < 32 else c for c in text) + '"'


def json_literal(text: str) -> str:
    """A string of xgrammar's EBNF: the JSON string of a text, without its quotes."""
    return literal("".join(_escaped(ord(c)) for c in text))


def any_of(expressions: Iterable[str | None]) -> str | None:
    """One of several expressions. None stands for an expression that no text matches."""
    possible = list(dict.fromkeys(expression for expression in expressions if expression is not None))
    return f"({' | '.join(possible)})" if possible else None


def _escaped(code: int) -> str:
    if code in _SHORT_ESCAPES:
        return "\\" + _SHORT_ESCAPES[code]
    return f"\\u{code:04x}" if code < 32 else chr(code)


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters, without halves of surrogate pairs."""
    result: Ranges = []
    begin = 0
    for low, high in sorted([*ranges, (0xD800, 0xDFFF)]):
        if low > begin:
            result.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*result, (begin, _LAST)] if begin <= _LAST else result


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    return "[" + "".join(f"\\U{low:08x}" + (f"-\\U{high:08x}" if high > low else "") for low, high in ranges) + "]"


def _characters(ranges: Ranges) -> str:
    others = _complement(ranges)
    expressions = [_class(raw)] if (raw := _complement([*others, *_ESCAPED])) else []
    chosen = [code for low, high in _ESCAPED for code in range(low, high + 1) if any(a <= code <= b for a, b in ranges)]
    if short := [(ord(_SHORT_ESCAPES[code]),) * 2 for code in chosen if code in _SHORT_ESCAPES]:
        expressions.append(f'"\\\\" {_class(short)}')
    for first in (0, 16):
        last = [code for code in chosen if code not in _SHORT_ESCAPES and first <= code < first + 16]
        expressions += [f'"\\\\u00{first // 16}" [{"".join(f"{code % 16:x}" for code in last)}]'] if last else []
    if not expressions:
        raise PatternError("a class without a character")
    return f"({' | '.join(expressions)})"


def characters_except(characters: Iterable[str]) -> str:
    """One character, in a JSON string, except these."""
    return _characters(_complement((ord(character),) * 2 for character in characters))


class Pattern:
    """One pattern, parsed.

    Args:
        text: the pattern.
        name: gives an expression a name, so that it is written only once.

    Raises:
        PatternError: it is malformed, or cannot be enforced.
    """

    def __init__(self, text: str, name: Callable[[str], str]) -> None:
        self._text = text
        self._position = 0
        self._name = name
        self._nesting = 0
        self.repeated: tuple[str, int, int | None] | None = None
        """If the whole pattern is `^[…]{m,n}$`: the class, m and n."""
        self.expression = self._alternatives(is_outermost=True)
        """A string that the pattern matches somewhere."""
        if self._position < len(text):
            raise self._error("a ')' without a '('")

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{what}, at position {self._position}")

    def _next(self, *texts: str) -> str | None:
        """Skip the first of these texts that comes next, and return it."""
        for text in texts:
            if self._text.startswith(text, self._position):
                self._position += len(text)
                return text
        return None

    def _take(self) -> str:
        if self._position >= len(self._text):
            raise self._error("an end too early")
        self._position += 1
        return self._text[self._position - 1]

    def _alternatives(self, *, is_outermost: bool = False) -> str:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise self._error(f"more than {_MAX_NESTING} groups within each other")
        expressions = [self._sequence(is_outermost)]
        while self._next("|"):
            self.repeated = None
            expressions.append(self._sequence(is_outermost))
            self.repeated = None
        self._nesting -= 1
        return f"({' | '.join(expressions)})"

    def _sequence(self, is_outermost: bool) -> str:
        anywhere = self._name(characters_except("")) + "*"
        starts_anywhere, ends_anywhere = is_outermost, is_outermost
        if is_outermost and self._next("^"):
            starts_anywhere = False
        atoms = []
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            if is_outermost and self._text[self._position] == "$" and self._text[self._position + 1 :][:1] in ("", "|"):
                self._position += 1
                ends_anywhere = False
                break
            atoms.append(self._repeated_atom())
        if is_outermost and len(atoms) == 1 and not starts_anywhere and not ends_anywhere:
            self.repeated = atoms[0][1]
        expressions = [expression for expression, _ in atoms]
        expressions = [anywhere] * starts_anywhere + expressions + [anywhere] * ends_anywhere
        return " ".join(expressions) or '""'

    def _repeated_atom(self) -> tuple[str, tuple[str, int, int | None] | None]:
        atom, is_class = self._atom()
        match = _QUANTIFIER.match(self._text, self._position)
        if match is None:
            return atom, (atom, 1, 1) if is_class else None
        self._position = match.end()
        self._next("?")
        sign, low, comma, high = match.groups()
        if sign:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            if any(len(count or "") > 10 or int(count or 0) > _MAX_COUNT for count in (low, high)):
                raise self._error(f"a repetition of more than {_MAX_COUNT} times")
            least, most = int(low), int(low) if not comma else int(high) if high else None
        if most is not None and most < least:
            raise self._error("a repetition of more than at most")
        if _QUANTIFIER.match(self._text, self._position):
            raise self._error("a repetition of a repetition")
        return f"{atom}{{{least},{'' if most is None else most}}}", (atom, least, most) if is_class else None

    def _atom(self) -> tuple[str, bool]:
        """An expression, and whether it is a class of characters."""
        character = self._take()
        if character == "(":
            return self._group(), False
        if character == "[":
            return self._named(self._class()), True
        if character == ".":
            return self._named(_complement(_LINE_ENDS)), True
        if character == "\\":
            ranges = self._escape()
            return self._named(ranges), True
        if character in "^$":
            raise self._error(f"a {character!r} within it")
        if character in "*+?" or (character == "{" and self._text.startswith(",", self._position)):
            raise self._error("nothing to repeat")
        if 0xD800 <= ord(character) < 0xE000:
            raise self._error("half of a surrogate pair")
        return json_literal(character), False

    def _named(self, ranges: Ranges) -> str:
        return self._name(_characters(ranges))

    def _group(self) -> str:
        if self._next("?"):
            if self._next("P<", "<"):
                if self._text[self._position : self._position + 1] in ("=", "!"):
                    raise self._error("lookbehind")
                self._position = self._text.find(">", self._position) + 1
                if not self._position:
                    raise self._error("a name without an end")
            elif not self._next(":"):
                raise self._error("lookahead" if self._next("=", "!") else "an unknown kind of group")
        expression = self._alternatives()
        if not self._next(")"):
            raise self._error("a '(' without a ')'")
        return expression

    def _class(self) -> Ranges:
        is_negated = self._next("^") is not None
        ranges: Ranges = []
        if self._next("]"):  # in ECMA-262 an empty class, elsewhere a character of it
            raise self._error("a class that begins with ']'")
        while not self._next("]"):
            low = self._class_atom()
            if self._text.startswith("-", self._position) and not self._text.startswith("-]", self._position):
                self._position += 1
                high = self._class_atom()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise self._error("a range between classes")
                if low[0][0] > high[0][0]:
                    raise self._error("a range that runs backwards")
                low = [(low[0][0], high[0][0])]
            ranges += low
        return _complement(ranges) if is_negated else sorted(ranges)

    def _class_atom(self) -> Ranges:
        character = self._take()
        if character == "\\":
            return [(8, 8)] if self._next("b") else self._escape()
        return [(ord(character),) * 2]

    def _escape(self) -> Ranges:
        character = self._take()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return _complement(ranges) if character.isupper() else ranges
        if character in _CONTROLS and not (
            character == "0" and self._text[self._position : self._position + 1].isdigit()
        ):
            return [(_CONTROLS[character],) * 2]
        if character in "xu":
            match = _CODE[character].match(self._text, self._position)
            if match is None:
                raise self._error(f"an incomplete '\\{character}'")
            self._position = match.end()
            code = int(match[match.lastindex or 0], 16)
            low = _LOW_SURROGATE.match(self._text, self._position) if 0xD800 <= code < 0xDC00 else None
            if low is not None:
                self._position = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            if 0xD800 <= code < 0xE000 or code > _LAST:
                raise self._error("half of a surrogate pair")
            return [(code, code)]
        if character.isalnum():
            raise self._error(f"'\\{character}'")
        return [(ord(character),) * 2]
