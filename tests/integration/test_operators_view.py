"""What an operator sees of a real run, in Prometheus, Grafana and the dashboard, is what the clients measured.

The run itself is in `support.operators_run`: 24 streams on a server with blocks for half of what they want.
"""

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from quire_dashboard import queries
from quire_monitoring import grafana
from quire_monitoring.definitions import MetricKind, make_metrics
from support.measured_load import Measured
from support.operators_run import MODEL, NUM_SEQS, SCRAPE_SECONDS, SLO, OperatorsRun, operators_run
from support.prometheus import Sample

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("default")]  # those of Streamlit and pandas are not ours

BUCKETS = {metric.name: metric.buckets for metric in make_metrics() if metric.kind is MetricKind.HISTOGRAM}
TTFT, E2E = "quire_time_to_first_token_seconds", "quire_e2e_request_latency_seconds"
NO_DATA = {
    "Error of predicted times to first token": 'only scheduling_policy "slo" predicts, and here none does',
    "Busiest expert and rank": "the model is no mixture of experts",
    "Images of prompts": "the model takes none",
    "Encoding an image": "the same",
    "Tokens of experts by rank": "the same",
    "Tokens of the ten busiest experts": "the same",
}
"""Panels of Grafana whose metrics this run does not fill."""
ALL_ZERO = {
    "Asleep": "no engine sleeps in this run",
    "Restarts, last hour": "no engine dies in this run",
    "Restarts": "the same",
    "What restarts take": "the same",
    "States": "no layer of the model is recurrent",
}
"""Panels of Grafana whose queries have data that never differs from 0."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorsRun]:
    with operators_run(tmp_path_factory.mktemp("run")) as result:
        yield result


def grown(seen: OperatorsRun, selector: str, by: str) -> dict[str, float]:
    """How much counters grew over the measured part of the run, by the values of a label."""
    expression = f"sum by ({by}) ({selector} @ {seen.end:.3f}) - sum by ({by}) ({selector} @ {seen.start:.3f})"
    return {sample.labels.get(by, ""): sample.values[0] for sample in seen.prometheus.query(expression, seen.end)}


def finite(samples: Sequence[Sample]) -> list[float]:
    return [value for sample in samples for value in sample.values if math.isfinite(value)]


def percentile(values: Sequence[float], q: float) -> float:
    """The value at rank q, as a histogram would give it without buckets."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def assert_agrees(metric: str, value: float, expected: float) -> None:
    """Within one bucket: a histogram knows no more."""
    own, expected_bucket = (bisect_left(BUCKETS[metric], number) for number in (value, expected))
    assert abs(own - expected_bucket) <= 1, f"{metric}: {value} instead of {expected}"


# -- the run ----------------------------------------------------------------------------------------------------------


def test_the_load_was_too_much_for_the_cache(seen: OperatorsRun) -> None:
    over = f"[{math.ceil(seen.end - seen.start)}s]"
    # Some fifteen samples, each of one step: none need be of the fullest.
    assert 0.5 < seen.prometheus.value(f"max_over_time(quire_kv_cache_usage_ratio{over})", seen.end) <= 1
    running = seen.prometheus.value(f"max_over_time(quire_requests_running{over})", seen.end)
    assert NUM_SEQS / 2 <= running <= NUM_SEQS
    preemptions = sum(one.perf["num_preemptions"] for one in seen.answered)
    assert preemptions > 0
    (counted,) = grown(seen, "quire_preemptions_total", "").values()
    # One that ends at a stop string does not hear of the step that is computed meanwhile.
    assert preemptions <= counted <= preemptions + sum(one.finish_reason == "stop" for one in seen.answered)


def test_drafts_are_counted_as_the_requests_were_told(seen: OperatorsRun) -> None:
    """Requests that end at a stop string do not hear of the step that is computed meanwhile."""
    told = Counter[str]()
    for one in seen.answered:
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            told[name] += one.perf[f"num_{name}"]
    assert told["draft_tokens"] > told["accepted_tokens"] > 0
    counted, unheard = {}, sum(one.finish_reason == "stop" for one in seen.answered)
    for name, number in told.items():
        (counted[name],) = grown(seen, f"quire_spec_decode_{name}_total", "").values()
        most_of_a_step = 1 if name == "drafts" else 2  # num_speculative_tokens
        assert number <= counted[name] <= number + unheard * most_of_a_step, name
        assert grown(seen, f"vllm:spec_decode_num_{name}_total", "") == {"": counted[name]}
    by_place = grown(seen, "quire_spec_decode_accepted_tokens_per_pos_total", "position")
    assert by_place.keys() == {"0", "1"}
    assert sum(by_place.values()) == counted["accepted_tokens"]


