"""The incident log: one row for each time that users were affected, over restarts of the page and of the server."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_client import EndedRequest
from quire_client.symptoms import SYMPTOMS, Level
from quire_dashboard import incidents as incidents_module
from quire_dashboard.findings import Finding
from quire_dashboard.health import Health
from quire_dashboard.incidents import (
    MOST_HURT,
    MOST_ROWS,
    Hurt,
    Incident,
    IncidentLog,
    hurt_among,
    incidents_file,
    read_incidents,
)
from support.fake_triton import make_ended_request

WELL = Health(level=Level.OK, headline="Users are served within their SLO.")


def ill(*causes: str, level: Level = Level.WARNING) -> Health:
    """A verdict with these causes; none: it is not known."""
    findings = tuple(Finding(level=level, cause=one, title=f"It is {one}", detail=f"Why {one}.") for one in causes)
    return Health(level=level, headline="Users are affected.", findings=findings)


class Watched:
    """A log and its clock."""

    def __init__(self, path: Path | None) -> None:
        self.now, self.num_hurt = 1000.0, 0
        self.hurt: Sequence[Hurt] = ()
        self.log = IncidentLog(path, lambda: self.now)

    def look(self, seconds: float = 2.0, **verdicts: Health) -> list[Incident]:
        """A reading, so many seconds after the last one; the server that is away is `away`."""
        self.now += seconds
        named = {"" if name == "away" else name: health for name, health in verdicts.items()}
        self.log.look(named, lambda model, since: (self.num_hurt, self.hurt))
        return self.log.rows()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quire" / "incidents" / "h_8002.jsonl"


@pytest.fixture
def watched(path: Path) -> Watched:
    return Watched(path)


def test_nothing_is_written_while_nothing_happens(watched: Watched, path: Path) -> None:
    assert watched.look(m=WELL) == []
    assert not path.exists()


def test_what_the_host_lacks_is_one_incident_of_all_models(watched: Watched) -> None:
    watched.look(a=ill("host_cpu"), b=ill("host_cpu"))
    (row,) = watched.look(a=WELL, b=ill("host_cpu"))
    assert (row.model, row.over) == ("", None)
    (row,) = watched.look(a=WELL, b=WELL)
    assert row.over is not None


def test_an_incident_is_one_row_from_its_begin_to_its_end(watched: Watched, path: Path) -> None:
    watched.look(m=ill("queue"))
    watched.num_hurt, watched.hurt = 3, [Hurt(id="r1", label="mine", why="4 s in the queue", trace_id="ab" * 16)]
    (row,) = watched.look(m=ill("queue", "rejections"))
    assert (row.began, row.over, row.cause, row.title, row.alert) == (
        1002.0,
        None,
        "queue",
        "It is queue",
        SYMPTOMS["queue"].alert,
    )
    (row,) = watched.look(m=WELL)
    assert (row.began, row.over, row.num_hurt, row.hurt) == (1002.0, 1006.0, 3, tuple(watched.hurt))
    assert list(read_incidents(path).values()) == [row]
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_what_comes_back_at_once_is_the_same_and_later_it_is_another(watched: Watched) -> None:
    watched.look(m=ill("queue"))
    watched.look(m=WELL)
    assert [row.over for row in watched.look(m=ill("queue"))] == [None]
    watched.look(m=WELL)
    assert [row.over for row in watched.look(20.0, m=ill("queue"))] == [None, 1008.0]


def test_the_causes_of_one_outage_follow_each_other_in_one_row(watched: Watched) -> None:
    watched.look(away=ill("server_away", level=Level.CRITICAL))
    watched.look(m=ill("server_restarts"), n=ill("server_restarts"))
    (row,) = watched.look(m=WELL, n=WELL)
    assert (row.model, row.cause, row.began, row.over) == ("", "server_restarts", 1002.0, 1006.0)


def test_a_killed_engine_in_the_midst_of_an_overload_is_a_row_of_its_own(watched: Watched) -> None:
    watched.look(m=ill("queue"))
    watched.look(m=ill("engine_down", "queue", level=Level.CRITICAL))
    watched.look(m=ill("engine_restarts", "queue"))
    outage, overload = watched.look(m=ill("queue"))
    assert (overload.cause, overload.over) == ("queue", None)
    assert (outage.cause, outage.began, outage.over) == ("engine_restarts", 1004.0, 1008.0)


def test_an_engine_that_is_killed_soon_after_another_incident_is_one_of_its_own(watched: Watched) -> None:
    watched.look(m=ill("server_restarts"))
    watched.look(m=WELL)
    assert [row.cause for row in watched.look(m=ill("engine_restarts"))] == ["engine_restarts", "server_restarts"]


def test_misses_whose_cause_is_named_later_are_one_row_with_it(watched: Watched) -> None:
    watched.look(m=ill())
    watched.look(m=ill("queue"))
    (row,) = watched.look(m=ill())
    assert (row.cause, row.over) == ("queue", None), "the misses last longer than the queue"
    (row,) = watched.look(m=WELL)
    assert row.over == 1008.0


def test_what_is_not_known_of_a_server_that_is_away_goes_on(watched: Watched) -> None:
    watched.look(m=ill("kv_cache_full"))
    watched.look(away=ill("metrics_away"))
    assert [(row.cause, row.over) for row in watched.log.rows()] == [("metrics_away", None), ("kv_cache_full", None)]
    watched.look(n=WELL)
    assert [row.over for row in watched.log.rows()] == [1006.0, 1006.0], "the model was unloaded"


def test_what_affects_no_user_is_no_incident(watched: Watched) -> None:
    no_slo = ill("no_slo", level=Level.OK)
    assert watched.look(m=no_slo) == []
    (row,) = watched.look(m=Health(level=Level.CRITICAL, headline="Only 2%.", findings=no_slo.findings))
    assert (row.cause, row.detail) == ("slo", "Only 2%.")


def test_a_page_that_died_leaves_its_incident_to_the_next(watched: Watched, path: Path) -> None:
    watched.look(m=ill("queue"))
    watched.log.close()
    later = Watched(path)
    later.now = 2000.0
    (row,) = later.look(m=WELL)
    assert (row.began, row.over) == (1002.0, 2002.0)
    assert [one.over for one in read_incidents(path).values()] == [2002.0]


def test_of_two_dashboards_one_writes_and_the_other_reads(watched: Watched, path: Path) -> None:
    watched.look(m=ill("queue"))
    other = Watched(path)
    other.now = 1500.0
    assert [row.began for row in other.look(m=ill("queue"))] == [1002.0]
    watched.look(m=WELL)
    assert [row.over for row in other.log.rows()] == [1004.0]
    watched.log.close()
    assert [row.began for row in other.look(m=ill("queue"))] == [1504.0, 1002.0]


def test_two_servers_have_a_file_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, second = incidents_file("127.0.0.1:8002"), incidents_file("127.0.0.1:9002")
    assert first == tmp_path / "quire" / "incidents" / "127.0.0.1_8002.jsonl"
    assert first != second
    hostile = incidents_file("../../x:8002")
    assert hostile is not None
    assert hostile.parent == first.parent


def test_a_malformed_line_costs_no_other(watched: Watched, path: Path) -> None:
    watched.look(m=ill("queue"))
    with path.open("ab") as file:
        file.write(
            b'not json\n[]\n{}\n"x"\n{"id": 7, "began": "x"}\n{"id": "a", "began": null}\n'
            b'{"id": "b", "began": 1.0, "over": "x"}\n{"id": "c", "hurt": 7, "began": 1.0}\n'
            b'{"id": "e", "hurt": [{"label": 7}], "began": 1.0}\n{"id": "f", "num_hurt": "x", "began": 1.0}\n'
        )
        file.write(b'{"id": "g", "began": 1.0, "more": %b%b}\n' % (b"[" * 100_000, b"]" * 100_000))
        file.write(b'{"id": "h", "began": 1e30}\n{"id": "i", "began": -1.0}\n{"id": "j", "began": 1.0, "over": 1e30}\n')
        file.write(b'{"id": "d", "beg')
    watched.look(m=WELL)
    watched.look(20.0, m=ill("queue"))
    assert [(row.cause, row.over) for row in read_incidents(path).values()] == [("queue", 1004.0), ("queue", None)]


def test_it_keeps_the_latest_and_its_file_is_bounded(
    watched: Watched, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incidents_module, "_MOST_BYTES", 50_000)
    for _ in range(2 * MOST_ROWS):
        watched.look(20.0, m=ill("queue"))
        watched.look(m=WELL)
    rows = list(read_incidents(path).values())
    assert len(rows) == MOST_ROWS
    assert list(reversed(rows)) == watched.log.rows()
    assert path.stat().st_size < 120_000


def test_a_row_is_not_written_for_each_request(watched: Watched, path: Path) -> None:
    for number in range(50):
        watched.num_hurt = number
        watched.look(1.0, m=ill("queue"))
    assert 2 <= len(path.read_bytes().splitlines()) <= 6
    watched.look(m=WELL)
    assert next(iter(read_incidents(path).values())).num_hurt == 49


def test_a_folder_that_cannot_be_written_to_is_said_and_costs_no_row(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x" / "a.jsonl", None):
        watched = Watched(path)
        (row,) = watched.look(m=ill("queue"))
        assert row.cause == "queue"
        assert watched.log.error
        assert [row.over for row in watched.look(m=WELL)] == [1004.0]


def test_files_of_servers_that_are_no_more_are_removed(watched: Watched, path: Path) -> None:
    path.parent.mkdir(parents=True)
    old = path.with_name("old_1.jsonl")
    old.touch()
    watched.now = old.stat().st_mtime + 91 * 86400
    watched.look(m=ill("queue"))
    assert not old.exists()
    assert path.exists()


def ended(number: int, **values: Any) -> EndedRequest:
    return msgspec.convert(make_ended_request(number, id=f"r{number}", **values), EndedRequest)


def test_who_was_hurt() -> None:
    requests = [
        ended(1, time_unix=90.0),
        ended(2, time_unix=110.0, label="a\nb"),
        ended(3, time_unix=105.0, finish_reason="error", error="tritonserver was killed", error_code="lost"),
        ended(4, time_unix=111.0, finish_reason="abort", aborted_by="client"),
        ended(5, time_unix=112.0, slo_verdict="good"),
        ended(6, time_unix=113.0, finish_reason="rejected", error_code="invalid_arg"),
    ]
    found = hurt_among(requests, 100.0)
    assert [(one.id, one.why.partition(" ")[0]) for one in found] == [("r3", "Lost"), ("r2", "4.1")]
    assert found[1].label == "a\ufffdb"
    assert len(hurt_among([ended(number, time_unix=200.0) for number in range(100)], 0.0)) == MOST_HURT


def test_a_row_says_no_more_than_fits(watched: Watched, path: Path) -> None:
    text = "x\n" * 10_000
    finding = Finding(level=Level.WARNING, cause="queue", title=text, detail=text)
    watched.look(m=Health(level=Level.WARNING, headline="", findings=(finding,)))
    (line,) = path.read_bytes().splitlines()
    assert len(json.loads(line)["detail"]) <= 600
