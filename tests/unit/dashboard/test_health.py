"""Health in words: each cause is found by its evidence, and the first cause is the one that explains the others."""

import json
import re
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs
from quire_client.health_details import HealthDetails, Host, Problem
from quire_client.snapshot import Snapshot
from quire_client.symptoms import Level
from quire_dashboard.evidence import Evidence, Window, gather
from quire_dashboard.findings import SLO_EXAMPLE
from quire_dashboard.health import assess
from quire_dashboard.history import Ring
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


def test_an_engine_that_sleeps_is_not_sick() -> None:
    """Nor are the clients whose requests it rejects."""
    state, ring = State(), Ring(100)
    for second, awake in ((1000.0, 1.0), (1010.0, 0.0)):
        state.set("engine_sleep_state", awake, sleep_state="awake")
        state.add("requests_total", 30, outcome="rejected")
        ring.append(parse(state.metrics_text(), second))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    health = assess(evidence)
    assert evidence.is_sleeping
    assert (health.level, health.headline) == (Level.OK, "The engine sleeps: an operator has freed its memory.")
    assert [finding.cause for finding in health.findings if finding.cause != "no_slo"] == ["asleep"]
    assert "quire model wake" in health.findings[0].detail


def test_while_no_request_ends_nobody_is_said_to_be_served() -> None:
    headline = assess(replace(FINE, goodput={}, server_restarts=(2.0,))).headline
    assert headline == "No request has ended in the last minute, and: the server was started again."


def test_a_server_that_is_away() -> None:
    health = assess(Evidence(server_error="http://127.0.0.1:8002/metrics cannot be read: nothing listens there"))
    assert health.level is Level.CRITICAL
    assert health.headline == "The server does not answer."
    assert "nothing listens there" in health.findings[0].detail


def test_metrics_that_are_away_are_not_the_server() -> None:
    health = assess(Evidence(server_error="no answer within 3 s", only_metrics_away=True, server_restarts=(5.0,)))
    assert health.level is Level.WARNING
    assert health.headline == "The server answers, but its metrics cannot be read."
    assert "no answer within 3 s" in health.findings[0].detail


@pytest.mark.parametrize(
    ("restarts", "headline"),
    [
        ((15.0,), "The server dies again and again."),
        ((15.0, 40.0), "The server dies again and again."),
        ((61.0,), "The server does not answer."),
    ],
)
def test_a_server_that_is_away_soon_after_its_start_dies_again_and_again(
    restarts: tuple[float, ...], headline: str
) -> None:
    health = assess(Evidence(server_error="nothing listens there", server_restarts=restarts))
    assert (health.level, health.headline) == (Level.CRITICAL, headline)
    assert "nothing listens there" in health.findings[0].detail


def test_a_loop_goes_on_for_half_as_long_again_as_its_last_round() -> None:
    assert causes(replace(FINE, server_restarts=(149.0, 249.0))) == ["server_restarts"]
    assert causes(replace(FINE, server_restarts=(151.0, 251.0))) == []


def test_a_server_without_a_model() -> None:
    assert causes(Evidence(has_model=False)) == ["no_model"]


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"engine_up": False, "one_down": True}, "engine_down", "Nobody is being served"),
        ({"one_down": True}, "one_down", "one of the model's engines is down"),
        ({"workers_down": ("1",)}, "worker_down", "rank 1 is down"),
        ({"server_restarts": (5.0,)}, "server_restarts", "the server was started again"),
        ({"server_restarts": (2.0, 20.0)}, "server_restarts", "the server dies again and again"),
        ({"restarts": (5.0,)}, "engine_restarts", "the engine was restarted"),
        ({"restarts": (20.0, 40.0, 60.0)}, "engine_restarts", "again and again"),
        ({"preemptions": 12.0, "kv_usage": 0.99}, "kv_cache_full", "requests are preempted"),
        ({"preemptions": 12.0, "kv_usage": 0.6}, "kv_cache_full", "requests are preempted for want of blocks"),
        ({"waiting": 2.0, "kv_usage": 0.97}, "kv_cache_full", "the KV cache is full"),
        ({"rank_seconds": {"0": 0.01, "1": 0.03, "2": 0.01}}, "slow_rank", "rank 1 is slow"),
        ({"waiting": 5.0, "max_num_seqs": 3}, "queue", "requests wait in the queue"),
        ({"misses": {"ttft": 3.0}, "prefill_p95": 0.09, "mean_prompt_tokens": 1500.0}, "long_prompts", "long prompts"),
        ({"misses": {"rejected": 3.0}}, "rejections", "requests are rejected"),
        ({"misses": {"error": 3.0}}, "errors", "requests fail"),
        ({"invalid": 9.0, "ended": 40.0}, "invalid", "a client sends invalid requests"),
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
        {"restarts": (9.0,)},  # it explains nothing of now
        {"restarts": (40.0, 50.0, 60.0)},  # a loop that is over: it has lived for longer than between them
        {"server_restarts": (40.0, 60.0)},
        {"invalid": 4.0, "ended": 4.0},  # somebody tries things out
        {"invalid": 9.0, "ended": 400.0},
        {"waiting_for_grammar": 0.0},
    ],
)
def test_what_hurts_nobody_is_no_finding(changes: dict[str, object]) -> None:
    assert causes(replace(FINE, **changes)) == []  # type: ignore[arg-type]


