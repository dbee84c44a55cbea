"""Text: what has come of a model's text and was not read yet. OutputParser: has a form read it."""

from collections.abc import Callable, Generator
from typing import TypeVar

from quire_gateway.output_parser.message import Message, Piece

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""What reads: it yields whenever it needs more text, and returns what it has found."""
Form = Callable[["Text", Message], Steps[None]]
"""Reads a whole text, and tells the message what is in it."""


class Text:
    """A text that comes in parts. What is read from it depends on the whole alone, never on the parts::

    ░░░░░░░░░▒▒▒▒▒▒▒▒▒▒▒▒▒▒██████████
    dropped  │             └ position: where reading goes on
             └ the first mark, which reading may go back to
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._marks: list[int] = []
        self._has_ended = False

    def feed(self, part: str) -> None:
        """Take the next part."""
        kept = self._marks[0] if self._marks else self._position
        self._buffer = self._buffer[kept:] + part
        self._position -= kept
        self._marks = [mark - kept for mark in self._marks]

    def end(self) -> None:
        """There is no more."""
        self._has_ended = True

    def mark(self) -> None:
        """Note this place."""
        self._marks.append(self._position)

    def release(self, *, rewind: bool) -> None:
        """Forget the place that was noted last, or go on reading there once more."""
        mark = self._marks.pop()
        if rewind:
            self._position = mark

    def rest(self) -> Steps[str]:
        """All that is there, unread; empty only at the end."""
        while len(self._buffer) == self._position and not self._has_ended:
            yield
        return self._buffer[self._position :]

    def skip(self, size: int) -> None:
        """Read so many characters that are there."""
        self._position += size

    def character(self) -> Steps[str]:
        """The next one; empty at the end."""
        rest = yield from self.rest()
        self._position += len(rest[:1])
        return rest[:1]

    def while_in(self, is_wanted: Callable[[str], object]) -> Steps[str]:
        """Characters, up to the first that is not wanted."""
        found: list[str] = []
        while True:
            rest = yield from self.rest()
            size = next((i for i, character in enumerate(rest) if not is_wanted(character)), len(rest))
            found.append(rest[:size])
            self._position += size
            if size < len(rest) or not rest:
                return "".join(found)

    def blank(self) -> Steps[str]:
        """White space."""
        return (yield from self.while_in(str.isspace))

    def starts_with(self, *options: str) -> Steps[str | None]:
        """Which of some texts, none of which begins with another, comes next. It is not read."""
        while True:
            rest = self._buffer[self._position :]
            for option in options:
                if rest.startswith(option):
                    return option
            if self._has_ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def until(self, *markers: str, take: Callable[[str], object]) -> Steps[str | None]:
        """Hand on what comes before the first of some markers, and read that marker too.

        Args:
            markers: texts that cannot overlap.
            take: gets the text as it comes.

        Returns:
            The marker; None at the end.
        """
        while True:
            rest = self._buffer[self._position :]
            found = min(((rest.find(marker), marker) for marker in markers if marker in rest), default=None)
            size = found[0] if found else len(rest) - (0 if self._has_ended else _begun(rest, markers))
            self._position += size + (len(found[1]) if found else 0)
            if size:
                take(rest[:size])
            if found or self._has_ended:
                return found[1] if found else None
            yield


class OutputParser:
    """Finds the pieces of one answer.

    Args:
        form: that the model writes in.
    """

    def __init__(self, form: Form) -> None:
        self._text = Text()
        self._message = Message()
        self._steps = form(self._text, self._message)
        self._is_done = False

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._message.num_calls

    def feed(self, part: str) -> list[Piece]:
        """What the next part of the text shows."""
        self._text.feed(part)
        return self._go_on()

    def finish(self) -> list[Piece]:
        """What the end of the text shows. Idempotent."""
        if self._is_done:
            return []
        self._text.end()
        pieces = self._go_on()
        self._message.end()
        return pieces + self._message.take()

    def _go_on(self) -> list[Piece]:
        if not self._is_done and next(self._steps, self) is self:
            self._is_done = True
        return self._message.take()


def _begun(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end that a marker may begin with."""
    longest = max(map(len, markers), default=1) - 1
    return next(
        (size for size in range(min(longest, len(text)), 0, -1)
         if any(marker.startswith(text[-size:]) for marker in markers)),
        0,
    )  # fmt: skip
