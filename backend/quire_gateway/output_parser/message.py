"""Message: what was found in a model's text, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Its arguments follow, as text."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | Arguments


class Message:
    """Collects pieces. White space between markup and text is left out; an answer without markup stays as it is."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._pieces: list[Piece] = []
        self._content = _Stretch()
        self._reasoning = _Stretch()

    def take(self) -> list[Piece]:
        """What is new."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> None:
        """No more comes."""
        if not self.num_calls and not self._content.is_trimmed and self._content.held:
            self._pieces.append(Content(self._content.held))

    def content(self, text: str) -> None:
        """More of the answer's text."""
        if shown := self._content.add(text):
            self._pieces.append(Content(shown))

    def reasoning(self, text: str) -> None:
        """More of the reasoning."""
        self._content.is_trimmed = self._reasoning.is_trimmed = True
        if shown := self._reasoning.add(text):
            self._pieces.append(Reasoning(shown))

    def call(self, name: str) -> None:
        """A call begins."""
        self._content.is_trimmed = True
        self._pieces.append(CallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._pieces.append(Arguments(self.num_calls - 1, text))


class _Stretch:
    """Text of one kind. White space waits until something follows it."""

    def __init__(self) -> None:
        self.held = ""
        self.is_trimmed = False
        """Whether it is not the message's beginning, so that white space in front of it separates, and is left out."""
        self._has_begun = False

    def add(self, text: str) -> str:
        """What is to be shown now."""
        text = self.held + text
        if self.is_trimmed and not self._has_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self.held = text[len(shown) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown
