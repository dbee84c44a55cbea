"""Lines on stderr for the person who started the command, with a status line below them on a terminal.

stdout is for what other programs read: the ready line, generated text, JSON.
"""

import sys
import threading
import time

from quire_load.printable import printable

from quire_cli.patient_writer import PatientWriter

_BAR_WIDTH = 20
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"
_PLAIN_INTERVAL_S = 10.0


class Console:
    """Writes whole lines to stderr from any thread, without waiting for a reader. Leave its context at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = ""
        self._writer = PatientWriter(sys.stderr)
        self._stdout = PatientWriter(sys.stdout)
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
