"""Prompt lookup: what followed the last time that the request's latest tokens occurred in it.

Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); vLLM's method `ngram`.
"""

from quire_engine.scheduler.request import Request
from quire_engine.spec_decode.lookup import LookupProposer
from quire_engine.spec_decode.match_index import RequestText

MAX_LEVELS = 3
"""Each takes about 0.3 µs and 8 bytes per token of a request."""


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
