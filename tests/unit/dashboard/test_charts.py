"""What Vega, which draws in the browser, makes of the specifications: the words at the axes."""

import math
import re
from typing import Any

import pyarrow as pa
import pytest
import vl_convert
from quire_dashboard.charts import NUMBERS, SECONDS, SHARES, chart_table, line_spec, stacked_spec

NOW = 1_700_000_000.0
MINUTE = NOW - 60, NOW


def words(spec: dict[str, Any], table: pa.Table) -> list[str]:
    """All texts of the drawn chart but the times."""
    rows = [row | {"time": 1000 * row["time"].timestamp()} for row in table.to_pylist()]
    drawn = vl_convert.vegalite_to_svg({"data": {"values": rows}, "width": 600, "height": 220, **spec})
    found: list[str] = re.findall("<text[^>]*>([^<]*)</text>", drawn)
    assert any(re.fullmatch(r"\d\d:\d\d:\d\d", word) for word in found), "the time axis has words, whatever there is"
    return [word for word in found if not re.fullmatch(r"\d\d:\d\d:\d\d", word)]


def line(*values: float) -> pa.Table:
    times = [NOW - 10 * number for number in range(len(values))]
    return chart_table(times, ["a"] * len(values), values, MINUTE)


@pytest.mark.parametrize(
    ("axis", "highest", "expected"),
    [
        (NUMBERS, 0.1, ["0", "0.02", "0.04", "0.06", "0.08", "0.1"]),  # not "100m"
        (NUMBERS, 2000, ["0", "500", "1k", "1.5k", "2k"]),
        (SECONDS, 0.0005, ["0", "100 µs", "200 µs", "300 µs", "400 µs", "500 µs"]),
        (SECONDS, 0.1, ["0", "20 ms", "40 ms", "60 ms", "80 ms", "100 ms"]),  # not "0.02"
        (SECONDS, 10, ["0", "2 s", "4 s", "6 s", "8 s", "10 s"]),
        (SHARES, 1, ["0%", "20%", "40%", "60%", "80%", "100%"]),
    ],
)
def test_numbers_at_the_axis_are_as_one_says_them(axis: str, highest: float, expected: list[str]) -> None:
    assert words(line_spec("unit", axis=axis), line(highest, 0)) == [*expected, "unit", "a"]


def test_a_chart_without_figures_has_its_axes() -> None:
    """As on a server that was just started: no "NaN", and the times."""
    for spec in line_spec("unit", axis=SECONDS), line_spec("unit", rules={"target": 1}), stacked_spec("unit", ["a"]):
        assert "NaN" not in words(spec, line())


def test_what_is_not_known_is_no_number() -> None:
    assert line(1.0, math.nan)["value"].to_pylist()[:2] == [1.0, None]