def test_each_class_is_judged_by_its_own_objective() -> None:
    modest = replace(FINE, goodput={"batch": 0.93, "default": 0.995}, objectives={"batch": 0.9, "default": 0.99})
    assert assess(modest).level is Level.OK
    strict = replace(modest, objectives={"batch": 0.9, "default": 0.999})
    assert assess(strict).level is Level.WARNING
    assert "only 100% of" not in assess(strict).headline
    assert "of class default" in assess(strict).headline


@pytest.mark.parametrize(("good", "level"), [(0.995, Level.OK), (0.95, Level.WARNING), (0.5, Level.CRITICAL)])
def test_the_level_follows_the_worst_class(good: float, level: Level) -> None:
    assert assess(replace(FINE, goodput={"default": 1.0, "batch": good})).level is level


WAS_BAD = replace(
    FINE, goodput={"default": 0.5}, misses={"ttft": 30.0, "rejected": 9.0, "error": 9.0}, preemptions=9.0, ended=60.0,
    invalid=20.0, mean_prompt_tokens=1500.0, prefill_p95=0.09, step_seconds={"schedule": 0.02, "execute": 0.01},
)  # fmt: skip
"""Of the last minute."""


def test_what_is_over_is_not_said_to_be_although_the_last_minute_has_it() -> None:
    assert len(causes(WAS_BAD)) > 3
    health = assess(replace(WAS_BAD, recent=Window(goodput={"default": 1.0}, ended=30.0)))
    headline = (
        "Users are served within their SLO again; of the requests of class default in the last minute only 50% were."
    )
    assert (health.level, health.headline, health.findings) == (Level.OK, headline, ())


def test_a_finding_names_the_figures_by_which_it_ends() -> None:
    recent = Window(seconds=30.0, goodput={"default": 0.5}, misses={"rejected": 2.0, "error": 1.0}, preemptions=4.0,
                    ended=20.0, invalid=7.0)  # fmt: skip
    details = {one.cause: one.detail for one in assess(replace(WAS_BAD, recent=recent)).findings}
    for cause, figure in (
        ("rejections", "2 in the last 30 s"), ("errors", "1 in the last 30 s"), ("invalid", "7 of 20 in the last 30 s"),
        ("kv_cache_full", "4 preemption(s) in the last 30 s"),
    ):  # fmt: skip
        assert figure in details[cause]


def headlines(*changes: dict[str, object]) -> list[str]:
    """One verdict after the other."""
    standing: tuple[str, ...] = ()
    found = []
    for change in changes:
        health = assess(replace(FINE, **change), standing)  # type: ignore[arg-type]
        standing = health.standing
        found.append(re.sub(r"\d+(\.\d+)?%", "N%", health.headline))
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"goodput": {"default": 0.988}}, {"goodput": {"default": 0.992}}),
        ({"goodput": {"a": 0.80, "b": 0.81}}, {"goodput": {"a": 0.81, "b": 0.80}}),
        ({"goodput": {"default": 0.5}, "waiting": 2.0, "kv_usage": 0.96},
         {"goodput": {"default": 0.5}, "waiting": 2.0, "kv_usage": 0.94}),
        ({"waiting": 1.2, "max_num_seqs": 3}, {"waiting": 0.8, "max_num_seqs": 3}),
        ({"waiting": 2.0, "max_num_seqs": 3}, {"waiting": 2.0, "max_num_seqs": 3, "running": 2.5}),
        ({"waiting_for_grammar": 1.1}, {"waiting_for_grammar": 0.9}),
        ({"misses": {"tpot": 3.0}, "prefill_p95": None, "step_seconds": {"schedule": 0.011, "execute": 0.01}},
         {"misses": {"tpot": 3.0}, "prefill_p95": None, "step_seconds": {"schedule": 0.009, "execute": 0.01}}),
    ],
    ids=["objective", "worst class", "full cache", "queue", "places", "grammar", "host"],
)  # fmt: skip
def test_the_headline_does_not_flip_while_a_figure_swings_about_a_limit(
    one: dict[str, object], other: dict[str, object]
) -> None:
    found = headlines(one, other, one, other)
    assert len(set(found)) == 1, found
    assert found[0] != "Users are served within their SLO."


