"""Health in words: each cause is found by its evidence, and the first cause is the one that explains the others."""

import json
from dataclasses import replace

import pytest
from quire_dashboard.evidence import gather
from quire_dashboard.health import SLO_EXAMPLE, Evidence, Level, assess
from quire_dashboard.history import Ring
from quire_dashboard.snapshot_answer import Snapshot
from quire_load.scrape import parse
from support.fake_triton import State

FINE = Evidence(engine_up=True, running=3, goodput={"default": 1.0}, kv_usage=0.4, ttft_p95=0.1, prefill_p95=0.05,
                max_num_batched_tokens=2048, has_slo=True)  # fmt: skip


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
        ({"engine_up": False, "one_down": True}, "engine_down", "Nobody is being served"),
        ({"one_down": True}, "one_down", "one of the model's engines is down"),
        ({"workers_down": ("1",)}, "worker_down", "rank 1 is down"),
        ({"server_restarts": 1.0, "recent_server_restarts": 1.0}, "server_restarts", "the server was started again"),
        ({"server_restarts": 4.0}, "server_restarts", "the server dies again and again"),
        ({"restarts": 1.0, "recent_restarts": 1.0}, "engine_restarts", "the engine was restarted"),
        ({"restarts": 4.0}, "engine_restarts", "again and again"),
        ({"preemptions": 12.0, "kv_usage": 0.99}, "kv_cache_full", "requests are preempted"),
        ({"preemptions": 12.0, "kv_usage": 0.6}, "kv_cache_full", "requests are preempted for want of blocks"),
        ({"waiting": 2.0, "kv_usage": 0.97}, "kv_cache_full", "the KV cache is full"),
        ({"rank_seconds": {"0": 0.01, "1": 0.03, "2": 0.01}}, "slow_rank", "rank 1 is slow"),
        ({"waiting": 5.0, "max_num_seqs": 3}, "queue", "requests wait in the queue"),
        ({"misses": {"ttft": 3.0}, "prefill_p95": 0.09, "mean_prompt_tokens": 1500.0}, "long_prompts", "long prompts"),
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
        {"prefill_p95": 0.09, "mean_prompt_tokens": 1500.0},  # long prompts, but nothing is missed
        {"misses": {"ttft": 3.0}, "prefill_p95": 0.09, "mean_prompt_tokens": 144.0},  # prefill, but of no long prompts
        {"restarts": 1.0},  # some minutes ago: it explains nothing of now
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


@pytest.mark.parametrize(
    ("cause", "found", "stays", "over"),
    [
        ("kv_cache_full", {"waiting": 2.0, "kv_usage": 0.96}, {"waiting": 2.0, "kv_usage": 0.9},
         {"waiting": 2.0, "kv_usage": 0.8}),
        ("slow_rank", {"rank_seconds": {"0": 1.0, "1": 1.6}}, {"rank_seconds": {"0": 1.0, "1": 1.4}},
         {"rank_seconds": {"0": 1.0, "1": 1.2}}),
        ("queue", {"waiting": 5.0}, {"waiting": 3.0}, {"waiting": 1.0}),
    ],
)  # fmt: skip
def test_a_finding_stays_until_it_is_clearly_over(
    cause: str, found: dict[str, object], stays: dict[str, object], over: dict[str, object]
) -> None:
    def causes_of(changes: dict[str, object], *standing: str) -> list[str]:
        return [one.cause for one in assess(replace(FINE, **changes), standing).findings]  # type: ignore[arg-type]

    assert cause in causes_of(found)
    assert cause not in causes_of(stays)
    assert cause in causes_of(stays, cause)
    assert cause not in causes_of(over, cause)


def test_a_cache_is_only_called_full_when_it_is() -> None:
    for usage, full in ((0.52, False), (0.67, False), (0.96, True)):
        (finding,) = assess(replace(FINE, preemptions=9.0, kv_usage=usage, kv_usage_peak=0.99)).findings
        assert ("full" in finding.title) is full
        for figure in (f"{usage:.0%}", "99% at most", "9 preemption(s)"):
            assert figure in finding.detail


def test_findings_do_not_contradict_each_other() -> None:
    evidence = replace(FINE, preemptions=9.0, kv_usage=0.97, waiting=20.0, max_num_seqs=3)
    advice = {finding.cause: finding.detail for finding in assess(evidence).findings}
    assert "lower max_num_seqs" in advice["kv_cache_full"]
    assert "max_num_seqs" not in advice["queue"]
    assert "20 wait" in advice["queue"]


def test_without_an_slo_nobody_is_said_to_be_served_within_it() -> None:
    health = assess(replace(FINE, has_slo=False))
    assert health.level is Level.OK
    assert health.headline.startswith("No SLO is set")
    assert json.loads("{" + SLO_EXAMPLE + "}")["slo"]
    assert SLO_EXAMPLE in health.findings[0].detail
    assert "their SLO" not in assess(replace(FINE, has_slo=False, waiting=9.0)).headline
    assert assess(replace(FINE, has_slo=False, goodput={"default": 0.5})).headline == (
        "Users are affected: only 50% of the requests end without an error."
    )


def test_restarts_of_the_server_are_counted_over_the_gaps_between() -> None:
    state, ring = State(), Ring(1000)
    for time in range(0, 700, 10):
        state.set("server_start_time_seconds", 1.0 + (time > 300) + (time > 310) + (time > 650))
        text = state.metrics_text() if time != 310 else ""
        ring.append(parse(text, float(time)))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert (evidence.server_restarts, evidence.recent_server_restarts) == (2, 1)


def test_what_waits_for_a_moment_is_no_queue() -> None:
    state, ring = State(), Ring(100)
    for time, waiting in enumerate((0, 0, 0, 0, 8)):
        state.set("requests_waiting", waiting, reason="capacity")
        ring.append(parse(state.metrics_text(), 2.0 * time))
    assert gather(ring.view(), {"model": "tinypy"}, None).waiting == pytest.approx(1.6)


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
