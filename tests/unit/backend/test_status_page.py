"""What a stub shows of itself to `quire serve`."""

import errno
import os
import resource
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_backend.serving import Serving
from quire_backend.status_page import StatusPage, StubState, StubStatus, ask_to_end, read_status_pages
from quire_engine.config import FrontendConfig
from support.serving import wait_until


def make_page(folder: Path) -> StatusPage:
    return StatusPage(folder, model="m", version="1", instance="m_0_0")


def read(folder: Path) -> StubStatus:
    (status,) = read_status_pages(folder)
    return status


@pytest.fixture
def serving(engine: Any, tmp_path: Path) -> Any:
    serving = Serving(engine, FrontendConfig(), status=make_page(tmp_path))
    serving.start()
    yield serving
    serving.shutdown()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    page.in_flight(7)
    page.beat(StubState.DOWN, "no file \u20ac" + 5000 * "\U0001f600")
    page.sending(3)
    status = read(tmp_path)
    assert (status.pid, status.model, status.version, status.instance) == (os.getpid(), "m", "1", "m_0_0")
    assert (status.state, status.num_in_flight, status.sending, status.beats) == (StubState.DOWN, 7, 3, 2)
    assert status.reason.startswith("no file \u20ac\U0001f600")
    page.close()
    page.close()
    assert read_status_pages(tmp_path) == []


def test_a_page_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    make_page(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    one_more = os.dup(0)
    os.close(one_more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (one_more + 1, hard))  # enough to list the folder
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_status_pages(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_page_is_whole_however_often_it_changes(tmp_path: Path) -> None:
    page, ends = make_page(tmp_path), threading.Event()

    def write() -> None:
        while not ends.is_set():
            for reason in ("a" * 300, "b" * 30):
                page.beat(StubState.DOWN, reason)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        reasons = {status.reason for _ in range(300) for status in read_status_pages(tmp_path)}
    finally:
        ends.set()
        thread.join()
    assert reasons <= {"a" * 300, "b" * 30, ""}


def test_other_files_and_torn_ones_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "quire-abc").mkdir()
    (tmp_path / "stub-1-2.status").write_bytes(b"")
    (tmp_path / "stub-3-4.status").write_bytes(bytes(8192))
    assert read_status_pages(tmp_path) == []
    assert read_status_pages(tmp_path / "gone") == []


def test_without_quire_serve_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("QUIRE_RUN_ID", raising=False)
    assert StatusPage.of_run(model="m", version="1", instance="m_0_0") is None
    assert list(tmp_path.iterdir()) == []


def test_a_page_has_its_room_from_the_start(tmp_path: Path) -> None:
    """Memory that is mapped from a hole in a file, on a disk that is full, ends the process when it is written."""
    make_page(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= path.stat().st_size == 8192


def test_a_full_disk_is_only_a_warning(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def no_room(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("QUIRE_RUN_ID", "run")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert StatusPage.of_run(model="m", version="1", instance="m_0_0") is None
    assert [record.getMessage() for record in caplog.records] == [
        "quire serve will not see how this model is: [Errno 28] No space left on device"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_loop_that_moves_beats_and_one_that_hangs_does_not(serving: Any, tmp_path: Path) -> None:
    first = read(tmp_path).beats
    wait_until(lambda: read(tmp_path).beats > first + 1, "two beats")
    hangs, goes_on = threading.Event(), threading.Event()
    serving.call(lambda: (hangs.set(), goes_on.wait()))
    assert hangs.wait(60)
    stuck = read(tmp_path).beats
    try:
        assert not goes_on.wait(1.0)
        assert read(tmp_path).beats == stuck
    finally:
        goes_on.set()
    wait_until(lambda: read(tmp_path).beats > stuck, "it beats again")


def test_it_tells_of_the_engine_and_of_requests_in_flight(
    serving: Any, engine: Any, tmp_path: Path, request_of: Callable[..., Any]
) -> None:
    wait_until(lambda: read(tmp_path).state is StubState.UP, "the engine is up")
    request = request_of(text_input="Hi")
    serving.submit(request)
    wait_until(lambda: read(tmp_path).num_in_flight == 1, "one request")
    engine.outage = "it is being started again"
    wait_until(lambda: read(tmp_path).state is StubState.DOWN, "the engine is down")
    assert read(tmp_path).reason == "it is being started again"
    engine.outage = None
    (request_id,) = engine.sinks
    engine.emit(request_id, "a", finish_reason="stop")
    wait_until(lambda: (read(tmp_path).state, read(tmp_path).num_in_flight) == (StubState.UP, 0), "all is well")
    engine.outage = engine.dead_error = "its outputs cannot be taken in any more"
    wait_until(lambda: read(tmp_path).state is StubState.DEAD, "the engine is dead")


def test_a_server_that_takes_no_response_is_seen(
    serving: Any, engine: Any, tmp_path: Path, request_of: Callable[..., Any]
) -> None:
    request = request_of(text_input="Hi")
    takes_it = threading.Event()
    send = request.sender.send
    request.sender.send = lambda *arguments, **options: (takes_it.wait(), send(*arguments, **options))
    serving.submit(request)
    engine.wait_for("add")
    (request_id,) = engine.sinks
    engine.emit(request_id, "a", finish_reason="stop")
    wait_until(lambda: read(tmp_path).sending == 1, "a response is on its way")
    takes_it.set()
    wait_until(lambda: read(tmp_path).sending == 0, "it has arrived")


def test_a_stub_that_is_asked_to_end_its_engine_does_and_refuses_what_still_comes(
    engine: Any, tmp_path: Path, request_of: Callable[..., Any]
) -> None:
    threads: list[str] = []

    def end() -> None:
        threads.append(threading.current_thread().name)
        serving.end_engine()

    serving = Serving(engine, FrontendConfig(), status=make_page(tmp_path), on_asked_to_end=end)
    serving.start()
    try:
        wait_until(lambda: read(tmp_path).beats > 2, "it beats")
        assert (threads, read(tmp_path).is_leaving) == ([], False)
        ask_to_end(tmp_path, read(tmp_path))
        wait_until(
            lambda: read(tmp_path).state is StubState.RETIRED and "shutdown" in engine.events, "it has no engine"
        )
        beats = read(tmp_path).beats
        wait_until(lambda: read(tmp_path).beats > beats + 1, "it beats on")
        request = request_of(text_input="Hi")
        serving.submit(request)
        assert "the model is being unloaded" in request.sender.wait()[-1].error.message
    finally:
        serving.shutdown()
    assert threads == ["quire-end"]
    assert read_status_pages(tmp_path) == []


def test_one_that_has_ended_meanwhile_cannot_be_asked(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    status = read(tmp_path)
    page.close()
    ask_to_end(tmp_path, status)
    assert list(tmp_path.iterdir()) == []


def test_a_stub_that_ends_takes_its_page_with_it(engine: Any, tmp_path: Path) -> None:
    serving = Serving(engine, FrontendConfig(), status=make_page(tmp_path))
    serving.start()
    assert read(tmp_path).model == "m"
    serving.shutdown()
    assert read_status_pages(tmp_path) == []
