"""EngineWatch: detects that an engine core is dead, stopped or hung, and kills what is left of it.

A thread of the frontend sleeps in poll until the process ends, and examines it four times a second. A second thread
waits for the heartbeat's lock: the kernel releases it when the process begins to end, but reports the end only when all
its memory is free.

* **dead**: the process ends. A worker that dies takes its engine core with it.
* **stopped**: the engine core or a worker is in state T (SIGSTOP) twice in a row.
* **hung**: it has requests, and its heartbeat has not moved for `step_timeout_s` since the watch first saw them.

All three end the same way: the stacks of all threads are logged where possible, every process of the engine gets
SIGKILL, and `on_death` is called.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

from quire_engine.core.heartbeat import Heartbeat
from quire_engine.system.process_state import how_it_ended, is_stopped, process_stat

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
DUMP_SECONDS = 0.3
"""Seconds that processes have to write their stacks before they are killed."""


class EngineWatch:
    """Watches one engine core and its workers. The group of processes is the engine's own.

    Args:
        pid: the engine core, a child of this process that only this watch waits for, and leader of its group.
        worker_pids: its workers.
        heartbeat: its page.
        step_timeout_s: time without a turn of its loop after which it counts as hung.
        is_busy: whether it has requests; called from the thread.
        on_death: called once, from the thread, with what happened.

    Raises:
        OSError: no descriptors are left, or it has ended already.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        pid: int,
        worker_pids: Sequence[int],
        heartbeat: Heartbeat,
        step_timeout_s: float,
        is_busy: Callable[[], bool],
        on_death: Callable[[str], None],
    ) -> None:
        self._pid = pid
        self._pids = (pid, *worker_pids)
        self._heartbeat, self._step_timeout_s, self._is_busy = heartbeat, step_timeout_s, is_busy
        self._on_death = on_death
        self._closing = threading.Event()
        self._waking_up = threading.Lock()
        """Held while the descriptor is written to, which may be another's after `close`."""
        self._is_ending = False
        with contextlib.ExitStack() as opened:  # all or nothing: an engine without a watch must not serve
            self._wake_up = os.eventfd(0, os.EFD_CLOEXEC)
            opened.callback(os.close, self._wake_up)
            self._pidfd = os.pidfd_open(pid)
            opened.callback(os.close, self._pidfd)
            self._lock_thread = threading.Thread(target=self._wait_for_lock, name="engine-watch-lock", daemon=True)
            self._lock_thread.start()
            opened.callback(self.join)
            opened.callback(self._closing.set)
            self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)
            self._thread.start()
            opened.pop_all()

    def close(self) -> None:
        """Stop watching: from now on the process may end. Idempotent."""
        if not self._closing.is_set():
            with self._waking_up:
                self._closing.set()
                os.eventfd_write(self._wake_up, 1)
            self._thread.join()
            os.close(self._pidfd)
            os.close(self._wake_up)

    def join(self) -> None:
        """After `close`, once the process has ended: the heartbeat is no longer read."""
        self._lock_thread.join()

    def _wait_for_lock(self) -> None:
        is_ending: bool | None = False
        while is_ending is False and not self._closing.is_set():
            is_ending = self._heartbeat.wait_for_end(LOOK_SECONDS)
        with self._waking_up:
            if is_ending and not self._closing.is_set():
                self._is_ending = True
                os.eventfd_write(self._wake_up, 1)

    def _run(self) -> None:
        reason = self._wait()
        if reason is not None:
            kill_group(self._pid)
            self._on_death(reason)

    def _wait(self) -> str | None:
        """Wait until the engine is lost, and return why; None when it is no longer watched."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._wake_up, select.POLLIN)
        turns, moved_at, was_stopped, was_busy = -1, time.monotonic(), False, False
        while not self._closing.is_set():
            readable = [descriptor for descriptor, _ in poller.poll(1000 * LOOK_SECONDS)]
            if self._closing.is_set():
                return None
            if self._pidfd in readable:
                return f"the engine process {_how_child_ended(self._pid)}"
            if self._is_ending and (how := _how_it_ends(self._pid)) is not None:
                return f"the engine process {how}"
            if self._wake_up in readable:
                os.eventfd_read(self._wake_up)
            stopped = [pid for pid in self._pids if is_stopped(pid)]
            if stopped and was_stopped:
                self._dump_stacks()
                return f"process {stopped[0]} of the engine was stopped (SIGSTOP)"
            was_stopped, now = bool(stopped), time.monotonic()
            # Not since the look before, which is long ago if this process was not scheduled.
            was_busy, had_requests = self._is_busy(), was_busy
            if self._heartbeat.turns != turns or not (was_busy and had_requests):
                turns, moved_at = self._heartbeat.turns, now
            elif now - moved_at > self._step_timeout_s:
                self._dump_stacks()
                return self._describe_hang(now - moved_at)
        return None

    def _describe_hang(self, seconds: float) -> str:
        oldest = self._heartbeat.oldest_request_time
        age = "" if oldest is None else f", its oldest request is {time.monotonic() - oldest:.0f} s old"
        return (
            f"the engine hangs: step {self._heartbeat.steps} has not ended for {seconds:.0f} s{age} "
            "(step_timeout_s; the stacks of its threads are in the log)"
        )

    def _dump_stacks(self) -> None:
        """Make every process write its threads' stacks to the log; a stopped one is continued for that."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._closing.wait(DUMP_SECONDS)


def kill_group(pid: int) -> None:
    """Kill every process of an engine. The engine core must not have been waited for, or the id may be another's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _how_child_ended(pid: int) -> str:
    """How a child ended, in words, without waiting for it: it stays a zombie."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        result = None
    if result is None:
        return "ended"
    return how_it_ended(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)


def _how_it_ends(pid: int) -> str | None:
    """How a process ends that still frees its memory, in words; None if this kernel does not report it."""
    try:
        stat = process_stat(pid)
    except OSError:
        return None
    return how_it_ended(os.waitstatus_to_exitcode(stat.wait_status)) if stat is not None and stat.wait_status else None
