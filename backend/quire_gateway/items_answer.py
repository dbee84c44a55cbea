"""An answer that is a list of items: reasoning, texts and calls, in the order in which the model makes them."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from quire_gateway.answers import Answer
from quire_gateway.chat import ChatRequest
from quire_gateway.chat_answers import AnswerReader
from quire_gateway.output_parser import Arguments, CallStart, Content, OutputParser, Piece, plain
from quire_gateway.triton_messages import Delta

Event = dict[str, Any]


class Item(Protocol):
    """An item that is coming about. `begin`, `add` and `end` give the events of a stream."""

    kind: str

    def begin(self) -> Iterator[Event]: ...
    def add(self, text: str) -> Iterator[Event]: ...
    def end(self, status: str) -> Iterator[Event]: ...
    def shown(self, status: str) -> dict[str, Any]:
        """As it is in the answer."""


def _kind_of(piece: Piece) -> str:
    """The kind of item that begins with a piece."""
    if isinstance(piece, CallStart):
        return "function_call"
    return "message" if isinstance(piece, Content) else "reasoning"


class ItemsAnswer(Answer):
    """An answer of items.

    Args:
        request: what was asked for.
        answer_id: the answer's name.
        make_parser: makes the parser of the text; None: all of it is content.
        make_item: makes the item of an index, from its first piece, which is of the kind `function_call`, `message` or
            `reasoning`.
    """

    ending = b""

    def __init__(
        self,
        request: ChatRequest,
        answer_id: str,
        make_parser: Callable[[], OutputParser] | None,
        make_item: Callable[[int, Piece, str], Item],
    ) -> None:
        super().__init__(request, answer_id)
        self._reader = AnswerReader(request, make_parser() if make_parser else OutputParser(plain))
        self._make_item = make_item
        self._items: list[Item] = []
        self._done: list[dict[str, Any]] = []

    def whole(self, deltas: list[tuple[int, Delta]]) -> dict[str, Any]:
        """The answer with all items."""
        for number, delta in deltas:
            self._count(number, delta)
            for _ in self._news(delta):
                pass
        return self._shown()

    def frame(self, event: Event) -> bytes:
        """An event as it is sent."""
        return f"event: {event['type']}\n".encode() + super().frame(event)

    @abstractmethod
    def _shown(self) -> dict[str, Any]:
        """The answer as it is now."""

    @abstractmethod
    def _end(self, delta: Delta, reason: str) -> str:
        """Note the end, and return the status of the last item."""

    def _news(self, delta: Delta) -> Iterator[Event]:
        reason = delta.finish_reasons[0]
        for piece in self._reader.read(delta.texts[0], is_last=reason is not None):
            yield from self._piece(piece)
        if reason is not None:
            yield from self._end_item(self._end(delta, reason))

    def _piece(self, piece: Piece) -> Iterator[Event]:
        kind = self._items[-1].kind if isinstance(piece, Arguments) else _kind_of(piece)
        is_other = len(self._items) == len(self._done) or self._items[-1].kind != kind
        if is_other or isinstance(piece, CallStart):
            yield from self._end_item("completed")
            self._items.append(self._make_item(len(self._items), piece, kind))
            yield from self._items[-1].begin()
        if not isinstance(piece, CallStart):
            yield from self._items[-1].add(piece.text)

    def _end_item(self, status: str) -> Iterator[Event]:
        if len(self._items) > len(self._done):
            yield from self._items[-1].end(status)
            self._done.append(self._items[-1].shown(status))
