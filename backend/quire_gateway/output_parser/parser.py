"""OutputParser: the text of one answer, in whatever parts it comes."""

from quire_gateway.output_parser.message import Message, Piece
from quire_gateway.output_parser.text import Form, Text


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
