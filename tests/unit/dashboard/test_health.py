"""Health in words: each cause is found by its evidence, and the first cause is the one that explains the others."""

import json
from dataclasses import replace

import pytest
from quire_dashboard.evidence import gather
from quire_dashboard.health import Evidence, Level, assess
from quire_dashboard.history import Ring
from quire_dashboard.scrape import parse
from quire_dashboard.snapshot_answer import Snapshot
from support.fake_triton import State

FINE = Evidence(engine_up=True, running=3, goodput={"default": 1.0}, kv_usage=0.4, ttft_p95=0.1, prefill_p95=0.05)


def causes(evidence: Evidence) -> list[str]:
    return [finding.cause for finding in assess(evidence).findings]


def test_all_is_well() -> None:
    health = assess(FINE)
    assert (health.level, health.headline, health.findings) == (Level.OK, "Users are served within their SLO.", ())


def test_idle_is_no_fault() -> None:
    assert assess(Evidence(engine_up=True)).headline == "The server is up and idle."


def test_a_server_that_is_away() -> None:
    health = assess(Evidence(server_error="http://127.0.0.1:8002/metrics cannot be read: nothing listens there"))
    assert health.level is Level.CRITICAL
    assert health.headline == "The server does not answer."
    assert "nothing listens there" in health.findings[0].detail


def test_a_server_without_a_model() -> None:
    assert causes(Evidence(has_model=False)) == ["no_model"]


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"engine_up": False}, "engine_down", "Nobody is being served"),
        ({"workers_down": ("1",)}, "worker_down", "rank 1 is down"),
        ({"restarts": 1.0}, "engine_restarts", "the engine was restarted"),
        ({"restarts": 4.0}, "engine_restarts", "again and again"),
        ({"preemptions": 12.0, "kv_usage": 0.99}, "kv_cache_full", "requests are preempted"),
        ({"waiting": 2.0, "kv_usage": 0.97}, "kv_cache_full", "the KV cache is full"),
        ({"rank_seconds": {"0": 0.01, "1": 0.03, "2": 0.01}}, "slow_rank", "rank 1 is slow"),
        ({"waiting": 5.0, "max_num_seqs": 3}, "queue", "requests wait in the queue"),
        ({"misses": {"ttft": 3.0}, "prefill_p95": 0.09}, "long_prompts", "long prompts"),
        ({"misses": {"rejected": 3.0}}, "rejections", "requests are rejected"),
        ({"misses": {"error": 3.0}}, "errors", "requests fail"),
        ({"misses": {"tpot": 3.0}, "step_seconds": {"schedule": 0.02, "execute": 0.01}, "prefill_p95": None},
         "host_bound", "scheduling"),
    ],
)  # fmt: skip
def test_each_cause_is_found_and_named(changes: dict[str, object], cause: str, words: str) -> None:
    evidence = replace(FINE, **changes)  # type: ignore[arg-type]
    assert causes(evidence) == [cause]
    assert words in assess(evidence).headline


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_usage": 0.99},  # full, but nobody waits for it
        {"rank_seconds": {"0": 0.01}},
        {"rank_seconds": {"0": 0.010, "1": 0.014}},
        {"waiting": 1.0, "max_num_seqs": 16},
        {"prefill_p95": 0.09},  # long prompts, but nothing is missed
        {"waiting_for_grammar": 0.0},
    ],
)
def test_what_hurts_nobody_is_no_finding(changes: dict[str, object]) -> None:
    assert causes(replace(FINE, **changes)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("good", "level"), [(0.995, Level.OK), (0.95, Level.WARNING), (0.5, Level.CRITICAL)])
def test_the_level_follows_the_worst_class(good: float, level: Level) -> None:
    assert assess(replace(FINE, goodput={"default": 1.0, "batch": good})).level is level


def test_missed_targets_without_a_cause_say_which() -> None:
    headline = assess(replace(FINE, goodput={"batch": 0.5}, misses={"tpot": 9.0, "e2e": 1.0}, prefill_p95=0.0)).headline
    assert headline == (
        "Users are affected: only 50% of the requests of class batch meet their SLO. Most of them miss the time per "
        "output token."
    )


def test_the_first_cause_explains_the_others() -> None:
    evidence = replace(
        FINE, goodput={"default": 0.4}, misses={"ttft": 60.0}, preemptions=30.0, kv_usage=1.0, waiting=20.0,
    )  # fmt: skip
    health = assess(evidence)
    assert [finding.cause for finding in health.findings][:2] == ["kv_cache_full", "queue"]
    assert health.headline.endswith("Likely cause: the KV cache is full and requests are preempted.")


def test_evidence_is_gathered_from_metrics_and_snapshot() -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.finish(30)
    state.finish(10, cause="ttft", ttft=0.9)
    state.finish(10, slo="batch", cause="e2e")
    state.add("preemptions_total", 7)
    state.set("requests_waiting", 4, reason="capacity")
    state.set("worker_up", 0, rank="0")
    ring.append(parse(state.metrics_text(), 1030.0))
    text = json.dumps(state.snapshot)
    evidence = gather(ring.view(), {"model": "tinypy"}, Snapshot.from_json(text))
    assert evidence.goodput == {"default": 0.75, "batch": 0.0}
    assert evidence.misses == {"ttft": 10.0, "e2e": 10.0}
    assert (evidence.preemptions, evidence.waiting, evidence.running) == (7.0, 4.0, 2.0)
    assert evidence.workers_down == ("0",)
    assert (evidence.max_num_seqs, evidence.mean_prompt_tokens) == (16, 100.0)
    assert evidence.ttft_p95 is not None
    assert 0.5 < evidence.ttft_p95 <= 1.0
    only_batch = gather(ring.view(), {"model": "tinypy"}, None, slo_class="batch")
    assert (only_batch.goodput, only_batch.misses) == ({"batch": 0.0}, {"e2e": 10.0})


def test_of_another_model_nothing_is_known() -> None:
    ring = Ring(10)
    ring.append(parse(State().metrics_text(), 0.0))
    assert not gather(ring.view(), {"model": "other"}, None).has_model
