"""With every method that drafts, the engine says token for token what it says without, whatever the request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM
from quire_engine.spec_decode import make_proposer
from support.engines import Stream, assert_same, engine, offline, params, run
from support.every_kind import BLOCK_BYTES, PARAMS, PROMPTS, WAYS, Told, assert_told, core_of, make_llm
from support.full import FULL
from support.scheduling import draft_always

VOCAB_SIZE = 4096
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "draft"},
    "eagle3": {"method": "eagle3", "model": "eagle3"},
    "medusa": {"method": "medusa", "model": "medusa"},
}
"""A `model` is beside the demo model's."""
LOOKUPS = ("ngram", "suffix")
"""Methods of the scheduler; the others draft in the workers."""
FEWEST_AND_MOST_DRAFTS = [1, 7]
SMALL_STEPS = WAYS["small steps"]
DRAFTING_WAYS: dict[str, dict[str, Any]] = {
    "few blocks on two ranks": {"kv_cache_memory_bytes": 7 * BLOCK_BYTES, "tensor_parallel_size": 2},
    "small steps in two stages": {**SMALL_STEPS, "pipeline_parallel_size": 2},
    "int8 ahead": {"quantization": "int8", "async_scheduling": True},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
}
"""In each of them every method; each has one of `WAYS` that change the schedule, or none, and one of computing."""
CHANGES_TOKENS = ("dtype", "quantization", "kv_cache_dtype")


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> Callable[..., list[Told]]:
    """What comes of every request without speculation, by settings that may change tokens."""
    known: dict[tuple[Any, ...], list[Told]] = {}

    def expected(**settings: Any) -> list[Told]:
        key = tuple(settings.items())
        if key not in known:
            llm = make_llm(checkpoint("tinypy"), **settings)
            known[key] = [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
            llm.shutdown()
        return known[key]

    return expected


def config_of(folder: Path, method: str, **settings: Any) -> dict[str, Any]:
    """A `speculative_config`."""
    config = {**METHODS[method], **settings}
    return {**config, "model": str(folder.parent / config["model"])} if "model" in config else config


def drafting_llm(folder: Path, method: str, most: int, **settings: Any) -> LLM:
    """One that computes all that the method drafts, whether it pays off or not."""
    llm = make_llm(folder, speculative_config=config_of(folder, method, num_speculative_tokens=most), **settings)
    config = core_of(llm).scheduler.config.speculative_config
    assert config is not None
    draft_always(core_of(llm).scheduler, make_proposer(config), VOCAB_SIZE, most)
    return llm


def check(llm: LLM, expected: list[Told], times: int = 2, least_accepted: int = 20, least_preempted: int = 0) -> None:
    """The second time, the outputs of the first are among what a method may know, and in the prefix cache."""
    for _ in range(times):
        assert_told(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
    stats = llm.get_stats()
    assert (stats.num_failed_steps, stats.num_blocks_used, stats.num_running) == (0, 0, 0)
    assert stats.drafts is not None
    assert stats.drafts.num_accepted_tokens >= least_accepted
    assert stats.num_preemptions >= least_preempted
    core_of(llm).scheduler.check_integrity()
    llm.shutdown()


@pytest.mark.parametrize("most", FEWEST_AND_MOST_DRAFTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_request_with_few_and_many_drafts(
    method: str, most: int, expected: Callable[..., list[Told]], checkpoint: Callable[[str], Path]
) -> None:
    check(
        drafting_llm(checkpoint("tinypy"), method, most), expected(), times=2 if most == 7 or method in LOOKUPS else 1
    )


@pytest.mark.parametrize(("way", "method"), [
    (way, method) for number, way in enumerate(DRAFTING_WAYS) for method in METHODS
    if FULL or method != LOOKUPS[number % 2]  # either looks drafts up for the same scheduler
])  # fmt: skip
def test_every_kind_of_request_in_all_ways(
    way: str, method: str, expected: Callable[..., list[Told]], checkpoint: Callable[[str], Path]
) -> None:
    settings = DRAFTING_WAYS[way]
    if (way, method) == ("small steps in two stages", "eagle3"):
        settings = SMALL_STEPS  # in two stages it is refused
    want = expected(**{name: settings[name] for name in CHANGES_TOKENS if name in settings})
    times, least_accepted = (2, 20) if method in LOOKUPS else (1, 1 if way.startswith("small steps") else 20)
    least_preempted = 1 if way.startswith("few blocks") else 0
    check(drafting_llm(checkpoint("tinypy"), method, 3, **settings), want, times, least_accepted, least_preempted)


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_chooses_how_many_drafts_pay_off(
    method: str, expected: Callable[..., list[Told]], checkpoint: Callable[[str], Path]
) -> None:
    """As it does for a user: which drafts are computed depends on how long steps take, and the tokens do not."""
    folder = checkpoint("tinypy")
    llm = make_llm(folder, speculative_config=config_of(folder, method))
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [Told(output).text for output in outputs] == [told.text for told in expected()]
    assert llm.get_stats().drafts is not None
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_killed_at_every_token_of_a_window(
    method: str, checkpoint: Callable[[str], Path], fault: Callable[..., Path]
) -> None:
    """A step with drafts yields several tokens; the engine dies when any of them is the last it has sampled."""
    folder = checkpoint("tinypy")
    prompt, sampling_params = [5, 6, 7] * 8, params(temperature=0, max_tokens=40)
    (undisturbed,) = offline(folder, [prompt], sampling_params)
    most = 8 if FULL else 4
    numbers = range(20, 22 + most)  # a window is of one token more than there are drafts

    async def main() -> None:
        for number in numbers:
            file = fault(action="kill", num_output_tokens=number, once=True)
            output = await Stream(llm, prompt, sampling_params).task
            assert not file.exists(), "it was killed"
            assert_same(output.outputs, undisturbed)

    with engine(folder, speculative_config=config_of(folder, method, num_speculative_tokens=most)) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == len(numbers)