def test_a_level_does_not_flip_either_and_ends_with_what_it_is_about() -> None:
    standing: tuple[str, ...] = ()
    levels = []
    for share in (0.85, 0.87, 0.95, 0.988, 0.992, 0.995):
        health = assess(replace(FINE, goodput={"default": share}), standing)
        standing = health.standing
        levels.append(health.level)
    critical, warning = Level.CRITICAL, Level.WARNING
    assert levels == [critical, critical, warning, warning, warning, Level.OK]


def test_a_short_history_says_how_short_it_is_and_believes_the_servers_own_minute() -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    ring.append(parse(state.metrics_text(), 1002.0))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert assess(evidence).headline == "The server is up; no request has ended in the last 2 s."
    for slo, ratio in (("default", 0.25), ("batch", 1.0)):
        state.set("goodput_ratio", ratio, slo=slo, window="1m")
        state.set("goodput_ratio", 0.9, slo=slo, window="5m")
    ring.append(parse(state.metrics_text(), 1004.0))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert evidence.goodput == {"default": 0.25}
    assert "only 25% of the requests of class default" in assess(evidence).headline
    ring.append(parse(state.metrics_text(), 1064.0))
    assert gather(ring.view(), {"model": "tinypy"}, None).goodput == {}, "the own minute counts"


def test_while_no_request_ends_what_was_bad_may_go_on() -> None:
    stuck = replace(WAS_BAD, recent=Window())
    assert assess(stuck).level is Level.CRITICAL
    assert "only 50%" in assess(stuck).headline
    assert assess(replace(stuck, running=0.0)).level is Level.OK


def test_a_short_time_alone_does_not_make_users_affected() -> None:
    """A single request that missed a moment ago, of very many."""
    assert assess(replace(FINE, goodput={"default": 0.995}, recent=Window(goodput={"default": 0.9}))).level is Level.OK


@pytest.mark.parametrize(
    ("missed", "ended", "level"), [(1, 20, Level.OK), (2, 40, Level.WARNING), (1, 2, Level.CRITICAL)]
)
def test_a_single_miss_among_many_is_chance(missed: int, ended: int, level: Level) -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.finish(missed, cause="ttft")
    state.finish(ended - missed)
    ring.append(parse(state.metrics_text(), 1010.0))
    assert assess(gather(ring.view(), {"model": "tinypy"}, None)).level is level


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
        ("slow_rank", {"rank_seconds": {"0": 1.0, "1": 2.1}}, {"rank_seconds": {"0": 1.0, "1": 1.8}},
         {"rank_seconds": {"0": 1.0, "1": 1.6}}),
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


@pytest.mark.parametrize(
    ("max_num_seqs", "found"), [(16, ["long_prompts", "queue"]), (3, ["queue"])], ids=["room", "no room"]
)
def test_who_waits_though_there_is_room_waits_for_the_prefill_of_others(max_num_seqs: int, found: list[str]) -> None:
    evidence = replace(
        FINE, misses={"ttft": 9.0}, queue_p95=0.06, prefill_p95=0.04, mean_prompt_tokens=1500.0, waiting=5.0,
        max_num_seqs=max_num_seqs,
    )  # fmt: skip
    assert causes(evidence) == found


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
    assert evidence.server_restarts == (30.0, 370.0)


def test_a_restart_is_seen_after_more_than_a_minute_without_readings() -> None:
    state, ring = State(), Ring(10)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.set("server_start_time_seconds", 1100.0)
    ring.append(parse(state.metrics_text(), 1120.0))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert "the server was started again" in assess(evidence).headline


