"""The ring of ended requests: what is kept, and what an asker gets who has seen some of it."""

import json
from pathlib import Path

import msgspec
import pytest
from quire_engine.errors import RequestError
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.slo import SLOTargets
from quire_engine.stats import FinishedRequestStats, IterationStats
from quire_monitoring.ended_requests import LOST, EndedRequestLog
from quire_monitoring.request_file import note_death

SLO = {"default": SLOTargets(ttft_ms=500)}


def log(capacity: int = 3, *, keep_text: bool = False) -> EndedRequestLog:
    return EndedRequestLog(capacity, SLO, keep_text=keep_text, clock=lambda: 1000.0)


def end(into: EndedRequestLog, *labels: str) -> None:
    into.record(
        None,
        IterationStats(
            finished_requests=[FinishedRequestStats("stop", options=RequestOptions(label=one)) for one in labels]
        ),
    )


def test_an_asker_gets_what_is_new_to_it_and_all_that_is_kept_without_a_cursor() -> None:
    ring = log()
    assert (ring.since().requests, ring.since().num_ended, ring.since().since_unix) == ([], 0, 1000.0)
    seen = ring.since().cursor
    end(ring, "a", "b")
    answer = ring.since(seen)
    assert [one.label for one in answer.requests] == ["a", "b"]
    assert ring.since(answer.cursor).requests == []
    end(ring, "c", "d", "e")
    assert [one.label for one in ring.since(answer.cursor).requests] == ["c", "d", "e"]
    assert [(one.number, one.label) for one in ring.since(seen).requests] == [(2, "c"), (3, "d"), (4, "e")]
    assert (ring.since(seen).num_ended, ring.since(seen).capacity) == (5, 3)


def test_a_cursor_of_the_model_before_it_was_loaded_again_gets_everything() -> None:
    before, now = log(), log()
    end(before, "a", "b")
    end(now, "c")
    assert [one.label for one in now.since(before.since().cursor).requests] == ["c"]


@pytest.mark.parametrize("cursor", ["x", ":3", "a:", "a:-1", "a:\u0661", "a:" + "9" * 5000])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(RequestError, match="cursor is"):
        log().since(cursor)


def test_nothing_is_kept_if_the_settings_say_so() -> None:
    ring = log(0)
    end(ring, "a")
    assert (ring.since().num_ended, ring.since().capacity, ring.since().requests) == (0, 0, [])


def test_no_text_is_kept_unless_it_is_asked_for() -> None:
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=["secret"], cache_salt="secret", n=2)
    phases = [("queue", 0.0), ("decode", 0.5), ("preempted", 1.0), ("decode", 2.5), ("preempted", 3.0), ("decode", 3.5)]
    stats = FinishedRequestStats("stop", prompt="secret words", params=params, phases=phases, e2e_seconds=9.0)
    for keep_text in (False, True):
        ring = log(keep_text=keep_text)
        ring.add(stats)
        (kept,) = ring.since().requests
        assert (kept.queue_seconds, kept.decode_seconds, kept.preempted_seconds) == (0.5, 6.5, 2.0)
        assert ("secret" in json.dumps(msgspec.to_builtins(ring.since()))) is keep_text
        assert {"max_tokens": 7, "temperature": 0.5, "n": 2}.items() <= kept.parameters.items()
        assert "cache_salt" not in kept.parameters
    assert (kept.prompt, kept.parameters["stop"]) == ("secret words", ["secret"])


# -- over the death of the server --------------------------------------------------------------------------------------


def kept(folder: Path, owner: str = "m", capacity: int = 3, *, keep_text: bool = False) -> EndedRequestLog:
    return EndedRequestLog(capacity, SLO, keep_text=keep_text, folder=folder, owner=(owner,), clock=lambda: 1000.0)


def die(folder: Path, why: str = "") -> Path:
    """The process that has written the only file is gone."""
    (file,) = folder.glob("*.requests")
    left = file.rename(folder / "1-0.requests")
    if why:
        note_death(folder, why)
    return left


def test_requests_that_were_live_when_the_server_died_are_listed_as_lost(tmp_path: Path) -> None:
    before = kept(tmp_path)
    for key, label in enumerate(("a", "b", "c")):
        before.begin(key, RequestOptions(label=label))
    before.begin(1, RequestOptions(label="b"), request_id="id-b", num_prompt_tokens=7)
    before.add(FinishedRequestStats("stop", request_id="id-a", options=RequestOptions(label="a")))
    seen = before.since()
    before.end(0)
    before.end(99)
    left = die(tmp_path, "tritonserver was killed by SIGKILL")
    now = kept(tmp_path)
    assert not left.exists()
    answer = now.since(seen.cursor)
    assert [(one.number, one.id, one.label, one.finish_reason) for one in answer.requests] == [
        (1, "id-b", "b", "error"), (2, "", "c", "error"),
    ]  # fmt: skip
    (lost, _) = answer.requests
    assert (lost.error, lost.error_code) == ("tritonserver was killed by SIGKILL", LOST)
    assert (lost.slo_verdict, lost.slo_cause, lost.num_prompt_tokens) == ("miss", "error", 7)
    assert [one.request_id for one in now.lost] == ["id-b", ""]
    assert [one.label for one in now.since().requests] == ["a", "b", "c"], "what ended before is still there"


