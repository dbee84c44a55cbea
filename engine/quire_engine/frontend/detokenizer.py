"""Detokenizer: tokens to text, token by token, without partial characters or parts of stop strings, at linear cost."""

from collections.abc import Callable, Sequence

from quire_engine.sampling_params import SamplingParams

__all__ = ["Decode", "IncrementalDetokenizer"]

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens skipped or not as the request wants it."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 5
"""Tokens of the prompt that can affect the text of the first output token; as many as in vLLM."""
MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so if so many tokens still end in a replacement character, it will not be completed:
the bytes are invalid, and the text shows that."""


class IncrementalDetokenizer:
    """The text of one request's output.

    A token's text may depend on the token before it (a leading space, a character split over two tokens), so each new
    token is decoded together with a few before it, at first of the prompt, and only what that adds is kept::

        tokens   … │ prefix │ pending │
                   ▲        ▲         ▲
            prefix_offset  read_offset  end        new text = decode(prefix + pending) - decode(prefix)
    """

    def __init__(self, decode: Decode, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self.text = ""
        """The output's text so far."""
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        context_text = decode(context)
        if context_text.endswith(REPLACEMENT):  # ends within a character, so it says nothing about what follows
            context, context_text = [], ""
        self._num_context_tokens = len(context)
        self._token_ids = context
        self._decode = decode
        self._prefix_offset = 0
        self._read_offset = len(context)
        self._prefix_text = context_text
        self._stop = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        held_back = 0 if self._include_stop else max(map(len, self._stop), default=1) - 1
        self._held_back = held_back
        self._num_emitted = 0

    @property
    def token_ids(self) -> list[int]:
        """The output's tokens so far."""
        return self._token_ids[self._num_context_tokens :]

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Take in several tokens at once, of which none ended the request, if that gives the same text.

        Returns:
            Whether they were taken in. If not, append them one by one: there are stop strings, or bytes that are no
            characters.
        """
        if self._stop:
            return False
        text = self._decode([*self._token_ids[self._prefix_offset :], *token_ids])
        if REPLACEMENT in text:
            return False
        self._token_ids += token_ids
        self._commit(self._token_ids, text)
        return True

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Take in one token.

        Args:
            token_id: the next token.
            is_stop_token: it ended the request; it has its place in `token_ids` but not in the text, unless stop
                strings are to be included.

        Returns:
            The stop string that the text now contains, or None. The text then ends before it, or after it when stop
            strings are to be included.
        """
        self._token_ids.append(token_id)
        if is_stop_token and not self._include_stop:
            self._flush(self._token_ids[:-1])
            self._read_offset = len(self._token_ids)
            return None
        before = len(self.text)
        self._extend(self._token_ids)
        if not self._stop or len(self._token_ids) - self._num_context_tokens <= self._min_tokens:
            return None
        return self._find_stop(before)

    def finish(self) -> None:
        """No token follows: return what was held back as incomplete."""
        self._flush(self._token_ids)
        self._held_back = 0

    def next_delta(self, *, finished: bool) -> str:
        """The text that was not returned yet and will certainly not be cut off by a stop string."""
        end = len(self.text) if finished else max(len(self.text) - self._held_back, self._num_emitted)
        delta = self.text[self._num_emitted : end]
        self._num_emitted = end
        return delta

    def _extend(self, token_ids: list[int]) -> None:
        """Decode what is pending, unless it ends within a character."""
        text = self._decode(token_ids[self._prefix_offset :])
        num_pending = len(token_ids) - self._read_offset
        if text.endswith(REPLACEMENT) and num_pending < MAX_PENDING_TOKENS:
            return
        self._commit(token_ids, text)

    def _flush(self, token_ids: list[int]) -> None:
        if self._read_offset < len(token_ids):
            self._commit(token_ids, self._decode(token_ids[self._prefix_offset :]))

    def _commit(self, token_ids: list[int], text: str) -> None:
        self.text += text[len(self._prefix_text) :]
        self._prefix_offset, self._read_offset = self._read_offset, len(token_ids)
        self._prefix_text = self._decode(token_ids[self._prefix_offset :])

    def _find_stop(self, before: int) -> str | None:
        """The stop string that appears first; only text that the last token can have completed is searched."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            start = max(before - len(stop) + 1, 0)
            index = self.text.find(stop, start)
            if index >= 0 and (found is None or index < found[0]):
                found = (index, stop)
        if found is None:
            return None
        index, stop = found
        self.text = self.text[: index + len(stop)] if self._include_stop else self.text[:index]
        self._read_offset = len(self._token_ids)  # what was pending is cut off too
        return stop
