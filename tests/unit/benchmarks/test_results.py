"""From runs to medians, ratios and a table."""

from dataclasses import replace

import pytest
from benchmarks.harness.engines import Engine, Run
from benchmarks.harness.results import make_rows, markdown_table, our_ratio, rates_by_round, spread, summary

OURS = Engine(name="ours", label="Ours", script="", variant="", precision="bf16")
OURS_INT8 = Engine(name="ours-int8", label="Ours, int8", script="", variant="", precision="int8")
PEER = Engine(name="peer", label="A peer", script="", variant="", precision="bf16", peer="peer")
PEER_INT8 = Engine(name="peer-int8", label="A peer, int8", script="", variant="", precision="int8", peer="peer")

RUN = Run(
    engine="ours", version="1.2", model="m400", workload="mixed", seconds=10.0, requests=64, input_tokens=9000,
    output_tokens=1000, load_seconds=1.0, ready_seconds=2.0, peak_memory_bytes=2**30,
)  # fmt: skip


def runs(engine: str, rates: list[float], **fields: object) -> list[Run]:
    """One run per round with the given output tokens per second."""
    return [
        replace(RUN, engine=engine, seconds=RUN.output_tokens / rate, round=number, **fields)
        for number, rate in enumerate(rates)
    ]


def test_spread_is_median_and_extremes() -> None:
    assert (spread([3.0, 1.0, 2.0, 10.0]).median, spread([3.0, 1.0]).low, spread([3.0, 1.0]).high) == (2.5, 1.0, 3.0)


def test_repeats_of_a_round_count_as_one() -> None:
    repeated = [*runs("ours", [100.0]), *runs("ours", [120.0]), *runs("ours", [500.0])]
    assert rates_by_round(repeated, "ours", "mixed") == {0: pytest.approx(120.0)}


def test_ratios_are_taken_within_a_round() -> None:
    """The machine became ten times as slow in the second round, and in each we were twice as fast."""
    ratio = our_ratio([*runs("ours", [200.0, 20.0]), *runs("peer", [100.0, 10.0])], "ours", "peer", "mixed")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_round_that_only_one_finished_is_no_ratio() -> None:
    both = [*runs("ours", [200.0]), *runs("peer", [100.0, 1.0])]
    ratio = our_ratio(both, "ours", "peer", "mixed")
    assert ratio is not None
    assert ratio.high == pytest.approx(2.0)
    assert our_ratio(both, "ours", "nobody", "mixed") is None


def test_a_peer_is_compared_with_ours_of_its_precision() -> None:
    measured = [*runs("ours", [100.0]), *runs("ours-int8", [300.0]), *runs("peer", [50.0]), *runs("peer-int8", [60.0])]
    rows = make_rows([OURS, OURS_INT8, PEER, PEER_INT8], measured, "m400")
    assert [row.label for row in rows] == ["Ours", "Ours, int8", "A peer", "A peer, int8"]
    assert [row.ratios.get("64 requests") and round(row.ratios["64 requests"].median, 6) for row in rows] == [
        None, None, 2.0, 5.0,
    ]  # fmt: skip


def test_our_first_engine_of_a_precision_that_ran_is_the_one_to_compare_with() -> None:
    absent, second = replace(OURS, name="absent"), replace(OURS, name="second")
    measured = [*runs("ours", [100.0]), *runs("second", [80.0]), *runs("peer", [50.0])]
    rows = make_rows([absent, OURS, second, PEER], measured, "m400")
    assert [row.ratios and round(row.ratios["64 requests"].median, 6) for row in rows] == [{}, 1.25, 2.0]


def test_engines_without_runs_of_the_model_have_no_row() -> None:
    assert make_rows([OURS, PEER], [*runs("ours", [1.0]), *runs("peer", [1.0], model="s60")], "m400")[1:] == []


def test_without_ours_there_are_no_ratios() -> None:
    (row,) = make_rows([PEER], runs("peer", [50.0]), "m400")
    assert row.ratios == {}


def test_summary_has_a_median_per_workload() -> None:
    of_one = [*runs("ours", [1000.0, 3000.0, 1200.0]), *runs("ours", [50.0], workload="one_stream", requests=1)]
    assert summary(of_one) == "64 requests 1,200 tok/s, one stream 50 tok/s"


def test_table() -> None:
    measured = [*runs("ours", [1234.0, 1234.0]), *runs("peer", [617.0, 1234.0])]
    measured += runs("peer", [40.0, 60.0], workload="one_stream")
    assert markdown_table(make_rows([OURS, PEER], measured, "m400")) == (
        "| engine | version | 64 requests, tok/s | ours ÷ it | one stream, tok/s | ours ÷ it "
        "| ready in | peak memory |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| **Ours** | 1.2 | 1,234 | 1 | - | 1 | 2.0 s | 1,024 MiB |\n"
        "| A peer | 1.2 | 926 | 1.50 (1.00 to 2.00) | 50 | - | 2.0 s | 1,024 MiB |\n"
    )
