"""A run in numbers."""

import random

import numpy as np
import pytest
from quire_load.load import RequestRecord
from quire_load.report import Targets, parse_goodput, percentile, summarize
from quire_load.scrape import Scrape, parse
from quire_load.server_figures import difference
from support.fake_triton import MODEL, State


def record(ttft: float = 0.1, tpot: float = 0.02, tokens: int = 11, **values: object) -> RequestRecord:
    times = [1.0 + ttft + tpot * i for i in range(tokens)]
    made = RequestRecord(scheduled_s=1.0, sent_s=1.0, token_times_s=times, ended_s=times[-1], num_input_tokens=20,
                         num_output_tokens=tokens)  # fmt: skip
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_numpy_s() -> None:
    values = [random.Random(0).gauss(0, 1) for _ in range(37)]
    for q in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, q) == pytest.approx(np.percentile(values, 100 * q))
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None


def test_a_report_has_vllm_s_keys() -> None:
    report = summarize([record(ttft=0.1), record(ttft=0.3), record(error_kind="timeout", error="late")])
    values = report.as_dict([50, 99.9])
    assert report.duration == pytest.approx(1.5)
    assert values["request_throughput"] == pytest.approx(2 / 1.5)
    assert values["output_throughput"] == pytest.approx(22 / 1.5)
    assert (values["completed"], values["failed"], values["errors"]) == (2, 1, {"timeout": 1})
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (40, 22)
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["std_ttft_ms"] == pytest.approx(100)
    assert values["p99.9_ttft_ms"] == pytest.approx(299.8)
    assert values["median_tpot_ms"] == pytest.approx(20)
    assert values["p50_itl_ms"] == pytest.approx(20)
    assert values["mean_e2el_ms"] == pytest.approx(400)


def test_of_nothing_there_are_no_figures() -> None:
    values = summarize([]).as_dict([99])
    assert (values["completed"], values["request_throughput"]) == (0, 0.0)
    assert values["mean_ttft_ms"] is values["p99_itl_ms"] is None


def test_goodput_is_judged_by_class() -> None:
    records = [
        record(ttft=0.1, slo_class="chat"), record(ttft=0.3, slo_class="chat"), record(tpot=0.2, slo_class="batch"),
        record(slo_class="batch", error_kind="rejected"),
    ]  # fmt: skip
    report = summarize(records, parse_goodput(["chat=ttft:200,tpot:50", "tpot:300"]))
    assert [(one.slo_class, one.num_good, one.num_requests) for one in report.goodput] == [
        ("batch", 1, 2),
        ("chat", 1, 2),
    ]
    values = report.as_dict([99])
    assert values["request_goodput"] == pytest.approx(2 / report.duration)
    assert values["goodput"]["chat"]["good"] == 1


def test_a_target_is_still_met_at_its_time() -> None:
    assert Targets(ttft=100.0).are_met(record(ttft=0.1 - 1e-12))
    assert not Targets(ttft=99.0).are_met(record(ttft=0.1))
    assert not Targets(e2el=299.0).are_met(record())
    assert Targets(tpot=1.0).are_met(record(tokens=1))


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:x", "itl:5", "chat=", "ttft:5,", "ttft:nan", ""])
def test_bad_targets_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"goodput is .* ttft, tpot, e2el"):
        parse_goodput([text])


def reading(state: State) -> Scrape:
    return parse(state.metrics_text(), 0.0)


def test_the_server_s_figures_are_those_of_the_run_alone() -> None:
    state = State()
    state.finish(50, ttft=9.0)
    before = reading(state)
    state.finish(8, ttft=0.07)
    state.finish(2, cause="ttft", ttft=0.2)
    figures = difference(before, reading(state), MODEL)
    ttft = figures.histograms["ttft"]
    assert (ttft.count, ttft.total) == (10, pytest.approx(8 * 0.07 + 2 * 0.2))
    assert ttft.percentile_ms(0.5) == pytest.approx(50 + 50 * 5 / 8)
    assert figures.verdicts == {"default": {"good": 8, "miss": 2}}
    values = figures.as_dict([99])
    assert values["num_ttft"] == 10
    assert values["mean_ttft_ms"] == pytest.approx(96)
    assert difference(before, before, MODEL).as_dict([99])["median_ttft_ms"] is None
    assert difference(before, reading(state), "another").histograms["ttft"].count == 0