# -- Grafana and the rules --------------------------------------------------------------------------------------------


def expanded(expression: str, model: str, slo: str) -> str:
    """With the variables as Grafana replaces them; a rate looks back over four scrapes, at least."""
    picked = {"job": ".+", "instance": ".+", "model": model, "slo": slo}
    for name, value in (*picked.items(), ("__rate_interval", f"{4 * SCRAPE_SECONDS:.0f}s")):
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize("dashboard", grafana.DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_query_of_grafana_has_data(seen: OperatorsRun, dashboard: grafana.Dashboard) -> None:
    wrong = []
    for panel in (panel for row in dashboard.rows for panel in row.panels if panel.title not in NO_DATA):
        for query, legend in panel.queries:
            if "quire_request_encode_time_seconds" in query:  # of models that take images
                continue
            for picked in ((".*", ".*"), (MODEL, "default"), (MODEL, "(batch|default)")):
                samples = seen.prometheus.query_range(expanded(query, *picked), seen.began, seen.end, SCRAPE_SECONDS)
                values = finite(samples)
                if not values or any(values) == (panel.title in ALL_ZERO):
                    wrong.append(f"{panel.title}: {query} has {values[:5]}")
                named = set(re.findall(r"{{(\w+)}}", legend))
                missing = {name for sample in samples for name in named - set(sample.labels)}
                wrong += [f"{panel.title}: {query} has no {name} for its legend" for name in missing]
    assert not wrong, "\n".join(wrong)


def test_grafanas_variables_offer_what_there_is(seen: OperatorsRun) -> None:
    found = {}
    for query in (query for query in grafana.queries(grafana.DASHBOARDS[0]) if query.startswith("label_values")):
        match = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", query)
        assert match is not None, query
        assert finite(seen.prometheus.query(expanded(match[1] + (match[2] or ""), ".+", ".+"), seen.end)), query
        found[match[3]] = seen.prometheus.label_values(match[1], match[3])
    assert len(found.pop("job")) == len(found.pop("instance")) == 1
    assert found == {"model": [MODEL], "slo": sorted(SLO)}


def test_every_recording_rule_has_data_and_every_rule_is_healthy(seen: OperatorsRun) -> None:
    rules = seen.prometheus.rules()
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert len(recorded) > 20
    assert [name for name in recorded if not finite(seen.prometheus.query(name, seen.end))] == []


# -- the dashboard ----------------------------------------------------------------------------------------------------

NUM_CHARTS = {"overview": 10, "kv_cache": 4, "requests": 1, "engine": 9, "playground": 0, "load": 3}
NUM_TABLES = {"kv_cache": 2, "requests": 1, "engine": 2}


@pytest.mark.parametrize("page", NUM_CHARTS)
@pytest.mark.parametrize("history", ["own", "prometheus"])
def test_every_panel_of_the_dashboard_has_data(seen: OperatorsRun, history: str, page: str) -> None:
    shown = seen.pages[history, page]
    assert len(shown.charts) == NUM_CHARTS[page], set(shown.charts)
    for title, lines in shown.charts.items():
        for line, values in lines.items():
            assert values, f"{title}: {line} has no values"
            assert all(map(math.isfinite, values)), f"{title}: {line} has {values}"
        is_quiet = title == "Restarts and replays"  # as in Grafana
        assert any(itertools.chain(*lines.values())) != is_quiet, f"{title}: {lines}"
    assert [label for label, figure in shown.figures.items() if "—" in figure] == []
    assert len(shown.figures) >= {"requests": 0}.get(page, 5)
    assert len(shown.num_rows) == NUM_TABLES.get(page, 0)
    assert all(shown.num_rows)
    for said in ("Nothing yet", "cannot be seen", "does not answer", "No request", "refuses"):
        assert said not in shown.text


def test_the_dashboard_says_why_users_wait(seen: OperatorsRun) -> None:
    """All three causes are there; which one leads depends on how fast the machine computes."""
    causes = "the KV cache is (nearly )?full|requests are preempted for want of blocks|requests wait in the queue"
    for history in ("own", "prometheus"):
        cause = rf"Likely cause\\: ({causes})"
        assert re.search(cause, seen.pages[history, "overview"].text), seen.pages[history, "overview"].text
        assert "64 blocks: " in seen.pages[history, "kv_cache"].text


# -- percentiles ------------------------------------------------------------------------------------------------------

SAID = {TTFT: "time_to_first_token_seconds", E2E: "e2e_seconds"}
"""Fields of the responses' performance metrics."""


@pytest.mark.parametrize("q", [0.5, 0.95])
@pytest.mark.parametrize("metric", SAID)
def test_percentiles_are_those_that_the_responses_said(seen: OperatorsRun, metric: str, q: float) -> None:
    """In Prometheus, by the queries of Grafana and of the dashboard; and by the dashboard's own history.

    A client sees each of them later, by as much as the machine has else to do; see the last test here.
    """
    expected = percentile([one.perf[SAID[metric]] for one in seen.answered], q)
    whole = f"{math.ceil(seen.end - seen.start)}s"
    of_grafana = f"histogram_quantile({q}, sum by (model, le) (rate({metric}_bucket[{whole}])))"
    found = {"Prometheus": seen.prometheus.value(of_grafana, seen.end)}
    query, labels = queries.Quantile(name=metric, q=q), {"model": MODEL}
    found["Prometheus, exactly"] = seen.prometheus.value(
        f"histogram_quantile({q}, sum by (le) ({metric}_bucket - {metric}_bucket @ {seen.start:.3f}))", seen.end
    )
    view = seen.monitors["own"].view()
    first, last = view.row_at(seen.start), view.row_at(seen.end)
    (found["own history"],) = query.values(view, labels, first, last).values()
    of_dashboard = query.promql(labels, math.ceil(seen.end - seen.start))
    found["the dashboard, of Prometheus"] = seen.prometheus.value(of_dashboard, seen.end)
    print(f"{metric} p{100 * q:.0f}: {expected:.3f} s, {found}")
    for value in found.values():
        assert_agrees(metric, value, expected)
    # Of the same counts, the dashboard computes the same number as Prometheus.
    assert found["own history"] == pytest.approx(found["Prometheus, exactly"], rel=1e-9)


@pytest.mark.parametrize(
    ("metric", "of"),
    [
        (TTFT, "time_to_first_token_seconds"), ("quire_time_per_output_token_seconds", "time_per_output_token_seconds"),
        (E2E, "e2e_seconds"), ("quire_request_queue_time_seconds", "queue_seconds"),
        ("quire_request_prefill_time_seconds", "prefill_seconds"),
        ("quire_request_decode_time_seconds", "decode_seconds"), ("quire_request_prompt_tokens", "num_prompt_tokens"),
        ("quire_request_generation_tokens", "num_output_tokens"),
    ],
)  # fmt: skip
def test_histograms_hold_exactly_what_the_responses_said(seen: OperatorsRun, metric: str, of: str) -> None:
    values = [one.perf[of] for one in seen.answered if one.perf[of] is not None]
    counts = grown(seen, f"{metric}_bucket", "le")
    assert {bound: count for bound, count in counts.items() if bound != "+Inf"} == {
        f"{bound:g}": sum(value <= bound for value in values) for bound in BUCKETS[metric]
    }
    assert counts["+Inf"] == len(values)
    assert grown(seen, f"{metric}_sum", "")[""] == pytest.approx(sum(values))


# -- counts -----------------------------------------------------------------------------------------------------------


def test_tokens_and_requests_are_counted_exactly(seen: OperatorsRun) -> None:
    answered = seen.answered
    assert all(one.num_tokens == one.perf["num_output_tokens"] for one in answered)
    for name, expected in {
        "generation_tokens": sum(one.num_tokens for one in answered),
        "prompt_tokens": sum(one.num_prompt_tokens for one in answered),
        "prompt_tokens_cached": sum(one.perf["num_cached_tokens"] for one in answered),
    }.items():
        assert grown(seen, f"quire_{name}_total", "") == {"": expected}
        assert grown(seen, f"vllm:{name}_total", "") == {"": expected}
    outcomes = Counter(one.finish_reason for one in answered)
    assert set(outcomes) == {"stop", "length"}
    outcomes["rejected"] = len(seen.load) - len(answered)
    assert outcomes["rejected"] > 0
    assert grown(seen, "quire_requests_total", "outcome") == {"abort": 0, "error": 0, **outcomes}
    assert [one.error.split(":")[0] for one in seen.early[:2]] == ["deadline"] * 2
    early = seen.prometheus.query("sum by (outcome) (quire_requests_total)", seen.start)
    assert {sample.labels["outcome"]: sample.values[0] for sample in early} == {
        "stop": 0, "length": 0, "abort": 1, "error": 2, "rejected": 1,
    }  # fmt: skip


def verdicts_of(measured: Sequence[Measured], causes: dict[str, str]) -> Counter[tuple[str, str, str]]:
    """(class, verdict, cause) → requests; without an answer, the cause is told by the beginning of the error."""
    found: Counter[tuple[str, str, str]] = Counter()
    for one in measured:
        if not one.error:
            found[one.perf["slo_class"], one.perf["slo_verdict"], one.perf["slo_cause"]] += 1
        elif one.error.split(":")[0] in causes:
            found[one.slo_class, "miss", causes[one.error.split(":")[0]]] += 1
    return found


def test_goodput_is_exactly_what_the_responses_said(seen: OperatorsRun) -> None:
    counted = {
        (sample.labels["slo"], sample.labels["verdict"], sample.labels["cause"]): sample.values[0]
        for sample in seen.prometheus.query("quire_slo_requests_total > 0", seen.end)
    }
    expected = verdicts_of([*seen.early, *seen.load], {"unavailable": "rejected", "deadline": "error"})
    print(f"verdicts: {dict(expected)}, counted: {counted}")
    # One that was rejected or failed when its time had passed already was a miss then, of that cause.
    answered = verdicts_of([*seen.early, *seen.load], {})
    others, expected_others = Counter(counted) - answered, expected - answered
    assert Counter(counted) >= answered
    for slo_class in SLO:
        assert sum(others[key] for key in others if key[0] == slo_class) == sum(
            expected_others[key] for key in expected_others if key[0] == slo_class
        )
    for key in others:
        assert key[2] in ("ttft", "e2e") or others[key] <= expected_others[key], key
    assert {verdict for _, verdict, _ in expected} == {"good", "miss"}
    assert {cause for _, _, cause in expected} == {"none", "ttft", "tpot", "e2e", "rejected", "error"}
    tokens = Counter[str]()
    for one in seen.answered:
        tokens[one.perf["slo_class"]] += one.num_tokens * (one.perf["slo_verdict"] == "good")
    assert grown(seen, "quire_goodput_tokens_total", "slo") == tokens
    for slo_class in SLO:
        of_class = {key: count for key, count in expected.items() if key[0] == slo_class}
        ratio = of_class[slo_class, "good", "none"] / sum(of_class.values())
        last = seen.prometheus.value(f'quire_goodput_ratio{{slo="{slo_class}", window="5m"}}', seen.end)
        assert last == pytest.approx(ratio)


def test_verdicts_follow_from_the_times_and_no_client_sees_it_otherwise(seen: OperatorsRun) -> None:
    for one in seen.answered:
        own = {name.removeprefix("slo_"): float(ms) for name, ms in one.parameters.items() if name != "slo_class"}
        limits = {name.removesuffix("_ms"): ms / 1000 for name, ms in {**SLO[one.slo_class], **own}.items()}
        ttft, e2e = one.perf["time_to_first_token_seconds"], one.perf["e2e_seconds"]
        times = {"ttft": ttft, "tpot": one.perf["time_per_output_token_seconds"] or 0.0, "e2e": e2e}
        missed = {name for name, limit in limits.items() if times[name] > limit}
        assert one.perf["slo_verdict"] == ("miss" if missed else "good"), one
        assert one.perf["slo_cause"] in (missed or {"none"}), one
        # A client's times are the server's and the way: what was in time for the client was in time.
        assert one.ttft_seconds is not None
        assert ttft <= one.ttft_seconds
        assert e2e <= one.e2e_seconds
