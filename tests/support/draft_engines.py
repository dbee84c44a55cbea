"""Engines that compute all drafts, whether they pay off or not; what they draft, and that it changes no token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.messages import DraftTokens, ModelRunnerOutput, SchedulerOutput
from quire_engine.stats import SchedulerStats
from support.every_kind import core_of
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always

SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 12, "max_num_seqs": 2, "enable_prefix_caching": False}


@contextmanager
def drafting_llm(
    method: str, target: Path, draft: Path | None, vocab_size: int, most: int = 3, **settings: Any
) -> Iterator[LLM]:
    """One whose drafts are by a folder; without it, there are none."""
    if draft is not None:
        settings["speculative_config"] = {
            "method": method, "model": str(draft), "num_speculative_tokens": most,
            "acceptance": settings.pop("acceptance", None),
        }  # fmt: skip
    sizes = {"dtype": "float32", "max_model_len": 128, "device": "cpu", "kv_cache_memory_bytes": 2**24}
    with llm_of_thread_ranks(target, **{**sizes, **settings}) as llm:
        if draft is not None:
            draft_always(core_of(llm).scheduler, None, vocab_size, most)
        yield llm


def drafts_of(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], DraftTokens]]:
    """What is drafted for eight greedy tokens of each prompt: the tokens before it, and the drafts."""
    scheduler = core_of(llm).scheduler
    update = scheduler.update_from_output
    drafts: list[tuple[str, DraftTokens]] = []

    def note(scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> Any:
        drafts.extend((runner_output.drafts or {}).items())
        return update(scheduler_output, runner_output)

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "update_from_output", note)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = {out.request_id: out.prompt_token_ids + out.outputs[0].token_ids for out in outputs}
    assert len(drafts) >= 8
    return [(texts[request_id][: own.start], own) for request_id, own in drafts]


def check_no_token_changes(
    llm_of: Callable[..., Any], target: Path, draft: Path, prompts: list[list[int]],
    params: Sequence[dict[str, Any]], settings: dict[str, Any],
) -> SchedulerStats:  # fmt: skip
    """The tokens with drafts are those without, also a second time and after sleep; at least 20 drafts are accepted.
    Returns the statistics after the second time.

    Args:
        llm_of: makes an engine of a target, a folder that drafts or None, and settings.
        target: its folder.
        draft: the folder that drafts.
        prompts: token ids.
        params: of each prompt, beside its number of tokens.
        settings: of the engine with drafts; all but `acceptance` are those of the other, too.
    """
    given = [SamplingParams.from_mapping({"max_tokens": 24, "ignore_eos": True, **own}) for own in params]
    if "acceptance" in settings:  # which gives sampled requests other tokens
        given = [given[0]] * len(prompts)

    def tokens(llm: LLM) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in llm.generate(prompts, given, use_tqdm=False)]

    with llm_of(target, None, **{name: one for name, one in settings.items() if name != "acceptance"}) as llm:
        expected = tokens(llm)
    with llm_of(target, draft, **settings) as llm:
        for _ in range(2):
            assert tokens(llm) == expected
        stats = llm.get_stats()
        assert (stats.num_failed_steps, stats.num_blocks_used) == (0, 0)
        assert stats.drafts is not None
        assert stats.drafts.num_accepted_tokens >= 20
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == expected
        assert llm.get_stats().drafts.num_accepted_tokens > stats.drafts.num_accepted_tokens
        core_of(llm).scheduler.check_integrity()
    return stats
