"""Writes for whoever reads slowly, or not at all: what is said to him holds nobody up.

A pipe that is not read is full after 64 KiB, and a terminal after Ctrl-S: a write then waits. The server's log goes
through here, and a server whose log is not taken stops.
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

__all__ = ["PatientWriter"]

_MOST_BYTES = 4 * 2**20
"""What is kept for the reader: some ten thousand lines."""
_LAST_LINES_S = 1.0
"""How long the end of this process waits for its reader."""


class PatientWriter:
    """Writes to one stream of this process. A thread of its own waits for the reader, where a stream can make wait.

    What finds no room is dropped, and the reader is told how many lines that were as soon as he reads again.
    """

    def __init__(self, stream: TextIO, most_bytes: int = _MOST_BYTES) -> None:
        self._stream = stream
        self._descriptor = _that_can_wait(stream)
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        """Of what waits, and of what is being written."""
        self._num_dropped = 0
        self._is_started = False

    def write(self, text: str) -> None:
        """Have a text of whole lines written, at once or later."""
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
        """Wait until everything is written, but no longer than this; whether it is."""
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
        # Signals are for the thread that waits for them, and a thread begins with the mask of the one that starts it.
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
    """The stream's descriptor if a write to it may have to wait for a reader; not so of a file, or in memory."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else descriptor


def _write_all(descriptor: int | None, data: bytes) -> None:
    assert descriptor is not None
    # Past the stream's own buffer, whose lock a writer that waits would hold when the interpreter ends.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