def test_a_lost_request_that_was_a_miss_already_is_not_counted_again(tmp_path: Path) -> None:
    before = kept(tmp_path)
    for key, name in enumerate(("late", "in time")):
        before.begin(key, RequestOptions())
        before.begin(key, RequestOptions(), request_id=name)
    before.record(None, IterationStats(misses=[("default", "ttft", "late"), ("default", "ttft", "of another model")]))
    before.begin(0, RequestOptions(), request_id="late", num_prompt_tokens=7)
    die(tmp_path, "killed")
    now = kept(tmp_path)
    assert [(one.request_id, one.slo_verdict, one.missed_live) for one in now.lost] == [
        ("late", "miss", True), ("in time", "miss", False),
    ]  # fmt: skip


def test_another_models_requests_are_left_to_it(tmp_path: Path) -> None:
    kept(tmp_path).begin(1, RequestOptions(label="a"))
    left = die(tmp_path, "killed")
    other = kept(tmp_path, "other")
    assert other.lost == ()
    assert left.exists()
    other.close()
    assert [one.label for one in kept(tmp_path).since().requests] == ["a"]


def test_a_second_death_before_the_model_is_back_changes_nothing(tmp_path: Path) -> None:
    kept(tmp_path).begin(1, RequestOptions(label="a"))
    die(tmp_path, "killed")
    note_death(tmp_path, "killed again, while it started")
    (lost,) = kept(tmp_path).since().requests
    assert lost.error == "killed"
    die(tmp_path, "and again")
    assert [one.label for one in kept(tmp_path).since().requests] == ["a"], "it was lost only once"


def test_of_a_file_that_was_cut_short_or_is_malformed_the_rest_counts(tmp_path: Path) -> None:
    log = kept(tmp_path)
    log.begin(1, RequestOptions(label="a"))
    left = die(tmp_path)
    left.write_bytes(left.read_bytes() + b'not json\n{"type":"gone"}\n\xff\n{"type":"begun","key":2,"time_u')
    note_death(tmp_path, "killed")
    assert [one.error for one in kept(tmp_path).since().requests] == ["killed"]
    for content in (b"", b"\n", b"not json", b'{"type":"begun","key":1,"time_unix":1.0}\n'):
        (tmp_path / "1-0.requests").write_bytes(content)
        assert kept(tmp_path, "n").lost == ()


def test_a_model_that_was_unloaded_leaves_no_file(tmp_path: Path) -> None:
    log = kept(tmp_path)
    log.begin(1)
    log.close()
    log.close()
    log.begin(2)
    log.end(1)
    end(log, "a")
    assert list(tmp_path.iterdir()) == []
    assert [one.label for one in log.since().requests] == ["a"]


def test_no_text_is_written_and_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    log = kept(tmp_path, keep_text=True)
    for key in range(1000):
        log.begin(key)
        log.add(FinishedRequestStats("stop", prompt="secret words", params=SamplingParams(stop=["secret"], n=2)))
        log.end(key)
    (file,) = tmp_path.iterdir()
    assert b"secret" not in file.read_bytes()
    assert b'"n":2' in file.read_bytes()
    assert file.read_bytes().count(b"\n") < 150
    assert log.since().requests[-1].prompt == "secret words"
    die(tmp_path)
    now = kept(tmp_path)
    assert (now.lost, now.since().num_ended, len(now.since().requests)) == ([], 1000, 3)


def test_without_a_folder_to_write_to_requests_are_listed_all_the_same(tmp_path: Path) -> None:
    log = kept(tmp_path / "gone")
    log.begin(1)
    end(log, "a")
    assert [one.label for one in log.since().requests] == ["a"]
    assert not list(tmp_path.iterdir())
    kept(tmp_path, capacity=0).begin(1)
    assert not list(tmp_path.iterdir())


def test_a_request_for_a_vector_is_kept_with_its_task_and_without_sampling_parameters() -> None:
    ring = log()
    options = RequestOptions(pooling_params=PoolingParams(task="embed", dimensions=64))
    ring.add(FinishedRequestStats("stop", options=options, params=SamplingParams(max_tokens=1, temperature=0.5)))
    (one,) = ring.since().requests
    assert (one.task, one.parameters, one.time_to_first_token_seconds) == ("embed", {"dimensions": 64}, None)
