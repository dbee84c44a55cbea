"""Log lines. Text from outside (a client, a store, another host) can neither control a terminal nor forge lines."""

import logging


def printable(text: str) -> str:
    r"""Escape what is invisible, as Python does: ESC becomes `\x1b`, the end of a line `\n`. Tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in text)


class LineFormatter(logging.Formatter):
    """Indents the lines after an entry's first, such as a traceback, so that they cannot be taken for entries."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, super().format(record).split("\n")))


def log_to_stderr(line: str) -> None:
    """Set up the root logger of a process, from INFO on.

    Args:
        line: a format of `logging`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
