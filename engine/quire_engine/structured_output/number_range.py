"""Numbers between bounds, as an expression of xgrammar's EBNF. It knows no JSON schema."""

from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from quire_engine.structured_output.pattern import any_of

MAX_DIGITS = 15
"""Digits of a bounded number, fraction included: two such decimals are never the same double, so a number is on the
same side of a bound when it is read as one."""

Bound = tuple[Decimal, bool]
"""A number, and whether it is excluded itself."""


def number_range(lowest: Bound | None, highest: Bound | None, *, is_integer: bool) -> str | None:
    """Decimals without exponent between two bounds; None if there are none.

    A fraction has as many digits as `MAX_DIGITS` leaves beside the integer digits of the longer bound.
    """
    if is_integer:
        lowest = lowest and (_whole(*lowest, ROUND_CEILING, 1), False)
        highest = highest and (_whole(*highest, ROUND_FLOOR, -1), False)
    num_integer_digits = max((len(_digits(abs(bound[0]))[0]) for bound in (lowest, highest) if bound), default=1)
    num_fraction_digits = 0 if is_integer else max(MAX_DIGITS - num_integer_digits, 0)
    positive = _Magnitudes(lowest, highest, num_fraction_digits).expression()
    negative = _Magnitudes(_negated(highest), _negated(lowest), num_fraction_digits).expression()
    return any_of([positive, negative and f'"-" {negative}'])


def _whole(value: Decimal, is_excluded: bool, rounding: str, step: int) -> Decimal:
    whole = Decimal(int(value.to_integral_value(rounding)))
    return whole + step if is_excluded and whole == value else whole


def _negated(bound: Bound | None) -> Bound | None:
    return bound and (-bound[0], bound[1])


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = format(value, "f").partition(".")
    return whole, fraction.rstrip("0")


class _Magnitudes:
    """Numbers ≥ 0 between two bounds, digit by digit.

    A bound is *tight* as long as all digits so far are its own; its remaining digits are passed on then, else None.
    """

    def __init__(self, lowest: Bound | None, highest: Bound | None, num_fraction_digits: int) -> None:
        zero = (Decimal(0), False)
        low, self._excludes_low = lowest if lowest and lowest[0] >= 0 else zero
        high, self._excludes_high = highest or zero
        self._is_empty = highest is not None and (high < 0 or low > high)
        self._low = _digits(low)
        self._high = None if highest is None else _digits(abs(high))
        self._num_fraction_digits = num_fraction_digits

    def expression(self) -> str | None:
        if self._is_empty:
            return None
        low, high = self._low[0], None if self._high is None else self._high[0]
        lengths = range(len(low), len(low if high is None else high) + 1)
        expressions = [
            self._integer(low if n == len(low) else None, high if n == len(high or "") else None, n, is_first=True)
            for n in lengths
        ]
        if high is None:
            expressions.append(f"[1-9] [0-9]{{{len(low)},}} {self._free_fraction()}")
        return any_of(expressions)

    def _integer(self, low: str | None, high: str | None, num_left: int, *, is_first: bool = False) -> str | None:
        """The last digits of the integer part, and the fraction."""
        if not num_left:
            fraction = self._fraction(
                None if low is None else self._low[1],
                None if high is None or self._high is None else self._high[1],
                self._num_fraction_digits,
            )
            point = fraction and f'"." {fraction}'
            if self._may_end(low is not None and self._low[1], high is not None and self._high and self._high[1]):
                return f"({point})?" if point else '""'
            return point
        first = 1 if is_first and num_left > 1 else 0
        if low is None and high is None:
            return f"[{first}-9] [0-9]{{{num_left - 1}}} {self._free_fraction()}"
        return self._next_digit(low, high, first, lambda low, high: self._integer(low, high, num_left - 1))

    def _fraction(self, low: str | None, high: str | None, num_left: int) -> str | None:
        """At least one further digit of the fraction."""
        if not num_left:
            return None
        if low == "" and not self._excludes_low:
            low = None
        if low is None and high is None:
            return f"[0-9]{{1,{num_left}}}"

        def rest(low: str | None, high: str | None) -> str | None:
            more = self._fraction(low, high, num_left - 1)
            if self._may_end(False if low is None else low, False if high is None else high):
                return f"({more})?" if more else '""'
            return more

        return self._next_digit(low, high, 0, rest)

    def _next_digit(
        self, low: str | None, high: str | None, first: int, rest: Callable[[str | None, str | None], str | None]
    ) -> str | None:
        smallest = first if low is None else int(low[:1] or "0")
        largest = 9 if high is None else int(high[:1] or "0")
        groups: dict[tuple[str | None, str | None], list[int]] = {}
        for digit in range(smallest, largest + 1):
            left_low = low[1:] if low is not None and digit == smallest else None
            left_high = high[1:] if high is not None and digit == largest else None
            groups.setdefault((left_low, left_high), []).append(digit)
        expressions = []
        for lefts, digits in groups.items():
            expression = rest(*lefts)
            expressions.append(expression and f"[{digits[0]}-{digits[-1]}] {expression}")
        return any_of(expressions)

    def _may_end(self, low: "str | bool | None", high: "str | bool | None") -> bool:
        """Whether nothing but zeros may follow. False: that bound is not tight."""
        is_above = not isinstance(low, str) or (low == "" and not self._excludes_low)
        return is_above and (not isinstance(high, str) or high != "" or not self._excludes_high)

    def _free_fraction(self) -> str:
        return f'("." [0-9]{{1,{self._num_fraction_digits}}})?' if self._num_fraction_digits else ""
