"""Lines of a log. Text from outside (a client, a store, another host) neither controls the terminal that shows them nor
forges further lines."""

import logging


def printable(text: str) -> str:
    r"""Escape all that is invisible, as Python does: ESC becomes `\x1b`, a line's end `\n`. Tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in text)


class LineFormatter(logging.Formatter):
    """Indents what follows an entry's first line, such as a traceback, so that it looks like no entry itself."""

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
