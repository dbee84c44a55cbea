"""Suffix decoding: what most often followed the longest match, in the request or in recent outputs of all requests.

Oliaro et al. 2024, "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv 2411.04975);
vLLM's method `suffix`. In place of suffix trees there is a match index: places that match are found by n-gram, and
frequencies are counted among them.
"""

from array import array

from quire_engine.config import longest_suffix_drafts
from quire_engine.scheduler.request import Request
from quire_engine.spec_decode.lookup import LookupProposer
from quire_engine.spec_decode.match_index import MAX_STEPS, SEPARATOR, Match, RequestText, TextRing

SHARED_TOKENS = 2**20
"""Size of the shared history in tokens: thousands of outputs of some hundred tokens. At 20 bytes each it takes 20 MiB,
which is little next to any model."""

LENGTHS = (1, 3, 8)
"""Lengths of the n-grams by which text is found. Each takes about 0.3 µs and 8 bytes per token. Without 1, a fifth less
of Python source is drafted from the request itself; with 2 in addition, hardly more."""

MIN_SHARED_LENGTH = 3
"""Shorter matches are not looked for in what is shared. They occur wherever one looks, so a search takes all its steps,
and all that it finds vote: a fifth more time, for 2 % more accepted tokens."""

FACTORS = (1.0, 1.1, 0.8, 0.5, 0.3)
"""How the acceptance rates of the kinds begin: one place, places that agree, ¾ of the votes, half of them, fewer."""
_OWN, _SHARED = 0, len(FACTORS)

Draft = tuple[list[int], list[int], float]
"""Tokens, the cell of each in the acceptance rates, and how many are likely to be accepted."""
_NOTHING: Draft = ([], [], 0.0)


class SuffixProposer(LookupProposer):
    """Finds the longest end of the request's tokens that occurs earlier in them, and the longest in the latest outputs
    of all requests. Each place that matches so far votes for the token that followed it, and then, if it was chosen,
    for the next. Of the two drafts it takes the one of which more tokens are likely to be accepted.

    A request with a `cache_salt` neither reads nor writes the shared outputs: they show in other requests' speed.

    Args:
        max_tree_depth: bounds the length of match and draft together.
        max_cached_requests: how many requests' outputs are shared; with 0, none.
        max_spec_factor: a draft is at most so many times as long as the match.
        min_token_prob: a draft ends before a token whose estimated probability, by votes, is lower: its share of the
            votes, times those of the tokens before it.
        shared_tokens: size of the shared history, a power of two.
    """

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        shared_tokens: int = SHARED_TOKENS,
    ) -> None:
        lengths = [length for length in LENGTHS if length < max_tree_depth] or [1]
        # The rates of the two sources are kept apart: the same match in the request itself says more.
        super().__init__(lengths, max_tree_depth, factors=2 * FACTORS)
        self.shared: TextRing | None = None
        if max_cached_requests > 0:
            shared_lengths = [length for length in lengths if length >= MIN_SHARED_LENGTH] or lengths
            self.shared = TextRing(shared_lengths, max_tree_depth, shared_tokens, max_cached_requests)
        self.min_token_prob = min_token_prob
        self._limits = longest_suffix_drafts(max_tree_depth, max_spec_factor)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended, and share its output."""
        super().forget(request)
        if self.shared is not None and request.sampling_params.cache_salt is None:
            output = request.all_token_ids[request.num_prompt_tokens :]
            if len(output) > self.lengths[0]:
                self.shared.add(output)

    def _look_up(self, request: Request, text: RequestText, max_tokens: int) -> tuple[list[int], list[int]]:
        suffix = text.suffix()
        match = text.find(suffix, MAX_STEPS)
        draft = self._draft(text, match, max_tokens, _OWN)
        # A match that is as long as is measured cannot be beaten by another.
        if match[0] == self.window or self.shared is None or request.sampling_params.cache_salt is not None:
            return draft[:2]
        match = self.shared.find(suffix, text.hashes(), MAX_STEPS)
        other_draft = self._draft(self.shared, match, max_tokens, _SHARED)
        if other_draft[2] > draft[2]:
            draft = other_draft
        return draft[:2]

    def _draft(self, source: RequestText | TextRing, match: Match, max_tokens: int, kind: int) -> Draft:
        """A draft, the cell of each of its tokens, and how many are likely to be accepted.

        Args:
            source: where the match is.
            match: the places that vote.
            max_tokens: at most so many.
            kind: the first of the source.
        """
        length, places = match
        num_tokens = min(max_tokens, self._limits[length])
        if num_tokens < 1:
            return _NOTHING
        token_ids, cells, texts = self._vote(source, places, length, num_tokens, kind)
        if texts:
            # They agree on the rest.
            rest = texts[0][len(token_ids) :].tolist()
            if SEPARATOR in rest:
                del rest[rest.index(SEPARATOR) :]
            cells += self.rates.cells(kind + (len(texts) > 1), length + len(token_ids), len(rest))
            token_ids += rest
        expected, chance, rates = 0.0, 1.0, self.rates.rates
        for cell in cells:
            chance *= rates[cell]
            expected += chance
        return token_ids, cells, expected

    def _vote(
        self, source: RequestText | TextRing, places: list[int], length: int, num_tokens: int, kind: int
    ) -> tuple[list[int], list[int], "list[array[int]]"]:
        """Vote until all agree on what is left.

        Returns:
            The tokens chosen, the cell of each, and the texts of the places that chose them: from the first token on,
            `num_tokens` long, all alike. There are none if nothing is left, or the rest is not likely enough.
        """
        token_ids: list[int] = []
        cells: list[int] = []
        texts: list[array[int]] = []
        probability = 1.0
        # Many places lose the first vote, so only one token of each is read for it.
        ballot = [source.tokens[place] for place in places] if len(places) > 1 else []
        while ballot:
            token_id, num_votes = ballot[0], ballot.count(ballot[0])
            kind_of_vote = kind + 1
            if num_votes < len(ballot):
                token_id = max(ballot, key=ballot.count)  # of several, the first: it came latest
                num_votes = ballot.count(token_id)
                share = num_votes / len(ballot)
                probability *= share
                kind_of_vote = kind + (2 if share >= 0.75 else 3 if share >= 0.5 else 4)
            if token_id == SEPARATOR or probability < self.min_token_prob:
                return token_ids, cells, []
            cells.append(self.rates.cell(kind_of_vote, length + len(token_ids)))
            token_ids.append(token_id)
            if len(token_ids) == num_tokens:
                return token_ids, cells, []
            if num_votes < len(ballot):
                places = [place for place, vote in zip(places, ballot, strict=True) if vote == token_id]
            if num_votes < len(ballot) or not texts:
                texts = [source.after(place, num_tokens) for place in places]
                if texts.count(texts[0]) == len(texts):
                    return token_ids, cells, texts
            ballot = [text[len(token_ids)] for text in texts]
        return token_ids, cells, [source.after(places[0], num_tokens)]
