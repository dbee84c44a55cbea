"""The arithmetic of the benchmark of speculative decoding."""

import pytest
from benchmarks.harness.drafting import Batch, Cell, Figures, count_differing, count_wrong, judge, table
from benchmarks.harness.results import Spread


def batch(
    seconds: float,
    prompt_seconds: float = 1.0,
    last: int = 3,
    drafts: tuple[int, int, int] = (0, 0, 0),
    process: int = 0,
) -> Batch:
    return Batch(
        prompt_seconds=prompt_seconds, seconds=seconds, outputs=[[1, 2, 3, 4, 5], [1, 2, 3, 4, last]],
        num_drafts=drafts[0], num_draft_tokens=drafts[1], num_accepted_tokens=drafts[2], process=process,
    )  # fmt: skip


FIGURES = Figures(
    off=[batch(4.0), batch(6.0), batch(5.0)],
    on=[batch(2.0, drafts=(2, 14, 5)), batch(2.0, drafts=(1, 3, 3)), batch(5.0, last=9, drafts=(1, 1, 0))],
)


def cell(workload: str = "copy", streams: int = 1, method: str = "suffix", acceptance: str = "exact") -> Cell:
    return Cell("m400", "bf16", workload, streams, method, acceptance)


def figures(ratio: float) -> Figures:
    return Figures(off=[batch(ratio)], on=[batch(1.0)])


def test_rates_are_medians_and_ratios_are_within_rounds() -> None:
    assert FIGURES.num_tokens == 10
    assert (FIGURES.off_rate, FIGURES.on_rate) == (2.0, 5.0)
    assert FIGURES.ratio == Spread(2.0, 1.0, 3.0)
    assert FIGURES.ratio_with_prompt == Spread(5 / 3, 1.0, 7 / 3)


def test_processes_are_compared_by_their_medians() -> None:
    own = Figures()
    for process, ratios in enumerate([(1.0, 1.1, 9.0), (2.0, 2.2), (0.5,)]):
        more = Figures([batch(ratio, 0.0, process=process) for ratio in ratios], [batch(1.0, 0.0)] * len(ratios))
        own.add(more)
    assert own.ratio == own.ratio_with_prompt == Spread(1.1, 0.5, 2.1)


def test_acceptance() -> None:
    assert FIGURES.acceptance_length == 1 + 8 / 4
    assert FIGURES.tokens_per_step == 30 / 22
    assert figures(1.0).acceptance_length is None
    assert figures(1.0).tokens_per_step == 1.0


def test_differing_tokens_are_counted() -> None:
    assert FIGURES.num_differing == 1
    assert count_differing([[1, 2, 3], []], [[1, 9, 3, 4, 5], [1]]) == 4
    assert count_differing([[1, 2, 3]], [[1, 2, 3]]) == 0
    with pytest.raises(ValueError, match="zip"):
        count_differing([[1]], [])


def test_other_tokens_are_wrong_only_where_drafts_are_accepted_exactly() -> None:
    assert count_wrong({cell(): FIGURES, cell("chat"): FIGURES}) == 2
    assert count_wrong({cell(method="eagle3", acceptance="rejection"): FIGURES}) == 0


def test_table() -> None:
    rejection = cell("files_sampled", 4, "eagle3", "rejection")
    lines = table({cell(): FIGURES, cell("chat", 16, "ngram"): figures(1.5), rejection: FIGURES}).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| copy | 1 | suffix | 2.0 | 5.0 | 2.00 [1.00, 3.00] | 1.67 | 3.00 | 1.36 | 1 |"
    assert lines[3] == "| chat | 16 | ngram | 6.7 | 10.0 | 1.50 [1.50, 1.50] | 1.25 | - | 1.00 | 0 |"
    assert lines[4].startswith("| files_sampled | 4 | eagle3, rejection | 2.0 |")
    assert lines[4].endswith(" 3.00 | 1.36 | - |")


@pytest.mark.parametrize(
    ("where", "bar"),
    [
        (cell(), 2.5),
        (cell(method="ngram"), 1.8),
        (cell("random", 64), 0.97),
        (cell("greedy", 4, "other"), 0.97),
    ],
)
def test_bars_are_met_or_missed(where: Cell, bar: float) -> None:
    (met,) = judge({where: figures(bar + 0.001)})
    (missed,) = judge({where: figures(bar - 0.001)})
    assert met.startswith("met: ")
    assert missed.startswith("MISSED: ")
    assert f"at least {bar}" in missed


@pytest.mark.parametrize("where", [cell(streams=4), cell("chat"), cell("walk"), cell(method="other")])
def test_other_cells_have_no_bar(where: Cell) -> None:
    assert judge({where: figures(0.1)}) == []
