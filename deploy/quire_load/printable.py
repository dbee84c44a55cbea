"""What programs write: text of a server, for a terminal, and all of stdout."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    r"""Escape all that is invisible, as Python does: ESC becomes `\x1b`, a line's end `\n`. Tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in text)


@contextmanager
def standard_output() -> Iterator[None]:
    """While a program runs: its stdout escapes characters that the encoding lacks. At the end all of it is written.

    Raises:
        SystemExit: it cannot be, as on a full disk. A reader that has gone is no error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    yield
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again when it ends
        if not isinstance(error, BrokenPipeError):
            raise SystemExit(f"quire: stdout cannot be written: {error.strerror}") from None