def test_restarts_of_the_engine_are_seen_one_by_one() -> None:
    state, ring = State(), Ring(1000)
    for time in range(0, 700, 2):
        state.set("engine_restarts_total", (time > 50) + (time > 500) + (time > 690))
        ring.append(parse(state.metrics_text(), float(time)))
    assert gather(ring.view(), {"model": "tinypy"}, None).restarts == (6.0, 196.0)


def test_a_replica_that_was_removed_is_not_one_that_is_down() -> None:
    state, ring = State(), Ring(10)
    found = []
    for time, up in enumerate((None, 1, 0, None)):
        of_second = "" if up is None else f'quire_engine_up{{model="tinypy",version="1",engine="1"}} {up}\n'
        ring.append(parse(state.metrics_text() + of_second, 1000.0 + time))
        found.append(causes(gather(ring.view(), {"model": "tinypy"}, None)))
    assert found == [[], [], ["one_down"], []]


def test_what_the_last_half_minute_has_is_told_apart() -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.finish(10, cause="ttft", ttft=0.9)
    state.add("preemptions_total", 7)
    for time in (1002.0, 1032.0):
        ring.append(parse(state.metrics_text(), time))
    state.finish(10)
    ring.append(parse(state.metrics_text(), 1034.0))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert (evidence.goodput, evidence.preemptions) == ({"default": 0.5}, 7.0)
    assert evidence.recent is not None
    assert (evidence.recent.goodput, evidence.recent.preemptions) == ({"default": 1.0}, 0.0)
    assert evidence.recent.ttft_p95 is not None
    assert evidence.recent.ttft_p95 < 0.1
    assert assess(evidence).level is Level.OK


def test_requests_that_are_late_now_are_misses_now_however_long_they_have_waited() -> None:
    state, ring = State(), Ring(100)
    for time in range(0, 130, 2):
        if time < 10:
            state.finish(10)
        if time >= 20:
            state.set("requests_overdue", 136, slo="default", target="ttft")
            state.set("requests_overdue", 5, slo="batch", target="tpot")  # these may still make up for it
            state.set("requests_waiting", 136, reason="held")
        ring.append(parse(state.metrics_text(), 1000.0 + time))
        verdict = assess(gather(ring.view(), {"model": "tinypy"}, None))
        if time >= 20:
            assert (verdict.level, "served within" in verdict.headline) == (Level.CRITICAL, False), verdict.headline
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert (evidence.goodput, evidence.held) == ({"default": 0.0}, 136.0)


def test_who_is_refused_for_want_of_room_has_sent_nothing_invalid() -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.finish(10)
    state.finish(8, cause="rejected")
    state.add("requests_total", 6, outcome="rejected")  # which is not judged
    ring.append(parse(state.metrics_text(), 1010.0))
    evidence = gather(ring.view(), {"model": "tinypy"}, None)
    assert (evidence.ended, evidence.invalid, evidence.misses) == (24.0, 6.0, {"rejected": 8.0})


def test_a_rank_is_slow_while_it_computes_and_no_longer() -> None:
    state, ring = State(), Ring(100)
    for rank in ("0", "1"):
        state.set("worker_busy_seconds_total", 0.0, rank=rank)
    for time in range(0, 40, 2):
        if time <= 20:
            for rank, seconds in (("0", 0.1), ("1", 0.1 if time < 10 else 0.5)):
                state.add("worker_busy_seconds_total", seconds, rank=rank)
            for _ in range(10):
                state.observe("step_seconds", 0.05, phase="execute")
        ring.append(parse(state.metrics_text(), float(time)))
        found = gather(ring.view(), {"model": "tinypy"}, None).rank_seconds
        if time == 8:
            assert found == pytest.approx({"0": 0.01, "1": 0.01})
        if time == 20:
            assert found == pytest.approx({"0": 0.01, "1": 0.05})
    assert found == {}


def test_what_waits_for_a_moment_is_no_queue() -> None:
    state, ring = State(), Ring(100)
    for time, waiting in enumerate((0, 0, 0, 0, 8)):
        state.set("requests_waiting", waiting, reason="queue")
        ring.append(parse(state.metrics_text(), 2.0 * time))
    assert gather(ring.view(), {"model": "tinypy"}, None).waiting == pytest.approx(1.6)


