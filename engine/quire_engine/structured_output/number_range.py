"""Numbers between bounds, as an expression of xgrammar's EBNF. It knows no JSON schema."""

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
    positive = _magnitudes(lowest, highest, num_fraction_digits)
    negative = _magnitudes(_negated(highest), _negated(lowest), num_fraction_digits)
    return any_of([positive, negative and f'"-" {negative}'])


def _whole(value: Decimal, is_excluded: bool, rounding: str, step: int) -> Decimal:
    whole = Decimal(int(value.to_integral_value(rounding)))
    return whole + step if is_excluded and whole == value else whole


def _negated(bound: Bound | None) -> Bound | None:
    return bound and (-bound[0], bound[1])


def _digits(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = format(value, "f").partition(".")
    return whole, fraction.rstrip("0")


def _magnitudes(lowest: Bound | None, highest: Bound | None, num_fraction_digits: int) -> str | None:
    """Numbers ≥ 0 between two bounds, digit by digit; None if there are none.

    A bound is *tight* as long as all digits so far are its own; its remaining digits are passed on then, else None.
    """
    low, excludes_low = lowest if lowest and lowest[0] >= 0 else (Decimal(0), False)
    high, excludes_high = highest or (Decimal(0), False)
    if highest is not None and (high < 0 or low > high):
        return None
    low_whole, low_fraction = _digits(low)
    high_whole, high_fraction = ("", "") if highest is None else _digits(abs(high))
    free_fraction = f'("." [0-9]{{1,{num_fraction_digits}}})?' if num_fraction_digits else ""

    def after(count: int, size: int, low: str | None, high: str | None) -> str | None:
        """What may follow so many digits of a number with `size` digits before the point."""
        is_whole = count < size
        if low == "" and not is_whole and not excludes_low:
            low = None
        first = 1 if count == 0 and size > 1 else 0
        num_left = size + num_fraction_digits - count
        more: str | None = None
        if low is None and high is None and is_whole:
            more = f"[{first}-9] [0-9]{{{size - count - 1}}} {free_fraction}"
        elif low is None and high is None and num_left:
            more = f"[0-9]{{1,{num_left}}}"
        elif num_left:
            smallest = first if low is None else int(low[:1] or "0")
            largest = 9 if high is None else int(high[:1] or "0")
            groups: dict[tuple[str | None, str | None], list[int]] = {}
            for digit in range(smallest, largest + 1):
                left_low = low[1:] if low is not None and digit == smallest else None
                left_high = high[1:] if high is not None and digit == largest else None
                groups.setdefault((left_low, left_high), []).append(digit)
            rests = {lefts: after(count + 1, size, *lefts) for lefts in groups}
            more = any_of(rest and f"[{groups[lefts][0]}-{groups[lefts][-1]}] {rest}" for lefts, rest in rests.items())
        if count == size and more:
            more = f'"." {more}'
        may_end = not is_whole and low is None and (high != "" or not excludes_high)
        return (f"({more})?" if more else '""') if may_end else more

    expressions = [
        after(
            0, size, low_whole + low_fraction if size == len(low_whole) else None,
            high_whole + high_fraction if size == len(high_whole) else None,
        )
        for size in range(len(low_whole), (len(high_whole) or len(low_whole)) + 1)
    ]  # fmt: skip
    if highest is None:
        expressions.append(f"[1-9] [0-9]{{{len(low_whole)},}} {free_fraction}")
    return any_of(expressions)
