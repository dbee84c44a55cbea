"""A model that drafts for itself: it knows every token, whatever was cached, shared or freed before."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.models.step_context import StepRows
from quire_engine.worker.drafting.chain import ChainDrafter
from support.checkpoints import edit_json
from support.every_kind import core_of, make_llm
from support.scheduling import draft_always

VOCAB_SIZE, MOST = 4096, 5
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "sampled with masks": {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "hot": {"temperature": 1.8, "seed": 2**64 - 3},
}


def drafting_llm(folder: Path, draft_folder: Path, **settings: Any) -> LLM:
    """One that computes all drafts, whether they pay off or not."""
    speculative = {"model": str(draft_folder), "num_speculative_tokens": MOST}
    llm = make_llm(folder, speculative_config=speculative, **settings)
    draft_always(core_of(llm).scheduler, None, VOCAB_SIZE, MOST)
    return llm


def params(max_tokens: int = 40, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **values)


def generate(llm: LLM, prompts: Sequence[str], values: Sequence[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), list(values), use_tqdm=False)]


def drafts_of(llm: LLM) -> tuple[int, int]:
    """How many were computed, and accepted."""
    stats = llm.get_stats().drafts
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


def drafter_of(llm: LLM) -> ChainDrafter:
    method = core_of(llm).executor._worker.runner.drafting.method  # type: ignore[attr-defined]
    assert isinstance(method, ChainDrafter)
    return method


def count_computed(llm: LLM) -> list[int]:
    """How many known tokens the drafting model computes for each draft from now on."""
    drafter, counts = drafter_of(llm), []
    catch_up, known = drafter._catch_up, drafter._rows

    def spy_on_draft(*arguments: Any) -> StepRows:
        counts.append(0)
        return catch_up(*arguments)

    def spy_on_pass(*arguments: Any) -> StepRows:
        positions = known(*arguments)
        counts[-1] += len(positions.positions)
        return positions

    drafter._catch_up, drafter._rows = spy_on_draft, spy_on_pass  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"async_scheduling": True}], ids=str)
def test_all_drafts_are_accepted_at_any_temperature(
    settings: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    """Draft and target are drawn with the same noise."""
    prompts, values = [PROMPT] * len(PARAMS), [params(**own) for own in PARAMS.values()]
    plain = make_llm(checkpoint("tinypy"), **settings)
    expected = generate(plain, prompts, values)
    plain.shutdown()
    llm = drafting_llm(checkpoint("tinypy"), checkpoint("tinypy"), **settings)
    assert generate(llm, prompts, values) == expected
    num_drafts, num_accepted = drafts_of(llm)
    assert num_accepted == num_drafts > 100
    llm.shutdown()


def test_a_prefix_in_the_cache_is_there_for_the_drafting_model_too(checkpoint: Callable[[str], Path]) -> None:
    llm = drafting_llm(checkpoint("tinypy"), checkpoint("tinypy"))
    computed = count_computed(llm)
    (first,) = generate(llm, [PROMPT], [params(temperature=0)])
    (output,) = llm.generate([PROMPT], params(temperature=0), use_tqdm=False)
    num_prompt = len(output.prompt_token_ids)
    assert computed[0] == num_prompt + 1, "the prompt, and the first token"
    assert output.outputs[0].token_ids == first
    assert output.num_cached_tokens >= 16
    num_drafts, num_accepted = drafts_of(llm)
    assert num_accepted == num_drafts > 50
    second = computed[len(computed) // 2 :]
    assert second[0] == num_prompt + 1 - output.num_cached_tokens, "what is cached is not computed again"
    assert all(number <= 2 for number in second[1:])
    llm.shutdown()


def test_requests_that_give_way_are_drafted_for_again(checkpoint: Callable[[str], Path]) -> None:
    llm = drafting_llm(checkpoint("tinypy"), checkpoint("tinypy"))
    few = drafting_llm(checkpoint("tinypy"), checkpoint("tinypy"), kv_cache_memory_bytes=bytes_of_blocks(llm, 14))
    prompts = [f"{i}\n{PROMPT}" for i in range(6)]
    values = [params(seed=i) for i in range(6)]
    assert generate(few, prompts, values) == generate(llm, prompts, values)
    assert few.get_stats().num_preemptions > 0
    num_drafts, num_accepted = drafts_of(few)
    assert num_accepted == num_drafts > 20
    llm.shutdown()
    few.shutdown()


def bytes_of_blocks(llm: LLM, num_blocks: int) -> int:
    """Of the target and of what drafts for it, which is another such model."""
    return num_blocks * 2 * drafter_of(llm).bytes_per_block


@pytest.mark.parametrize("level", [1, 2])
def test_it_drafts_again_after_sleep(level: int, checkpoint: Callable[[str], Path]) -> None:
    llm = drafting_llm(checkpoint("tinypy"), checkpoint("tinypy"))
    expected = generate(llm, [PROMPT], [params(seed=3)])
    before = drafts_of(llm)
    assert before[0] == before[1] > 20
    llm.sleep(level)
    if level == 1:
        assert all(not cache.numel() for pair in drafter_of(llm)._kv_caches for cache in pair)
    llm.wake_up()
    computed = count_computed(llm)
    assert generate(llm, [PROMPT], [params(seed=3)]) == expected
    after = drafts_of(llm)
    assert after[0] == after[1] > before[0] + 20
    assert computed[0] > 16, "nothing is left of before"
    llm.shutdown()


def test_another_model_drafts_worse_and_changes_nothing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """One that sees positions otherwise, and was made for fewer of them."""
    folder = tmp_path / "draft"
    folder.mkdir()
    for file in checkpoint("tinypy").iterdir():
        (folder / file.name).symlink_to(file)
    rope = {"rope_theta": 30.0, "rope_type": "default"}
    edit_json(folder / "config.json", rope_parameters=rope, max_position_embeddings=64)
    prompts, values = [PROMPT] * len(PARAMS), [params(**own) for own in PARAMS.values()]
    plain = make_llm(checkpoint("tinypy"))
    expected = generate(plain, prompts, values)
    plain.shutdown()
    llm = drafting_llm(checkpoint("tinypy"), folder)
    outputs = llm.generate(prompts, values, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len(outputs[0].prompt_token_ids) + 40 > 64
    num_drafts, num_accepted = drafts_of(llm)
    assert 0 < num_accepted < num_drafts
    llm.shutdown()
