"""Lines on stderr for the person who started the command, with a status line below them on a terminal.

stdout is for what other programs read: the ready line, generated text, JSON.
"""

import atexit
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from typing import TextIO

from quire_load.printable import printable

_BAR_WIDTH = 20
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"
_PLAIN_INTERVAL_S = 10.0
_MOST_BYTES = 4 * 2**20
"""Bytes that are kept for the reader: some ten thousand lines."""
_LAST_LINES_S = 1.0
"""How long the end of this process waits for the reader."""


class NonBlockingWriter:
    """Writes to one stream of this process. If writes to it can block, a thread of its own does them.

    A pipe that is not read is full after 64 KiB, a terminal after Ctrl-S: a write then blocks, and with it the server,
    whose log goes through here. Lines that find no room are dropped, and their number is written once the reader reads
    again; `logging.handlers.QueueHandler` keeps all of them, without a limit.
    """

    def __init__(self, stream: TextIO, most_bytes: int = _MOST_BYTES) -> None:
        self._stream = stream
        self._descriptor = _blocking_descriptor(stream)
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        """Bytes that wait or are being written."""
        self._num_dropped = 0
        self._is_started = False

    def write(self, text: str) -> None:
        """Write a text of whole lines, now or later."""
        if self._descriptor is None:
            # A reader that went away (`quire serve 2>&1 | head`) must not take the server with it.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
            return
        data = text.encode(self._stream.encoding or "utf-8", errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > self._most_bytes:
                self._num_dropped += text.count("\n")
                return
            self._report_dropped()
            self._put(data)
            self._start()

    def flush(self, within_s: float = _LAST_LINES_S) -> bool:
        """Wait until everything is written, at most so long. Returns whether it is."""
        end = time.monotonic() + within_s
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, max(0.0, end - time.monotonic()))

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _report_dropped(self) -> None:
        if self._num_dropped:
            number, self._num_dropped = self._num_dropped, 0
            self._put(f"quire: {number} lines of the log were dropped here: they were not read in time\n".encode())

    def _start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        atexit.register(self.flush)
        # A thread inherits the signal mask of the one that starts it, and signals are for another thread.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._run, name="writer", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._report_dropped()
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            _write_all(self._descriptor, data)
            with self._changed:
                self._num_bytes -= len(data)
                self._changed.notify_all()


def _blocking_descriptor(stream: TextIO) -> int | None:
    """The stream's descriptor if a write to it may block; None for files and streams in memory."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else descriptor


def _write_all(descriptor: int | None, data: bytes) -> None:
    assert descriptor is not None
    # Bypasses the stream's own buffer, whose lock a blocked writer would hold when the interpreter ends.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


class Console:
    """Writes whole lines to stderr from any thread, without waiting for a reader. Leave its context at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = ""
        self._writer = NonBlockingWriter(sys.stderr)
        self._stdout = NonBlockingWriter(sys.stdout)
        self.is_terminal = sys.stderr.isatty()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        """Give a slow reader some time for the last lines."""
        self._writer.flush()
        self._stdout.flush()

    def announce(self, text: str) -> None:
        """Write one line to stdout, for other programs."""
        self._stdout.write(f"{text}\n")

    def line(self, text: str) -> None:
        """Write one line above the status line. What is invisible in it is escaped: it may be a server's."""
        text = printable(text)
        with self._lock:
            self._writer.write(f"{_CLEAR if self._status else ''}{text}\n{self._status}")

    def status(self, text: str) -> None:
        """Replace the status line; an empty text removes it. Does nothing if stderr is not a terminal."""
        text = printable(text)
        if not self.is_terminal or text == self._status:
            return
        with self._lock:
            self._writer.write(_CLEAR + text)
            self._status = text
        if not text:  # before something else is written in its place
            self._writer.flush()


class waiting_line:  # noqa: N801 (a context manager, used like a function)
    """Shows that something takes a while: a bar or a spinner on a terminal, a plain line every ten seconds elsewhere.

    Call `tick` often, from the thread that waits.

    Args:
        console: where it is shown.
        what: is going on.
        announce: if not on a terminal, write the first line at once and not only after ten seconds.
    """

    def __init__(self, console: Console, what: str, *, announce: bool = True) -> None:
        self._console = console
        self._what = what
        self._announce = announce
        self._start = time.monotonic()
        self._next_plain = _PLAIN_INTERVAL_S

    def __enter__(self) -> "waiting_line":
        if self._console.is_terminal:
            self.tick()
        elif self._announce:
            self._console.line(f"quire: {self._what}")
        return self

    def __exit__(self, *_: object) -> None:
        self._console.status("")

    def tick(self, percent: int | None = None) -> None:
        """Show the time that has passed, and the progress if it is known."""
        elapsed = time.monotonic() - self._start
        if self._console.is_terminal:
            spinner = _SPINNER[int(elapsed * 10) % len(_SPINNER)]
            bar = "" if percent is None else f" {_bar(percent)}"
            self._console.status(f"{spinner} quire: {self._what}{bar} ({elapsed:.0f} s)")
        elif elapsed >= self._next_plain:
            self._next_plain += _PLAIN_INTERVAL_S
            share = "" if percent is None else f"{percent}%, "
            self._console.line(f"quire: {self._what} ({share}{elapsed:.0f} s)")


def _bar(percent: int) -> str:
    filled = percent * _BAR_WIDTH // 100
    return f"{'█' * filled}{'░' * (_BAR_WIDTH - filled)} {percent}%"
