"""With async scheduling the engine says, token for token, what it says without, whatever the requests ask for."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quire_engine import SamplingParams
from quire_engine.core.engine_core import EngineCore
from quire_engine.messages import EngineCoreOutputs
from support.every_kind import PARAMS, PROMPTS, WAYS, Told, assert_told, core_of, make_llm


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[Told]:
    llm = make_llm(checkpoint("tinypy"), async_scheduling=False)
    assert not core_of(llm).executor.async_scheduling
    told = [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm.shutdown()
    return told


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_request_gets_what_it_gets_without(
    way: str, expected: list[Told], checkpoint: Callable[[str], Path]
) -> None:
    llm = make_llm(checkpoint("tinypy"), async_scheduling=True, **WAYS[way])
    assert core_of(llm).executor.max_concurrent_batches == 2
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_told(outputs, expected)
    stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == (way == "few blocks")
    assert (stats.num_failed_steps, stats.num_blocks_used, stats.num_running) == (0, 0, 0)
    llm.shutdown()


def test_the_requests_end_in_every_way(expected: list[Told]) -> None:
    """Or else the tests above would show little."""
    assert {told.end[0] for told in expected} == {"stop", "length"}
    assert {type(told.end[1]) for told in expected} == {str, int, type(None)}


@pytest.fixture
def steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[int]]:
    """How many steps were left in flight behind each result."""
    numbers: deque[int] = deque()
    step = EngineCore.step

    def counted(core: EngineCore) -> EngineCoreOutputs:
        outputs = step(core)
        numbers.append(len(core._in_flight))
        return outputs

    monkeypatch.setattr(EngineCore, "step", counted)
    return numbers


def test_next_step_is_in_flight_behind_each_result_but_the_last(
    steps_in_flight: deque[int], checkpoint: Callable[[str], Path]
) -> None:
    llm = make_llm(checkpoint("tinypy"), async_scheduling=True)
    llm.generate("import os", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert list(steps_in_flight) == [1, 1, 1, 1, 1, 0]
    steps_in_flight.clear()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, presence_penalty=1.0)
    llm.generate("import os", params, use_tqdm=False)
    assert list(steps_in_flight) == [0] * 6, "it needs each token before the next"


def test_leaving_a_stream_early_leaves_nothing_and_disturbs_nobody(checkpoint: Callable[[str], Path]) -> None:
    llm = make_llm(checkpoint("tinypy"), async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (want,) = llm.generate("def fib(n):\n", params, use_tqdm=False)
    for num_tokens in (1, 2, 5):
        stream = llm.stream("class A:\n", params)
        for _ in range(num_tokens):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.get_stats().num_blocks_used == 0
        (output,) = llm.generate("def fib(n):\n", params, use_tqdm=False)
        assert output.outputs[0].token_ids == want.outputs[0].token_ids


def test_failed_steps_disturb_nobody_but_the_faulty_request(
    fault: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    llm = make_llm(checkpoint("tinypy"), async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["import os\n", "def fib(n):\n", "class A:\n"]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    fault(action="raise", num_output_tokens=5, once=True)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == want
    assert llm.get_stats().num_failed_steps == 1
    poison = want[1][3]
    fault(action="raise", token_id=poison)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, tokens in zip(outputs, want, strict=True):
        if poison in tokens:
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].token_ids == tokens[: tokens.index(poison)]
        else:
            assert output.outputs[0].token_ids == tokens
    assert llm.get_stats().num_blocks_used == 0
