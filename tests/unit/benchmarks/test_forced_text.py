"""A forced text comes out exactly, whatever is drafted; requests without one say what they say anyway."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.harness.drafting import run_batch
from benchmarks.harness.forced_text import force_texts
from benchmarks.harness.texts import Task
from quire_engine import LLM, SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.stats import DraftStats, SchedulerStats
from support.every_kind import core_of
from support.scheduling import RandomProposer, draft_always

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
VOCAB_SIZE = 4096
NUM_TOKENS = 24
PROMPTS = [[11, 12, 13], list(range(100, 140)), [7] * 17, [900, 5]]
TEXTS = [[Random(i).randrange(2, VOCAB_SIZE) for _ in range(NUM_TOKENS)] for i in range(len(PROMPTS))]
"""Of the prompts; the last prompt's is not forced."""
FREE = len(PROMPTS) - 1
PARAMS = [
    SamplingParams(temperature=i % 2, seed=1000 + i, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for i in range(len(PROMPTS))
]


def make_llm(**settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 128, "device": "cpu", "async_scheduling": False, **settings}
    return LLM(TINYPY, **settings)


def outputs_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def free_text() -> list[int]:
    """What the model itself says after the last prompt."""
    llm = make_llm()
    text = outputs_of(llm)[FREE]
    llm.shutdown()
    return text


@pytest.mark.parametrize("drafts", [False, True], ids=["no drafts", "drafts"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 8, "enable_prefix_caching": False}],
    ids=["plain", "ahead", "small steps"],
)
def test_forced_text_comes_out_exactly(settings: dict[str, Any], drafts: bool, free_text: list[int]) -> None:
    llm = make_llm(**settings)
    texts = force_texts(llm)
    for prompt, params, text in zip(PROMPTS[:FREE], PARAMS, TEXTS, strict=False):
        assert params.seed is not None
        texts.add(params.seed, len(prompt), text)
    expected = [*TEXTS[:FREE], free_text]

    def continuation(request: Request, num_tokens: int) -> list[int]:
        """The right one."""
        text = expected[PROMPTS.index(request.all_token_ids[: request.num_prompt_tokens])]
        return text[request.num_output_tokens :][:num_tokens]

    proposer = RandomProposer(Random(0), continuation, VOCAB_SIZE)
    if drafts:
        draft_always(core_of(llm).scheduler, proposer, VOCAB_SIZE)
    assert outputs_of(llm) == expected
    assert (proposer.num_drafts > 0) == drafts
    texts.clear()
    assert outputs_of(llm)[FREE] == free_text
    assert outputs_of(llm)[0] != TEXTS[0]
    llm.shutdown()


def test_nothing_is_forced_behind_the_end_of_a_text(free_text: list[int]) -> None:
    llm = make_llm()
    texts = force_texts(llm)
    seed = PARAMS[FREE].seed
    assert seed is not None
    texts.add(seed, len(PROMPTS[FREE]), free_text[:5])
    assert outputs_of(llm)[FREE] == free_text
    llm.shutdown()


def test_engines_whose_text_cannot_be_forced_are_refused() -> None:
    elsewhere: Any = SimpleNamespace(_core=SimpleNamespace(executor=object()))
    with pytest.raises(TypeError, match="one rank computes on the CPU"):
        force_texts(elsewhere)


class CountedDrafts(LLM):
    """Says of each step that there was a draft of three tokens, and that two were accepted."""

    num_calls = 0

    def get_stats(self) -> Any:
        self.num_calls += 1
        return SchedulerStats(drafts=DraftStats(self.num_calls, 3 * self.num_calls, 2 * self.num_calls))


@pytest.fixture(scope="module")
def counted() -> Iterator[LLM]:
    llm = CountedDrafts(TINYPY, dtype="float32", max_model_len=128, device="cpu")
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("first", [1, 2, 9])
def test_a_batch_has_every_output_and_what_was_counted(counted: LLM, first: int, free_text: list[int]) -> None:
    tasks = [Task(prompt, text) for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    tasks[FREE] = Task(PROMPTS[FREE], None)
    batch = run_batch(counted, force_texts(counted), tasks, NUM_TOKENS, first=first)
    assert batch.outputs[:FREE] == TEXTS[:FREE]
    assert len(batch.outputs[FREE]) == NUM_TOKENS
    assert (batch.num_drafts, batch.num_draft_tokens, batch.num_accepted_tokens) == (1, 3, 2)
    assert batch.seconds > 0 < batch.prompt_seconds