def test_evidence_is_gathered_from_metrics_and_snapshot() -> None:
    state, ring = State(), Ring(100)
    ring.append(parse(state.metrics_text(), 1000.0))
    state.finish(30)
    state.finish(10, cause="ttft", ttft=0.9)
    state.finish(10, slo="batch", cause="e2e")
    state.add("preemptions_total", 7)
    state.set("requests_waiting", 4, reason="queue")
    state.set("worker_up", 0, rank="0")
    ring.append(parse(state.metrics_text(), 1030.0))
    text = json.dumps(state.snapshot)
    evidence = gather(ring.view(), {"model": "tinypy"}, msgspec.json.decode(text, type=Snapshot))
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


# -- what `quire serve` knows ------------------------------------------------------------------------------------------

BUSY = Host(cpus=2, cpus_of_others=1.4, cpu_pressure=0.8, busiest="make (process 7)")


def test_what_ended_an_engine_or_the_server_is_said() -> None:
    for changes in (
        {"engine_up": False, "engine_death": "killed by SIGKILL"},
        {"one_down": True, "engine_death": "killed by SIGKILL"},
        {"restarts": (2.0,), "engine_death": "killed by SIGKILL"},
        {"server_restarts": (2.0,), "server_death": "killed by SIGKILL"},
        {"server_error": "nothing listens there", "server_death": "killed by SIGKILL"},
        {"server_error": "nothing listens there", "server_restarts": (2.0,), "server_death": "killed by SIGKILL"},
        {"server_error": "nothing listens there", "problems": ("killed by SIGKILL",)},
    ):  # fmt: skip
        finding = assess(replace(FINE, **changes)).findings[0]  # type: ignore[arg-type]
        assert "Killed by SIGKILL." in finding.detail, changes
        assert ".." not in finding.detail
        assert "  " not in finding.detail


def test_of_several_engines_it_says_which() -> None:
    assert assess(replace(FINE, one_down=True, engines_down=("1",))).findings[0].title == "Engine 1 is down"
    restarted = replace(FINE, restarts=(2.0,), engines_restarted=("0", "2"))
    assert assess(restarted).findings[0].title == "Engine 0, 2 was restarted"


def test_what_quire_serve_sees_is_a_problem_though_the_metrics_look_well() -> None:
    health = assess(replace(FINE, goodput={}, problems=("the stub process 7 of model 'm' has been stopped (SIGSTOP)",)))
    assert (health.level, health.findings[0].cause) == (Level.CRITICAL, "not_served")
    assert "The stub process 7 of model 'm' has been stopped" in health.findings[0].detail
    down = replace(FINE, engine_up=False, problems=("model 'm' version 1: killed",))
    assert causes(down) == ["engine_down"], "which says it already"


def test_a_neighbour_that_takes_the_cpus_is_named_while_requests_are_served() -> None:
    missed = replace(FINE, misses={"ttft": 3.0}, waiting=5.0, max_num_seqs=3)
    found = assess(replace(missed, host=BUSY)).findings
    assert [finding.cause for finding in found] == ["host_cpu", "queue"]
    assert "make (process 7) the most, use 1.4 of 2 CPUs" in found[0].detail
    unfelt = assess(replace(FINE, host=BUSY))
    headline = "Users are served within their SLO, but: other processes take the host's CPUs."
    assert (unfelt.level, unfelt.headline) == (Level.WARNING, headline)
    assert causes(replace(FINE, running=0.0, host=BUSY)) == [], "it serves no request"
    failing = replace(FINE, misses={"error": 3.0}, host=BUSY)
    assert causes(failing) == ["errors", "host_cpu"], "CPUs do not explain errors"
    assert causes(replace(missed, host=structs.replace(BUSY, cpus_of_others=0.3))) == ["queue"], "the server's own load"
    assert causes(replace(missed, host=structs.replace(BUSY, cpu_pressure=0.2))) == ["queue"], "there is room for both"
    ends = replace(missed, host=structs.replace(BUSY, cpu_pressure=0.45))
    assert [[one.cause for one in assess(ends, standing).findings] for standing in ((), ("host_cpu",))] == [
        ["queue"], ["host_cpu", "queue"],
    ]  # fmt: skip
    assert causes(replace(missed, waiting=0.0, host=Host(memory_pressure=0.2))) == ["host_memory"]
    assert causes(replace(missed, host=Host(cpus=0, cpus_of_others=1.0))) == ["queue"]


