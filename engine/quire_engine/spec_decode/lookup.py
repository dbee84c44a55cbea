"""Methods that look drafts up: the text of each request, how often such drafts were accepted, and prompt lookup.

Prompt lookup drafts what followed the last time that the request's latest tokens occurred in it: Saxena 2023, "Prompt
Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); vLLM's method `ngram`.
"""

from collections.abc import Sequence

from quire_engine.messages import DraftTokens
from quire_engine.scheduler.request import Request
from quire_engine.spec_decode.match_index import RequestText

MAX_LEVELS = 3
"""Each takes about 0.3 µs and 8 bytes per token of a request."""


class AcceptanceRates:
    """How often a token was accepted, by kind of draft and length of match, over all requests.

    With each token that is accepted, the match is one longer. So the token at index i of a draft from a match of length
    n is filed under n + i, and a rate is that of a token whose predecessors were accepted.

    Args:
        factors: for each kind of draft, what its rates are before anything was accepted, relative to `PRIOR`.
    """

    BUCKETS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 28)
    """The shortest match of each bucket."""
    PRIOR = (0.2, 0.5, 0.5, 0.6, 0.65, 0.75, 0.8, 0.85, 0.9, 0.92)
    """What they are to begin with: about as measured on Python source (tests/benchmarks/proposers.py)."""
    WEIGHT = 1 / 64
    """Weight of the latest token in a rate, which is a moving average: it forgets what is a few hundred tokens old."""
    MINIMUM = 0.01
    """A rate of 0 would never be tried again."""

    def __init__(self, factors: Sequence[float]) -> None:
        self.rates = [min(rate * factor, 0.95) for factor in factors for rate in self.PRIOR]
        """By cell: of the first kind, then of the next."""
        buckets = [sum(length >= shortest for shortest in self.BUCKETS) - 1 for length in range(self.BUCKETS[-1] + 1)]
        self._cells = [[max(b, 0) + kind * len(self.BUCKETS) for b in buckets] for kind in range(len(factors))]

    def cell(self, kind: int, length: int) -> int:
        """The cell of a token that follows a match of `length`."""
        cells = self._cells[kind]
        return cells[length] if length < len(cells) else cells[-1]

    def cells(self, kind: int, length: int, num_tokens: int) -> list[int]:
        """The cells of the tokens of a draft of one kind, from a match of `length`."""
        cells = self._cells[kind][length : length + num_tokens]
        if len(cells) < num_tokens:
            cells += self._cells[kind][-1:] * (num_tokens - len(cells))
        return cells

    def learn(self, token_ids: Sequence[int], cells: Sequence[int], actual: Sequence[int]) -> None:
        """Compare a draft with the tokens that came; those after the first difference say nothing."""
        rates = self.rates
        for token_id, cell, came in zip(token_ids, cells, actual, strict=False):
            if token_id != came:
                rates[cell] = max(rates[cell] * (1 - self.WEIGHT), self.MINIMUM)
                return
            rates[cell] += (1 - rates[cell]) * self.WEIGHT


class _Draft:
    """The last draft of a request, to be compared with the tokens that come."""

    __slots__ = ("cells", "text", "token_ids")

    def __init__(self, text: RequestText) -> None:
        self.text = text
        self.token_ids: list[int] = []
        self.cells: Sequence[int] = ()


class LookupProposer:
    """Base of proposers that look drafts up in the request's own text.

    Args:
        lengths: of the n-grams by which text is found, ascending.
        window: how long a match is measured, in tokens.
        factors: for each kind of draft, how its acceptance rates begin.
    """

    def __init__(self, lengths: Sequence[int], window: int, factors: Sequence[float]) -> None:
        self.lengths = lengths
        self.window = window
        self.rates = AcceptanceRates(factors)
        self._drafts: dict[str, _Draft] = {}

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        """Draft the next tokens, at most `max_tokens`; empty if there is no draft.

        It takes in the tokens that came since the last proposal, however many. The rates are shared, so a request with
        a `cache_salt` leaves them alone.
        """
        draft = self._drafts.get(request.request_id)
        if draft is None:
            draft = self._drafts[request.request_id] = _Draft(RequestText(self.lengths, self.window))
        text = draft.text
        new_token_ids = request.all_token_ids[text.num_tokens :]
        if new_token_ids:
            if draft.token_ids and request.sampling_params.cache_salt is None:
                self.rates.learn(draft.token_ids, draft.cells, new_token_ids)
            text.extend(new_token_ids)
        draft.token_ids, draft.cells = self._look_up(request, text, max_tokens)
        rates = self.rates.rates
        return DraftTokens(request.num_tokens, draft.token_ids, [rates[cell] for cell in draft.cells])

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended; nothing, if it never had a proposal."""
        self._drafts.pop(request.request_id, None)

    def _look_up(self, request: Request, text: RequestText, max_tokens: int) -> tuple[list[int], list[int]]:
        """A draft, and the cell of each of its tokens."""
        raise NotImplementedError


class NgramProposer(LookupProposer):
    """Finds the longest n-gram that ends the request's tokens and occurs earlier in them, and the most recent place of
    it, and drafts what followed there. That may reach into the draft: text that repeats itself goes on repeating.

    With more than `MAX_LEVELS` lengths some have no level of their own in the index. Of these it may miss one whose
    last tokens, as many as the level below has, have occurred `MAX_STEPS` times since.

    Args:
        prompt_lookup_min: the shortest n-gram, in tokens; at least 1.
        prompt_lookup_max: the longest; at least `prompt_lookup_min`.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        num_levels = min(MAX_LEVELS, prompt_lookup_max - prompt_lookup_min + 1)
        # From the shortest to the longest, by equal factors.
        ratio = prompt_lookup_max / prompt_lookup_min
        lengths = {round(prompt_lookup_min * ratio ** (level / max(num_levels - 1, 1))) for level in range(num_levels)}
        super().__init__(sorted(lengths), prompt_lookup_max, factors=[0.7])

    def _look_up(self, request: Request, text: RequestText, max_tokens: int) -> tuple[list[int], list[int]]:
        length, places = text.find(text.suffix(), enough=1)
        if not places:
            return [], []
        return text.after(places[0], max_tokens).tolist(), self.rates.cells(0, length, max_tokens)
