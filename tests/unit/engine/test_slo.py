"""Objectives: classes from settings, targets of a request, verdicts."""

from typing import Any

import pytest
from quire_engine.config import EngineConfig
from quire_engine.errors import RequestError
from quire_engine.slo import RequestSLO, SLOTargets, SLOVerdict, judge, parse_classes, resolve

CLASSES = parse_classes({"default": {"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 10_000}, "batch": {"e2e_ms": 60_000}})


def verdict_on(targets: SLOTargets, ttft: float | None, tpot: float | None, e2e: float, tokens: int = 11) -> SLOVerdict:
    return judge(
        targets,
        e2e_seconds=e2e,
        time_to_first_token_seconds=ttft,
        time_per_output_token_seconds=tpot,
        decode_seconds=(tpot or 0.0) * (tokens - 1),
    )


def test_settings_hold_classes() -> None:
    settings = {"model": "/m", "slo": {"batch": {"e2e_ms": 60_000.5}}}
    assert EngineConfig.from_settings(settings).frontend.slo == {
        "default": SLOTargets(), "batch": SLOTargets(e2e_ms=60_000.5),
    }  # fmt: skip
    assert EngineConfig.from_settings({"model": "/m"}).frontend.slo == {"default": SLOTargets()}


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ([], "slo is"),
        ({"a b": {}}, "is no name of a class"),
        ({"x" * 65: {}}, "is no name of a class"),
        ({"": {}}, "is no name of a class"),
        ({"batch": 5}, "class 'batch' is 5; it must be an object of ttft_ms, tpot_ms, e2e_ms"),
        ({"batch": {"ttft": 5}}, "class 'batch' is"),
        ({"batch": {"ttft_ms": 0}}, "class 'batch': ttft_ms is 0; it must be a number of milliseconds above 0"),
        ({"batch": {"e2e_ms": "5"}}, "class 'batch': e2e_ms is '5'"),
        ({"batch": {"tpot_ms": True}}, "class 'batch': tpot_ms is True"),
        ({"batch": {"tpot_ms": float("nan")}}, "class 'batch': tpot_ms is nan"),
        ({str(i): {} for i in range(101)}, "slo holds 101 classes"),
    ],
)
def test_bad_classes_are_refused_by_name(slo: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_settings({"model": "/m", "slo": slo})


def test_targets_of_a_request_take_the_place_of_its_class_one_by_one() -> None:
    assert resolve(CLASSES, RequestSLO()) == CLASSES["default"]
    assert resolve(CLASSES, RequestSLO(slo_class="batch")) == SLOTargets(e2e_ms=60_000)
    own = RequestSLO(slo_class="batch", ttft_ms=20, e2e_ms=1)
    assert resolve(CLASSES, own) == SLOTargets(ttft_ms=20, e2e_ms=1)


@pytest.mark.parametrize(
    ("slo", "parameter"),
    [
        (RequestSLO(slo_class="gold"), "slo_class"),
        (RequestSLO(slo_class="x" * 100_000), "slo_class"),
        (RequestSLO(ttft_ms=0), "slo_ttft_ms"),
        (RequestSLO(tpot_ms=float("nan")), "slo_tpot_ms"),
        (RequestSLO(e2e_ms=float("inf")), "slo_e2e_ms"),
    ],
)
def test_what_is_not_a_class_or_a_time_is_refused_by_name(slo: RequestSLO, parameter: str) -> None:
    with pytest.raises(RequestError, match=f"^{parameter} is ") as caught:
        resolve(CLASSES, slo)
    assert caught.value.parameter == parameter
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("ttft", "tpot", "e2e", "cause"),
    [
        (0.5, 0.05, 10.0, "none"),  # as long as it may take is good
        (0.501, 0.01, 1.0, "ttft"),
        (0.1, 0.051, 1.0, "tpot"),
        (0.1, 0.01, 10.1, "e2e"),
        (0.6, 0.06, 11.0, "ttft"),  # 0.5 s, before 1.1 s and 10 s
        (None, None, 11.0, "ttft"),  # it ended without a token
        (None, None, 0.1, "none"),
        (0.1, None, 0.2, "none"),
    ],
)
def test_verdict(ttft: float | None, tpot: float | None, e2e: float, cause: str) -> None:
    assert verdict_on(CLASSES["default"], ttft, tpot, e2e) == SLOVerdict(good=cause == "none", cause=cause)


def test_first_cause_is_the_target_whose_time_was_up_first() -> None:
    targets = SLOTargets(ttft_ms=3000, tpot_ms=100, e2e_ms=2000)
    # The first token came at 1 s; ten more at 0.1 s each would have taken until 2 s, nine until 1.9 s.
    assert verdict_on(targets, 1.0, 0.2, 4.0, tokens=12).cause == "e2e"
    assert verdict_on(targets, 1.0, 0.2, 4.0, tokens=10).cause == "tpot"
    assert verdict_on(targets, 3.5, 0.2, 6.0, tokens=10).cause == "e2e"


def test_without_targets_whatever_finishes_is_good() -> None:
    assert verdict_on(SLOTargets(), 1e6, 1e6, 1e9) == SLOVerdict(good=True)


@pytest.mark.parametrize("objective", [0, 1, -0.5, 99, True, "0.99", float("nan")])
def test_an_objective_is_a_share(objective: object) -> None:
    with pytest.raises(ValueError, match=r"objective is .*; it must be a share between 0 and 1"):
        parse_classes({"batch": {"objective": objective}})


def test_a_requests_own_targets_leave_the_rest_of_its_class() -> None:
    classes = parse_classes({"batch": {"e2e_ms": 5, "objective": 0.9, "on_overload": "best_effort"}})
    targets = resolve(classes, RequestSLO(slo_class="batch", ttft_ms=20))
    assert (targets.objective, targets.on_overload, targets.seconds()) == (
        0.9,
        "best_effort",
        {"ttft": 0.02, "e2e": 0.005},
    )


def test_the_end_to_end_target_alone_applies_to_a_request_without_output_tokens() -> None:
    classes = {"default": SLOTargets(ttft_ms=50, tpot_ms=5, e2e_ms=100)}
    assert resolve(classes, RequestSLO(), has_output_tokens=False) == SLOTargets(e2e_ms=100)
    assert resolve(classes, RequestSLO(e2e_ms=7), has_output_tokens=False) == SLOTargets(e2e_ms=7)
    with pytest.raises(RequestError, match=r"^slo_ttft_ms is 9; a request without output tokens"):
        resolve(classes, RequestSLO(ttft_ms=9), has_output_tokens=False)
