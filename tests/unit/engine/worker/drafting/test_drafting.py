"""What happens around a method that drafts: at the end of a step, and when the next one verifies what was drawn."""

import logging

import numpy as np
import pytest
import torch
from quire_engine.device.transfer import CPU
from quire_engine.messages import (
    CachedRequestData,
    DraftTokens,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import SampledRows
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.drafting.drafting import Drafting
from support.drafting import BLOCK_SIZE, add_request, append_tokens, make_batch
from support.scheduling import VOCAB_SIZE


class Method:
    """Draws from flat logits, and notes what it is told."""

    bytes_per_block = 0

    def __init__(self, needs_hidden: bool = False) -> None:
        self.needs_hidden = needs_hidden
        self.error: Exception | None = None
        self.forgotten: list[list[int]] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.hidden: list[list[float]] | None = None

    def initialize_cache(self, num_blocks: int) -> None:
        raise NotImplementedError

    def forget_blocks(self, block_ids: list[int]) -> None:
        self.forgotten.append(block_ids)

    def draft(self, slots: np.ndarray, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        if self.error is not None:
            raise self.error
        self.slots = slots.tolist()
        self.counts = [sum(sampling.num_rows(place) > row for place in range(9)) for row in range(len(slots))]
        self.hidden = None if hidden_SE is None else hidden_SE.tolist()
        for place in range(sampling.num_places):
            sampling.draw(torch.zeros(sampling.num_rows(place), VOCAB_SIZE))
        return sampling.drafts()


class Bench:
    """Three requests whose last token a step has computed; `b` had two drafts, of which one was right."""

    def __init__(self, by_chance: bool = False, needs_hidden: bool = False) -> None:
        self.batch: InputBatch = make_batch()
        for number, name in enumerate("abc"):
            temperature = 0.0 if name == "c" else 1.0
            add_request(self.batch, name, [number] * (number + 3), [number], temperature=temperature, seed=number)
        self.method = Method(needs_hidden)
        self.drafting = Drafting(self.method, self.batch, CPU, by_chance)

    @property
    def sampled(self) -> SampledRows:
        slots = [self.batch.slots[name] for name in "abbbc"]
        return SampledRows(
            request_ids=["a", "b", "c"], token_rows=np.arange(5), slots=np.array(slots),
            offsets=np.array([0, 0, 1, 2, 0]), drafts={"b": [7, 8]},
        )  # fmt: skip

    def step(
        self, wanted: dict[str, int], with_grammar: tuple[str, ...] = (), between: object = None
    ) -> ModelRunnerOutput:
        """A step after which so many drafts are wanted.

        Args:
            wanted: by request.
            with_grammar: requests.
            between: called after the step was submitted, before its tokens are known.
        """
        output = SchedulerOutput({"a": 1, "b": 3, "c": 1}, num_drafts_wanted=wanted, draft_token_ids={"b": [7, 8]})
        if with_grammar:
            output.grammar_bitmask = GrammarBitmask(list(with_grammar), b"")
        hidden_RE = torch.arange(5.0)[:, None]
        draft = self.drafting.after(output, self.sampled, hidden_RE)
        hidden_RE.fill_(-1.0)  # the next step overwrites them
        result = ModelRunnerOutput({"a": [5], "b": [7, 9], "c": [6]})
        if callable(between):
            between()
        for name, token_ids in result.sampled_token_ids.items():
            if name in self.batch.slots:
                append_tokens(self.batch, self.batch.slots[name], token_ids)
        draft(result)
        return result


def test_drafts_go_to_the_requests_that_they_are_wanted_for_the_longest_first() -> None:
    bench = Bench()
    result = bench.step({"a": 1, "b": 4, "c": 2})
    assert bench.method.slots == [bench.batch.slots[name] for name in "bca"]
    assert bench.method.counts == [4, 2, 1]
    assert {name: (own.start, len(own.token_ids)) for name, own in result.drafts.items()} == {
        "a": (4, 1), "b": (6, 4), "c": (6, 2),
    }  # fmt: skip
    assert list(bench.step({"b": 3}).drafts) == ["b"]
    assert bench.method.hidden is None


def test_a_method_reads_the_hidden_states_that_the_last_tokens_were_sampled_from() -> None:
    bench = Bench(needs_hidden=True)
    bench.step({"a": 1, "b": 4, "c": 2})
    assert bench.method.hidden == [[2.0], [4.0], [0.0]], "of b the row of the first draft, behind which 9 was sampled"


def test_a_failure_costs_the_drafts_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.method.error = RuntimeError("no memory")
    with caplog.at_level(logging.ERROR):
        result = bench.step({"a": 1, "b": 4})
    assert result.drafts == {}
    assert result.sampled_token_ids == {"a": [5], "b": [7, 9], "c": [6]}
    assert result.draft_seconds > 0
    assert "no tokens are drafted after a step of 3 requests" in caplog.text
    assert "no memory" in caplog.text
    bench.method.error = None
    assert set(bench.step({"a": 1, "b": 4}).drafts) == {"a", "b"}, "the lock is free, and the next step has drafts"


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_request_that_has_left_meanwhile_is_not_drafted_for(is_replaced: bool) -> None:
    """Whether another of the same name has its slot, or nobody."""
    bench = Bench()

    def leave() -> None:
        bench.batch.remove("b")
        if is_replaced:
            add_request(bench.batch, "b", [1] * 5, [8])

    result = bench.step({"a": 2, "b": 4}, between=leave)
    assert list(result.drafts) == ["a"]
    bench = Bench(needs_hidden=True)
    result = bench.step({"b": 4}, between=lambda: bench.batch.remove("b"))
    assert (result.drafts, bench.method.slots) == ({}, [])


def test_blocks_that_belong_to_others_now_are_forgotten() -> None:
    """Those that a prefix was found in are not."""
    bench = Bench()
    new = NewRequestData("d", [1] * 11, 11, SamplingParams(), [], [20, 21, 22], 2 * BLOCK_SIZE)
    cached = CachedRequestData(["a", "b"], [[30], [31, 32]], [3, 4])
    bench.drafting.update_blocks(SchedulerOutput({}, new_requests=[new], cached_requests=cached))
    assert bench.method.forgotten == [[22, 30, 31, 32]]
    bench.drafting.update_blocks(SchedulerOutput({}, cached_requests=CachedRequestData(["a"], [[]], [4])))
    assert len(bench.method.forgotten) == 1


def test_blocks_of_states_are_not_forgotten_as_if_they_were_blocks_of_tokens() -> None:
    bench = Bench()
    bench.drafting = Drafting(bench.method, InputBatch(4, 64, BLOCK_SIZE, VOCAB_SIZE, 3, has_states=True), CPU, False)
    new = NewRequestData("d", [1] * 11, 11, SamplingParams(), [], [20, 21, -1, 22, 23, 7, 24, 25, 99], BLOCK_SIZE)
    cached = CachedRequestData(["a", "b"], [[30, 31, 98], [32, 33, -1, 34, 35, 97]], [3, 4])
    bench.drafting.update_blocks(SchedulerOutput({}, new_requests=[new], cached_requests=cached))
    assert bench.method.forgotten == [[22, 23, 24, 25, 30, 31, 32, 33, 34, 35]]


def rows_of(bench: Bench, **drafts: list[int]) -> SampledRows:
    """The rows of a step with these drafts."""
    names = [name for name in bench.batch.slots if name in drafts]
    counts = [len(drafts[name]) + 1 for name in names]
    return SampledRows(
        request_ids=names,
        token_rows=np.arange(sum(counts)),
        slots=np.repeat([bench.batch.slots[name] for name in names], counts),
        offsets=np.concatenate([np.arange(count) for count in counts]),
        drafts={name: own for name, own in drafts.items() if own},
    )


def test_what_was_drawn_is_verified_with_what_it_was_drawn_from() -> None:
    bench = Bench(by_chance=True)
    drafts = bench.step({"a": 3, "b": 2, "c": 2}).drafts
    a, b, c = (drafts[name].token_ids for name in "abc")
    verified = bench.drafting.to_verify(rows_of(bench, a=a, b=b[:1], c=c))
    assert verified is not None
    assert verified.rows.tolist() == [0, 1, 2, 4], "neither the rows behind all drafts, nor those of a greedy request"
    assert verified.token_ids.tolist() == [*a, b[0]]
    torch.testing.assert_close(verified.probabilities, torch.full((4, VOCAB_SIZE), 1 / VOCAB_SIZE))
    assert bench.drafting.to_verify(rows_of(bench, a=a, b=b)) is None, "once"


def test_other_drafts_than_those_drawn_are_not_accepted_by_chance() -> None:
    def verified(*, drafts: object = None, between: object = None, wanted: int = 3) -> bool:
        bench = Bench(by_chance=True)
        own = bench.step({"a": wanted}).drafts["a"].token_ids
        if callable(between):
            between(bench)
        return bench.drafting.to_verify(rows_of(bench, a=drafts(own) if callable(drafts) else own)) is not None

    def replace(bench: Bench) -> None:
        bench.batch.remove("a")
        add_request(bench.batch, "a", [1] * 4, [8], temperature=1.0)

    assert verified()
    assert not verified(drafts=lambda own: [own[0], (own[1] + 1) % VOCAB_SIZE])
    assert not verified(drafts=lambda own: [*own, 5])
    assert not verified(drafts=lambda own: [])
    assert not verified(between=lambda bench: append_tokens(bench.batch, bench.batch.slots["a"], [1])), "behind a token"
    assert not verified(between=replace), "of another request in the same slot, with as many tokens"


def test_drafts_of_requests_with_a_grammar_are_never_accepted_by_chance() -> None:
    bench = Bench(by_chance=True)
    drafts = bench.step({"a": 2, "b": 2}, with_grammar=("b",)).drafts
    assert bench.drafting.to_verify(rows_of(bench, b=drafts["b"].token_ids)) is None
    assert bench.drafting.to_verify(rows_of(bench, a=drafts["a"].token_ids)) is not None


def test_no_drafts_are_accepted_by_chance_unless_that_is_set() -> None:
    bench = Bench()
    drafts = bench.step({"a": 2, "b": 2}).drafts
    assert bench.drafting.to_verify(rows_of(bench, a=drafts["a"].token_ids)) is None