def test_evidence_has_what_quire_serve_reports_of_the_model() -> None:
    state, ring = State(), Ring(100)
    for time_, up in ((1000.0, 1), (1010.0, 0)):
        for engine in ("0", "1"):
            state.set("engine_up", up if engine == "1" else 1, engine=engine)
            state.set("engine_restarts_total", 1 if engine == "1" and not up else 0, engine=engine)
        ring.append(parse(state.metrics_text(), time_))
    killed = Problem(problem="model 'tinypy' version 1: engine 1: killed; it is being started again", since=9e9)
    report = HealthDetails(problems=("model 'other' version 1: x", "y"), history=(killed,), host=BUSY)
    evidence = gather(ring.view(), {"model": "tinypy"}, None, report=report)
    assert (evidence.engines_down, evidence.engines_restarted) == (("1",), ("1",))
    assert (evidence.engine_death, evidence.server_death, evidence.problems) == ("engine 1: killed", "", ("y",))
    assert evidence.host == BUSY
    assert gather(ring.view(), {"model": "tinypy"}, None).host == Host()


# -- over within ten seconds -------------------------------------------------------------------------------------------


def verdicts_after(misses_per_reading: int, readings: int, every: int = 1) -> list[bool]:
    """Whether users are affected, at each reading after so many with misses in every so many of them, while requests go
    on well."""
    state, ring, found = State(), Ring(100), []
    standing: tuple[str, ...] = ()
    for number in range(readings + 15):
        state.finish(20)
        if number < readings and number % every == 0:
            state.finish(misses_per_reading, cause="ttft", ttft=3.0)
        ring.append(parse(state.metrics_text(), 1000.0 + 2 * number))
        health = assess(gather(ring.view(), {"model": "tinypy"}, None), standing)
        standing = health.standing
        if number >= readings:
            found.append(health.level is not Level.OK)
    return found


@pytest.mark.parametrize(("misses", "readings"), [(10, 20), (1, 20), (4, 2), (30, 2)])
def test_what_happened_often_is_over_three_readings_after_it_has_ended(misses: int, readings: int) -> None:
    affected = verdicts_after(misses, readings)
    assert 1 <= affected.count(True) <= 4
    assert affected == sorted(affected, reverse=True), "it comes back"


def test_what_happens_now_and_then_is_not_over_as_soon() -> None:
    affected = verdicts_after(2, 21, every=4)
    assert 5 <= affected.count(True) <= 7, "one and a half times the gaps of eight seconds"
    assert affected == sorted(affected, reverse=True)


def test_invalid_requests_are_over_by_their_own_pace() -> None:
    state, ring, found = State(), Ring(100), []
    for number in range(30):
        state.finish(4)
        if number % 5 == 0:
            state.finish(2, cause="ttft", ttft=3.0)
        if 10 <= number < 14:
            state.add("requests_total", 8, outcome="rejected")
        ring.append(parse(state.metrics_text(), 1000.0 + 2 * number))
        found.append(
            "invalid" in [one.cause for one in assess(gather(ring.view(), {"model": "tinypy"}, None)).findings]
        )
    assert found[10:14] == [True] * 4
    assert not any(found[:10] + found[18:])


def test_a_restart_is_over_within_ten_seconds() -> None:
    state, ring, found = State(), Ring(100), []
    for number in range(20):
        state.set("server_start_time_seconds", 1.0 if number < 5 else 2.0)
        state.set("engine_restarts_total", 0 if number < 5 else 1)
        ring.append(parse(state.metrics_text(), 1000.0 + 2 * number))
        found.append([one.cause for one in assess(gather(ring.view(), {"model": "tinypy"}, None)).findings])
    assert found[5] == ["server_restarts", "engine_restarts"]
    assert not any(found[:5] + found[9:])


def test_requests_that_were_lost_with_a_server_are_over_with_its_restart() -> None:
    state, ring, found = State(), Ring(100), []
    standing: tuple[str, ...] = ()
    for number in range(20):
        state.finish(3)
        if number == 5:
            state.set("server_start_time_seconds", 2e9)
            state.finish(4, cause="error")
        ring.append(parse(state.metrics_text(), 1000.0 + 2 * number))
        health = assess(gather(ring.view(), {"model": "tinypy"}, None), standing)
        standing = health.standing
        found.append(health.level is not Level.OK)
    assert found == [False] * 5 + [True] * 4 + [False] * 11
