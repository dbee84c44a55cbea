"""Beam search over the engine's own requests: each step generates one more token of every beam.

Only `LLM` and `AsyncLLM` know it. A step is one request per beam with `max_tokens=1` and the log-probabilities of the
most likely tokens; it is cheap because the prefix cache has all but the last few tokens of each.

Semantics, `length_penalty` and `early_stopping` included, are those of transformers' `generate(num_beams=…)`:

1. The best `max(2, 1 + number of end tokens) * beam_width` continuations of all beams are candidates, so that enough
   remain when the best ones end.
2. Those of the best `beam_width` candidates that end (an end-of-sequence token, or the length) are finished, with the
   score `cumulative log-probability / length ** length_penalty`; the best `beam_width` finished ones are kept.
3. The best `beam_width` candidates that do not end continue.
4. The search ends when `beam_width` sequences are finished and, as far as `early_stopping` asks for that check, no live
   beam could become better than the worst of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire_engine.errors import EngineError, RequestError
from quire_engine.frontend.detokenizer import Decode
from quire_engine.messages import EngineCoreReady, EngineCoreRequest
from quire_engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire_engine.sampling_params import MAX_BEAM_LOGPROBS, SamplingParams


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The search's parameters, under vLLM's names; `early_stopping` is transformers'.

    Raises:
        RequestError: a value is out of its range; the message names the parameter and what is allowed.
    """

    beam_width: int
    """Number of beams, and of returned sequences."""
    max_tokens: int
    """The most tokens to generate; the context may end before."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end a sequence."""
    temperature: float = 0.0
    """For the steps' requests. As in vLLM, beams follow the model's own log-probabilities all the same."""
    length_penalty: float = 1.0
    """A finished sequence's log-probability is divided by the length to this power: above 0 favours long ones."""
    include_stop_str_in_output: bool = False
    """Keep the text of the end-of-sequence token."""
    early_stopping: bool | Literal["never"] = False
    """True: stop as soon as `beam_width` sequences are finished. False: when the best beam, at its present length, is
    worse than all of them. "never": when no beam could become better than one of them at any length."""

    def __post_init__(self) -> None:
        """Check every range."""
        for name, ok, allowed in (
            ("beam_width", 1 <= self.beam_width <= MAX_BEAM_LOGPROBS // 2, f"from 1 to {MAX_BEAM_LOGPROBS // 2}"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 1e4, "a number from 0 to 10000"),
            ("length_penalty", -100 <= self.length_penalty <= 100, "from -100 to 100"),
            ("early_stopping", self.early_stopping in (True, False, "never"), "true, false or 'never'"),
        ):
            if not ok:
                raise RequestError.of(name, f"is {getattr(self, name)}; it must be {allowed}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence."""

    tokens: list[int]
    """The prompt and its continuation, with the end-of-sequence token."""
    cum_logprob: float
    """Sum of the continuation's log-probabilities."""
    score: float = 0.0
    """`cum_logprob / length ** length_penalty`, by which sequences are ranked."""
    text: str | None = None
    """The text of `tokens`."""
    finish_reason: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each token after the prompt, the log-probabilities of the most likely ones."""


@dataclass(slots=True)
class BeamSearchOutput:
    """All sequences found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def next_logprobs(output: RequestOutput) -> Mapping[int, Logprob]:
    """The next tokens of a beam, from the output of a step's request.

    Raises:
        EngineError: the request failed.
    """
    logprobs = output.outputs[0].logprobs
    if logprobs is None:
        raise EngineError(f"a step of the beam search failed: {output.error or output.outputs[0].finish_reason}")
    return logprobs[0]


class BeamSearch:
    """The search for one prompt: `advance` takes the continuations of `beams`."""

    def __init__(
        self,
        request: EngineCoreRequest,
        params: BeamSearchParams,
        ready: EngineCoreReady,
    ) -> None:
        if request.prompt_parts:
            name = "multi_modal_data" if request.encode_seconds else "prompt_embeds"
            raise RequestError.of(name, "is given with a beam search, which takes token ids")
        self.params = params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.beams = [BeamSearchSequence(list(request.prompt_token_ids), 0.0)]
        """The live beams, the best first; empty once the search has ended."""
        self.finished: list[BeamSearchSequence] = []
        """The best so far."""
        own = [] if request.eos_token_id is None else [request.eos_token_id]
        self._eos_token_ids = frozenset(() if params.ignore_eos else [*ready.eos_token_ids, *own])
        self._max_tokens = min(params.max_tokens, ready.max_model_len - self.num_prompt_tokens)
        self._num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        num_logprobs = min(self._num_candidates, ready.vocab_size)
        if num_logprobs > MAX_BEAM_LOGPROBS:
            raise RequestError.of(
                "beam_width",
                f"is {params.beam_width}; with {len(self._eos_token_ids)} end-of-sequence tokens it must be "
                f"at most {MAX_BEAM_LOGPROBS // (1 + len(self._eos_token_ids))}",
            )
        self.step_params = SamplingParams(
            temperature=params.temperature,
            max_tokens=1,
            ignore_eos=True,
            logprobs=num_logprobs,
            beam_width=params.beam_width,
            skip_special_tokens=False,
        )
        """Sampling parameters of the request for a beam's next token."""

    def advance(self, continuations: Sequence[Mapping[int, Logprob]]) -> None:
        """Take one step.

        Args:
            continuations: for each of `beams`, the log-probabilities of its most likely next tokens.
        """
        width, length = self.params.beam_width, len(self.beams[0].tokens) - self.num_prompt_tokens + 1
        candidates = sorted(self._continue(continuations), key=lambda candidate: -candidate[0])[: self._num_candidates]
        is_last = length == self._max_tokens
        ended, going_on = [], []
        for rank, candidate in enumerate(candidates):
            if not (is_last or candidate[2] in self._eos_token_ids):
                going_on.append(candidate)
            elif rank < width:
                ended.append(self._extend(candidate, length))
        self.finished = sorted(self.finished + ended, key=lambda sequence: -sequence.score)[:width]
        self.beams = [self._extend(candidate, length) for candidate in going_on[:width]]
        if self.beams and not self._can_improve(length):
            self.beams = []

    def _continue(
        self, continuations: Sequence[Mapping[int, Logprob]]
    ) -> Iterator[tuple[float, BeamSearchSequence, int, Mapping[int, Logprob]]]:
        """All continuations of all beams: (log-probability so far, beam, token id, the step's log-probabilities)."""
        for beam, logprobs in zip(self.beams, continuations, strict=True):
            for token_id, entry in logprobs.items():
                yield beam.cum_logprob + entry.logprob, beam, token_id, logprobs

    def _extend(
        self, candidate: tuple[float, BeamSearchSequence, int, Mapping[int, Logprob]], length: int
    ) -> BeamSearchSequence:
        cum_logprob, beam, token_id, logprobs = candidate
        return BeamSearchSequence(
            [*beam.tokens, token_id],
            cum_logprob,
            score=cum_logprob / float(length) ** self.params.length_penalty,
            finish_reason="stop" if token_id in self._eos_token_ids else "length",
            logprobs=[*beam.logprobs, dict(logprobs)],
        )

    def _can_improve(self, length: int) -> bool:
        """Whether a live beam could still end with a better score than the worst finished one."""
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self._max_tokens
        best: float = self.beams[0].cum_logprob / float(length) ** self.params.length_penalty
        return best > self.finished[-1].score

    def completions(self, decode: Decode) -> list[CompletionOutput]:
        """The results as outputs of one request; `decode` returns the text of token ids."""
        completions = []
        for index, sequence in enumerate(self.finished):
            token_ids = sequence.tokens[self.num_prompt_tokens :]
            keep_all = sequence.finish_reason != "stop" or self.params.include_stop_str_in_output
            completions.append(
                CompletionOutput(
                    index,
                    decode(token_ids if keep_all else token_ids[:-1]),
                    token_ids,
                    sequence.cum_logprob,
                    sequence.logprobs,
                    sequence.finish_reason,
                )
            )
        return completions
