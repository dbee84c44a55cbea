"""PatientWriter: writes to readers that are slow or do not read, without blocking the caller.

A pipe that is not read is full after 64 KiB, a terminal after Ctrl-S: a write then blocks. The server's log goes
through here, and a server whose log is not read stops.
"""

import atexit
import contextlib
import os
import signal
import stat
import threading
import time
from collections import deque
from typing import TextIO

_MOST_BYTES = 4 * 2**20
"""Bytes that are kept for the reader: some ten thousand lines."""
_LAST_LINES_S = 1.0
"""How long the end of this process waits for the reader."""


class PatientWriter:
    """Writes to one stream of this process. If writes to it can block, a thread of its own does them.

    Lines that find no room are dropped, and their number is written once the reader reads again.
    """

    def __init__(self, stream: TextIO, most_bytes: int = _MOST_BYTES) -> None:
        self._stream = stream
        self._descriptor = _that_can_wait(stream)
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
            self._tell_of_dropped()
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

    def _tell_of_dropped(self) -> None:
        if self._num_dropped:
            number, self._num_dropped = self._num_dropped, 0
            self._put(f"quire: {number} lines of the log were dropped here: nobody read it\n".encode())

    def _start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        atexit.register(self.flush)
        # A thread inherits the signal mask of the one that starts it, and signals are for another thread.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            threading.Thread(target=self._run, name="patient-writer", daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._tell_of_dropped()
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            _write_all(self._descriptor, data)
            with self._changed:
                self._num_bytes -= len(data)
                self._changed.notify_all()


def _that_can_wait(stream: TextIO) -> int | None:
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
