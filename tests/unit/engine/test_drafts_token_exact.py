"""With drafts, right and wrong ones, the engine says token for token what it says without, whatever the request."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.core.engine_core import EngineCore
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.messages import (
    DraftTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)
from quire_engine.scheduler.request import Request
from support.every_kind import KINDS, PARAMS, PROMPTS, WAYS, Told, core_of, make_llm
from support.scheduling import RandomProposer, draft_always

VOCAB_SIZE = 900
"""Wrong drafts are below it."""


class Undisturbed:
    """What comes of every request without drafts.

    Attributes:
        told: in the order of the prompts.
        messages: of the requests, as the engine core gets them.
        token_ids: by request, what it samples; where a stop string ends one, more than the caller hears of.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[EngineCoreRequest] = []
        self.token_ids: dict[str, list[int]] = {}
        add_request, step = EngineCore.add_request, EngineCore.step

        def add(core: EngineCore, message: EngineCoreRequest, message_number: int = 0) -> None:
            self.messages.append(message)
            add_request(core, message, message_number)

        def note(core: EngineCore) -> EngineCoreOutputs:
            outputs = step(core)
            for output in outputs.outputs:
                self.token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "add_request", add)
            patch.setattr(EngineCore, "step", note)
            self.told = [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

    def continuation(self, request: Request, num_tokens: int) -> list[int]:
        """What comes next of a request, as far as that is known; behind it, anything."""
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        for message in self.messages:
            if (message.prompt_token_ids, message.sampling_params) == (
                request.all_token_ids[:num_prompt],
                request.sampling_params,
            ):
                known = self.token_ids[message.request_id][num_output : num_output + num_tokens]
                return known + [num_output] * (num_tokens - len(known))
        raise AssertionError("a request that there was not before")


class Accepted:
    """How many drafts were accepted, how many were not, and after how many steps a request that is drafted for had gone
    on before its token was known.

    Args:
        core: whose.
    """

    def __init__(self, core: EngineCore) -> None:
        self.num_accepted = self.num_rejected = self.num_ahead = 0
        self._scheduler = core.scheduler
        self._update = core.scheduler.update_from_output
        core.scheduler.update_from_output = self._note  # type: ignore[method-assign]

    def _note(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        for request_id, drafts in scheduler_output.draft_token_ids.items():
            num_accepted = len(runner_output.sampled_token_ids[request_id]) - 1
            self.num_accepted += num_accepted
            self.num_rejected += len(drafts) - num_accepted
        self.num_ahead += any(
            request.is_drafted and request.num_output_placeholders and request.num_computed_tokens > request.num_tokens
            for request in self._scheduler.running
        )
        return self._update(scheduler_output, runner_output)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Callable[[str], Path]) -> Callable[..., Undisturbed]:
    """By settings of the model, as they may change tokens."""
    known: dict[tuple[Any, ...], Undisturbed] = {}

    def undisturbed(**settings: Any) -> Undisturbed:
        key = tuple(settings.items())
        if key not in known:
            llm = make_llm(checkpoint("tinypy"), async_scheduling=False, **settings)
            with pytest.MonkeyPatch.context() as monkeypatch:
                known[key] = Undisturbed(llm, monkeypatch)
            llm.shutdown()
        return known[key]

    return undisturbed


DRAFTING_WAYS: dict[str, dict[str, Any]] = {
    **WAYS,
    "ahead": {"async_scheduling": True},
    "int8": {"quantization": "int8"},
    "two ranks": {"tensor_parallel_size": 2, "async_scheduling": False},
    "two ranks ahead": {"tensor_parallel_size": 2, "async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2},
}
RESTING = "ahead", "two ranks ahead"
"""Ways in which requests that rest go on before their tokens are known."""


@pytest.mark.parametrize("way", [*DRAFTING_WAYS, *(f"{way}, resting" for way in RESTING)])
def test_every_kind_of_request_gets_what_it_gets_without(
    way: str, undisturbed: Callable[..., Undisturbed], checkpoint: Callable[[str], Path]
) -> None:
    settings, rests = DRAFTING_WAYS[way.removesuffix(", resting")], way.endswith(", resting")
    expected = undisturbed(**{name: settings[name] for name in ("quantization",) if name in settings})
    llm = make_llm(checkpoint("tinypy"), **{"async_scheduling": False, **settings})
    scheduler, accepted = core_of(llm).scheduler, Accepted(core_of(llm))
    proposer = RandomProposer(Random(way), expected.continuation, VOCAB_SIZE)
    proposer.share = 0.7
    draft_always(scheduler, proposer, VOCAB_SIZE, propose_seconds=1.5 if rests else 0.0)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output, want, name in zip(outputs, expected.told, [*KINDS] * 2, strict=True):
        told = Told(output)
        assert (told.text, told.end, told.ranks) == (want.text, want.end, want.ranks), name
        assert told.logprobs == pytest.approx(want.logprobs, abs=1e-4), name
    assert accepted.num_accepted > 5
    assert (accepted.num_ahead > 0) == rests
    # In small steps there is only room beside requests with a grammar, which cuts what is wrong.
    assert accepted.num_rejected > 5 or way == "small steps"
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == (way == "few blocks")
    assert (stats.num_failed_steps, stats.num_blocks_used, stats.num_running) == (0, 0, 0)
    scheduler.check_integrity()
    llm.shutdown()


def run(core: EngineCore, messages: Sequence[EngineCoreRequest]) -> dict[str, list[int]]:
    """What each request gets, until all have ended."""
    token_ids: dict[str, list[int]] = {message.request_id: [] for message in messages}
    for message in messages:
        core.add_request(message)
    while core.scheduler.requests:
        core.wait_for_grammar()
        for output in core.step().outputs:
            token_ids[output.request_id] += output.new_token_ids
            assert output.error is None
    return token_ids


def test_a_request_goes_on_with_drafts_where_another_engine_has_left_it(
    undisturbed: Callable[..., Undisturbed], checkpoint: Callable[[str], Path]
) -> None:
    """Wherever that was: among drafts that it had accepted, too."""
    expected = undisturbed()
    llm = make_llm(checkpoint("tinypy"), async_scheduling=False)
    core = core_of(llm)
    draft_always(core.scheduler, RandomProposer(Random(0), expected.continuation, VOCAB_SIZE), VOCAB_SIZE)
    whole = run(core, expected.messages)
    for number in range(1, 32, 3):
        messages = [
            msgspec.structs.replace(message, output_token_ids=whole[message.request_id][:number], is_replay=True)
            for message in expected.messages
            if len(whole[message.request_id]) > number
        ]
        rest = run(core, messages)
        assert rest == {message.request_id: whole[message.request_id][number:] for message in messages}
    for told, message in zip(expected.told, expected.messages, strict=True):
        assert whole[message.request_id][: len(told.text[0])] == told.text[0]
        assert expected.token_ids[message.request_id][: len(told.text[0])] == told.text[0]
    llm.shutdown()


@pytest.mark.parametrize("behind", ["x", None], ids=["not allowed", "end of sequence"])
def test_drafts_that_leave_the_grammar_are_cut(behind: str | None, checkpoint: Callable[[str], Path]) -> None:
    """Only what it allows is computed, and nothing behind its end."""
    llm = make_llm(checkpoint("tinypy"), async_scheduling=False)
    core, tokenizer = core_of(llm), load_tokenizer(checkpoint("tinypy"))
    one = tokenizer.encode("1", add_special_tokens=False)[-1]
    last = tokenizer.eos_token_id if behind is None else tokenizer.encode(behind, add_special_tokens=False)[-1]
    drafts = [one, last, one]
    proposer = RandomProposer(Random(0), lambda request, num_tokens: drafts[:num_tokens], VOCAB_SIZE)
    proposer.share = 1.0
    draft_always(core.scheduler, proposer, VOCAB_SIZE)
    computed: list[list[int]] = []
    submit = core.executor.submit

    def spy(scheduler_output: SchedulerOutput) -> None:
        computed.extend(scheduler_output.draft_token_ids.values())
        submit(scheduler_output)

    core.executor.submit = spy  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=32, seed=1, structured_outputs={"regex": "[0-9]{4,9}"})
    (output,) = llm.generate(["x = "], params, use_tqdm=False)
    assert output.outputs[0].text.isdecimal()
    assert [one] in computed
    assert all(own == [one] for own in computed)
    llm.shutdown()


def test_what_is_slow_behind_drafts_alone_is_no_fault_of_the_request(checkpoint: Callable[[str], Path]) -> None:
    """The grammar is ambiguous for text that is drafted, and never sampled."""
    llm = make_llm(checkpoint("tinypy"), async_scheduling=False)
    core, tokenizer = core_of(llm), load_tokenizer(checkpoint("tinypy"))
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    proposer = RandomProposer(Random(0), lambda request, num_tokens: [], VOCAB_SIZE)
    proposer.share = 1.0
    many = lambda request, most: DraftTokens(request.num_tokens, [letter] * most, [1.0] * most)  # noqa: E731
    proposer.propose = many  # type: ignore[method-assign]
    draft_always(core.scheduler, proposer, VOCAB_SIZE)
    one = tokenizer.encode("1", add_special_tokens=False)[-1]
    params = SamplingParams(
        max_tokens=128,
        seed=1,
        structured_outputs={"regex": "1*((((((a+)+)+)+)+)+)+b|1{5,120}"},
        allowed_token_ids=[one, tokenizer.eos_token_id],
    )
    (output,) = llm.generate(["x = "], params, use_tqdm=False)
    assert output.error is None
    assert set(output.outputs[0].text) == {"1"}
    llm.shutdown()
