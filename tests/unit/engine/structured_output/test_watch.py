"""The watch over the grammar compiler's process, with a clock of its own."""

from quire_engine.structured_output.compiler_process import SILENCE_SECONDS, START_SECONDS, CompilerWatch


class Process:
    now = 0.0
    is_stopped = False


def watch_of(process: Process) -> CompilerWatch:
    return CompilerWatch(1, lambda: process.now, lambda pid: process.is_stopped)


def test_stopped_at_two_looks_in_a_row() -> None:
    process = Process()
    watch = watch_of(process)
    process.is_stopped = True
    assert watch.look() is None
    process.is_stopped = False
    assert watch.look() is None, "it was only for a moment"
    process.is_stopped = True
    assert watch.look() is None
    assert watch.look() == "was stopped (SIGSTOP)"


def test_silent_for_too_long() -> None:
    process = Process()
    watch = watch_of(process)
    process.now += SILENCE_SECONDS + 1
    assert watch.look() is None, "it may be slow to start"
    watch.moved()
    process.now += SILENCE_SECONDS - 1
    assert watch.look() is None
    process.now += 2
    assert "has said nothing for 19 s" in (watch.look() or "")
    watch = watch_of(process)
    process.now += START_SECONDS + 1
    assert "has said nothing" in (watch.look() or "")
