"""LogprobsProcessor: log-probabilities of token ids → those of tokens with their texts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from quire_engine.frontend.request_state import RequestState
from quire_engine.frontend.tokenizer import AnyTokenizer, token_bytes
from quire_engine.messages import PromptLogprobs, TokenLogprobs
from quire_engine.outputs import CompletionOutput, Logprob


class LogprobsProcessor:
    """Knows the text of each token by itself."""

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._token_bytes = token_bytes(tokenizer)
        self._token_texts: dict[int, tuple[str, list[int] | None]] = {}

    def add(self, state: RequestState, completion: CompletionOutput, entries: TokenLogprobs, text_offset: int) -> None:
        """Add the entries of the next token of a delta."""
        assert state.cumulative_logprob is not None
        state.cumulative_logprob += entries[0][1]
        completion.logprobs = completion.logprobs or []
        position = {token_id: self._logprob(state, token_id, logprob, rank) for token_id, logprob, rank in entries}
        position[entries[0][0]].text_offset = text_offset
        completion.logprobs.append(position)

    def of_prompt(self, state: RequestState, chunks: list[PromptLogprobs]) -> "UnpackedLogprobs":
        """The entries of a prompt."""
        return UnpackedLogprobs(chunks, partial(self._logprob, state))

    def text_offset(self, state: RequestState, token_id: int) -> int:
        """Where the text of the next token begins; of one that continues a character, where that character begins."""
        text, own_bytes = state.detokenizer.text, self._token_text(token_id)[1]
        continues = own_bytes and 0x80 <= own_bytes[0] < 0xC0
        return len(text.rstrip("\N{REPLACEMENT CHARACTER}") if continues else text)

    def _logprob(self, state: RequestState, token_id: int, logprob: float, rank: int) -> Logprob:
        text, own_bytes = self._token_text(token_id) if state.request.sampling_params.detokenize else (None, None)
        return Logprob(logprob, rank, text, own_bytes)

    def _token_text(self, token_id: int) -> tuple[str, list[int] | None]:
        """A token's own text, and its bytes if these differ from the text's."""
        if token_id not in self._token_texts:
            own_bytes = self._token_bytes(token_id)
            text = own_bytes.decode(errors="replace")
            self._token_texts[token_id] = text, None if text.encode() == own_bytes else list(own_bytes)
        return self._token_texts[token_id]


class UnpackedLogprobs(Sequence[dict[int, Logprob] | None]):
    """A prompt's log-probabilities, unpacked on access: a long prompt has half a million.

    Args:
        chunks: from the worker, in order.
        make: makes an entry from a token's id, log-probability and rank.
    """

    def __init__(self, chunks: list[PromptLogprobs], make: Callable[[int, float, int], Logprob]) -> None:
        self._make = make
        self._width = 1 + (chunks[0].num_logprobs if chunks else 0)
        self._token_ids = np.frombuffer(b"".join(chunk.token_ids for chunk in chunks), np.int32)
        self._logprobs = np.frombuffer(b"".join(chunk.logprobs for chunk in chunks), np.float32)
        self._ranks = np.frombuffer(b"".join(chunk.ranks for chunk in chunks), np.int32)

    def __len__(self) -> int:
        return 1 + len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        positions = range(len(self))[index]
        return self._at(positions) if isinstance(positions, int) else list(map(self._at, positions))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __reduce__(self) -> Any:
        """A copy or pickle is a plain list."""
        return list, (list(self),)

    def _at(self, position: int) -> dict[int, Logprob] | None:
        if position == 0:
            return None
        row = slice((position - 1) * self._width, position * self._width)
        ranks = (int(self._ranks[position - 1]), *range(1, self._width))
        columns = zip(self._token_ids[row].tolist(), self._logprobs[row].tolist(), ranks, strict=True)
        return {token_id: self._make(token_id, logprob, rank) for token_id, logprob, rank in columns}
