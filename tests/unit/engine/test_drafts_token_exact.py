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
from quire_engine.messages import EngineCoreRequest, SchedulerOutput
from quire_engine.scheduler.request import Request
from support.every_kind import KINDS, PARAMS, PROMPTS, WAYS, Told, core_of, make_llm
from support.scheduling import RandomProposer

VOCAB_SIZE = 900
"""Wrong drafts are below it."""


class Undisturbed:
    """What comes of every request without drafts.

    Attributes:
        told: in the order of the prompts.
        messages: of the requests, as the engine core gets them.
        token_ids: what it samples for each; where a stop string ends it, more than the caller hears of.
        num_steps: in how many steps.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[EngineCoreRequest] = []
        add_request = EngineCore.add_request

        def add(core: EngineCore, message: EngineCoreRequest, message_number: int = 0) -> None:
            self.messages.append(message)
            add_request(core, message, message_number)

        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "add_request", add)
            self.told = [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        self.num_steps = core_of(llm).scheduler.num_steps
        self.token_ids = [told.text[0] for told in self.told]

    def continuation(self, request: Request, num_tokens: int) -> list[int]:
        """What comes next of a request, as far as that is known."""
        num_prompt, num_output = request.num_prompt_tokens, request.num_output_tokens
        for message, token_ids in zip(self.messages, self.token_ids, strict=True):
            if (message.prompt_token_ids, message.sampling_params) == (
                request.all_token_ids[:num_prompt],
                request.sampling_params,
            ):
                return token_ids[num_output : num_output + num_tokens]
        raise AssertionError("a request that there was not before")


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


@pytest.mark.parametrize("way", DRAFTING_WAYS)
def test_every_kind_of_request_gets_what_it_gets_without(
    way: str, undisturbed: Callable[..., Undisturbed], checkpoint: Callable[[str], Path]
) -> None:
    settings = DRAFTING_WAYS[way]
    expected = undisturbed(**{name: settings[name] for name in ("quantization",) if name in settings})
    llm = make_llm(checkpoint("tinypy"), **{"async_scheduling": False, **settings})
    scheduler = core_of(llm).scheduler
    scheduler.proposer = proposer = RandomProposer(Random(way), expected.continuation, VOCAB_SIZE)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output, want, name in zip(outputs, expected.told, [*KINDS] * 2, strict=True):
        told = Told(output)
        assert (told.text, told.end, told.ranks) == (want.text, want.end, want.ranks), name
        assert told.logprobs == pytest.approx(want.logprobs, abs=1e-4), name
    assert proposer.num_drafts > 200
    if way == "roomy":
        assert scheduler.num_steps < expected.num_steps, "no draft was ever accepted"
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
    core.scheduler.proposer = RandomProposer(Random(0), expected.continuation, VOCAB_SIZE)
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
    llm.shutdown()


def test_drafts_that_leave_the_grammar_are_cut(checkpoint: Callable[[str], Path]) -> None:
    """Only what it allows is computed, and nothing behind its end."""
    llm = make_llm(checkpoint("tinypy"), async_scheduling=False)
    core, tokenizer = core_of(llm), load_tokenizer(checkpoint("tinypy"))
    one, letter = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in "1x")
    drafts = [one, letter, one]
    core.scheduler.proposer = RandomProposer(Random(0), lambda request, num_tokens: drafts[:num_tokens], VOCAB_SIZE)
    core.scheduler.proposer.share = 1.0
    computed: list[list[int]] = []
    submit = core.executor.submit

    def spy(scheduler_output: SchedulerOutput) -> None:
        computed.extend(scheduler_output.draft_token_ids.values())
        submit(scheduler_output)

    core.executor.submit = spy  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=32, seed=1, structured_outputs={"regex": "[0-9]{4}"})
    (output,) = llm.generate(["x = "], params, use_tqdm=False)
    assert len(output.outputs[0].text) == 4
    assert computed
    assert all(own == [one] for own in computed)
    llm.shutdown()
