"""Detokenizer: tokens to text, token by token, without partial characters or parts of stop strings, at linear cost."""

from collections.abc import Callable, Sequence

from quire_engine.sampling_params import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, with or without special tokens by the request."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_TOKENS = 4
"""A character has at most this many bytes, and so tokens."""
CONTEXT_TOKENS = MAX_CHARACTER_TOKENS + 1
"""Tokens of the prompt that the first output is decoded with."""
WINDOW_TOKENS = 4
"""Tokens that are decoded at a time. A larger window takes longer, a smaller one decodes its context more often."""
MAX_RUN_TOKENS = 64
"""Consecutive byte tokens after which the text is final."""


class IncrementalDetokenizer:
    """The text of one request's output: `decode(prompt + output)` without the beginning that it has in common with
    `decode(prompt)`.

    If the prompt ends within a character, the whole character is the output's. Leading spaces that a decoder strips are
    stripped from the prompt, or from the output if the prompt has no text.

    A token's text may depend on those around it, so each is decoded with a few before it, at first of the prompt::

        tokens   … │ context │ new │             text = … + decode(context + new) - decode(context)
                   ▲                ▲
              window begins    window ends       the context has text, and tokens before it change nothing

    Text that a later token may change is held back:

    - A replacement character at the end may be the beginning of a character.
    - With byte fallback, an invalid byte turns all consecutive bytes into replacement characters, also valid ones
      before it. So consecutive byte tokens are held back until another token follows, or for `MAX_RUN_TOKENS`. Stop
      strings are found in them at once.

    Args:
        decode: of the tokenizer; None: there is no text.
        params: of the request.
        prompt_token_ids: the prompt.
        byte_ids: the tokens of single bytes, if the tokenizer has byte fallback.
        skipped_ids: tokens that `decode` leaves out.
    """

    def __init__(
        self,
        decode: Decode | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        byte_ids: frozenset[int] = frozenset(),
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.text = ""
        """The output's text so far."""
        self.token_ids: list[int] = []
        """The output's tokens so far."""
        self._decode = decode
        self._byte_ids = byte_ids
        self._skipped_ids = skipped_ids
        self._stop = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._held_back = 0 if self._include_stop else max(map(len, self._stop), default=1) - 1
        self._num_emitted = 0
        self._num_settled = 0
        """Characters of `text` that no later token changes."""
        self._is_held = False
        """Whether the output ends with a replacement character that is not in `text` yet."""
        self._run_length = 0
        """Consecutive byte tokens at the end."""
        self._max_window = WINDOW_TOKENS
        self._start = 0
        """Where `text` continues after the context."""
        self._window, self._context_text = self._context(prompt_token_ids)

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Add several tokens, of which none ended the request.

        Returns:
            Whether they were added. If not, append them one by one: there are stop strings.
        """
        if self._stop:
            return False
        self.token_ids += token_ids
        if self._byte_ids.isdisjoint(token_ids):
            self._take(token_ids)
        else:
            for token_id in token_ids:
                self._take((token_id,))
        return True

    def append(self, token_id: int, *, is_stop_token: bool = False) -> str | None:
        """Add one token.

        Args:
            token_id: the next token.
            is_stop_token: it ended the request; it is in `token_ids`, but in the text only with
                `include_stop_str_in_output`.

        Returns:
            The stop string that the text now contains, or None. The text then ends before it, or after it with
            `include_stop_str_in_output`.
        """
        self.token_ids.append(token_id)
        if is_stop_token and not self._include_stop:
            return None
        before = self._take((token_id,))
        if not self._stop or len(self.token_ids) <= self._min_tokens:
            return None
        return self._find_stop(before)

    def finish(self) -> None:
        """No token follows: release the text that was held back."""
        if self._is_held:
            self.text += REPLACEMENT
            self._is_held = False
        self._num_settled = len(self.text)
        self._held_back = 0

    def next_delta(self, *, finished: bool) -> str:
        """The text that was not returned yet, and that no later token or stop string can change."""
        end = len(self.text) if finished else min(len(self.text) - self._held_back, self._num_settled)
        end = max(end, self._num_emitted)
        delta = self.text[self._num_emitted : end]
        self._num_emitted = end
        return delta

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens that the output's text depends on, and their text."""
        size = CONTEXT_TOKENS
        while self._decode is not None:
            context: list[int] = []
            in_run = True
            for token_id in reversed(prompt):
                if token_id in self._skipped_ids:
                    continue
                in_run = in_run and token_id in self._byte_ids and len(context) < MAX_RUN_TOKENS
                context.append(token_id)
                if len(context) >= size and not in_run:
                    break
            context.reverse()
            text = self._decode(context)
            if text or len(context) < size:  # or it is the whole prompt
                return context, text
            size *= 2
        return [], ""

    def _take(self, token_ids: Sequence[int]) -> int:
        """Add the text of tokens; only the last one may be a byte token. Returns where `text` may have changed."""
        old = self.text
        if self._decode is None or (self._skipped_ids and self._skipped_ids.issuperset(token_ids)):
            return len(old)
        if len(token_ids) > 1 and self._skipped_ids:
            token_ids = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        self._window += token_ids
        text, context = self._decode(self._window), self._context_text
        new = text[len(context) if text.startswith(context) else _common_length(text, context) :]
        is_run = self._window[-1] in self._byte_ids
        is_incomplete = not self._byte_ids and text.endswith(REPLACEMENT)
        self._is_held = is_incomplete and new != ""  # or it is the prompt's
        if self._is_held:
            new = new[:-1]
        changed_from, known = len(old), len(old) - self._start
        if self._num_settled == len(old):
            self.text += new[known:]
        else:
            self.text = old[: self._start] + new
            if not self.text.startswith(old):
                changed_from = self._num_settled
        self._run_length = self._run_length + 1 if is_run else 0
        if is_run and not self._is_long_run():
            return changed_from
        self._num_settled = len(self.text)
        if len(self._window) >= self._max_window:
            self._shorten_window(is_incomplete)
        return changed_from

    def _is_long_run(self) -> bool:
        """Whether so many consecutive bytes are final; but not within a character."""
        over = self._run_length - MAX_RUN_TOKENS
        return over >= MAX_CHARACTER_TOKENS or (over >= 0 and REPLACEMENT not in self.text[self._num_settled :])

    def _shorten_window(self, is_incomplete: bool) -> None:
        """Keep the last token with text as context, or as many tokens as an incomplete character may have."""
        assert self._decode is not None
        size = MAX_CHARACTER_TOKENS if is_incomplete else 1
        if self._max_window > WINDOW_TOKENS:
            size = max(size, self._max_window // 2)
        context = self._window[-size:]
        text = self._decode(context)
        while self._run_length and size < MAX_CHARACTER_TOKENS and REPLACEMENT in text:  # begins within a character
            size += 1
            context = self._window[-size:]
            text = self._decode(context)
        if self._is_held:
            text = text[:-1]
        if not text:
            self._max_window *= 2
            return
        self._window, self._context_text, self._start = context, text, len(self.text)
        self._run_length, self._max_window = 0, WINDOW_TOKENS

    def _find_stop(self, before: int) -> str | None:
        """The first stop string in the text that the last token may have completed."""
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
        self._is_held = False  # the pending character is cut off, too
        return stop


def _common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
