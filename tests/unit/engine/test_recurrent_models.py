"""Families with recurrent layers, in bfloat16: a request has the same bits alone, in a batch, in chunks, after
preemption, from a cached prefix, with drafts and after a replay; and the states decide its tokens.

`models/test_every_family.py` compares them with transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.executor.uniproc import UniProcExecutor
from quire_engine.kv_cache import KVCacheGroups, RecurrentSpec
from quire_engine.messages import EngineCoreRequest
from quire_engine.spec_decode import make_proposer
from quire_kernels import cpu
from support.every_kind import core_of
from support.full import FULL
from support.oracle import VOCAB_SIZE, make_prompts
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cpu.library() is None, reason="plain torch promises bits of no product"),
]

NAMES = ("lfm2-moe", "lfm3", "qwen3-5", "recurrent-gemma", "zamba2", *(("olmo-hybrid", "qwen3-next") if FULL else ()))
"""With sizes of heads that the kernels of attention take. The last two have the recurrence of `qwen3-5`."""
FEW = range(6)
PROMPTS = [
    *make_prompts(len(FEW) - 1, VOCAB_SIZE, max_length=90), [7, 5, 3, 9, 2] * 12,
    *make_prompts(26, VOCAB_SIZE, max_length=12, seed=1),
]  # fmt: skip
NUM_TOKENS = 16
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    for i in range(len(PROMPTS))
]
Result = list[tuple[list[int], Any]]
Make = Callable[..., Any]


@pytest.fixture(scope="module", params=NAMES)
def make_llm(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Make:
    @contextmanager
    def make(**settings: Any) -> Iterator[LLM]:
        settings = {"max_model_len": 128, "max_num_seqs": len(PROMPTS), "kv_cache_memory_bytes": 2**25, **settings}
        with llm_of_thread_ranks(checkpoint(request.param), dtype="bfloat16", **settings) as llm:
            yield llm
            core_of(llm).scheduler.check_integrity()

    return make


def generate(llm: LLM, *numbers: int) -> Result:
    numbers = numbers or tuple(range(len(PROMPTS)))
    outputs = llm.generate([PROMPTS[i] for i in numbers], [PARAMS[i] for i in numbers], use_tqdm=False)
    assert llm.get_stats().num_failed_steps == 0
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def note_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of requests in each step from now on."""
    scheduler, batches = core_of(llm).scheduler, []
    schedule = scheduler.schedule

    def schedule_and_note(*arguments: Any) -> Any:
        output = schedule(*arguments)
        batches.append(len(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule_and_note)
    return batches


@pytest.fixture(scope="module")
def alone(make_llm: Make) -> Result:
    """What is generated after each prompt alone."""
    with make_llm(enable_prefix_caching=False) as llm:
        return [generate(llm, number)[0] for number in range(len(PROMPTS))]


def test_in_a_batch_in_chunks_after_preemption_and_from_cached_prefixes(
    make_llm: Make, alone: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget in (7, 64, 512):
        with make_llm(max_num_batched_tokens=budget) as llm:
            assert generate(llm) == alone
            batches = note_batches(llm, monkeypatch)
            assert generate(llm) == alone
            assert max(batches) == min(budget, 32)
            assert llm.get_stats().prefix_cache_hits > 0
    monkeypatch.setattr(UniProcExecutor, "determine_num_blocks", lambda _: 12)
    monkeypatch.setattr(KVCacheGroups, "num_states", lambda *_: 9)
    with make_llm(max_num_batched_tokens=16) as llm:
        assert generate(llm) == alone
        assert llm.get_stats().num_preemptions > 0


def test_with_drafts_of_which_some_are_rejected(make_llm: Make, alone: Result) -> None:
    """Drafts are what was generated before with other seeds, and then with the same."""
    expected = [alone[number] for number in FEW]
    with make_llm(speculative_config={"method": "suffix", "num_speculative_tokens": 3}) as llm:
        scheduler = core_of(llm).scheduler
        assert scheduler.config.speculative_config is not None
        draft_always(scheduler, make_proposer(scheduler.config.speculative_config), VOCAB_SIZE, 3)
        others = SamplingParams(temperature=0.8, seed=99, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.generate([PROMPTS[i] for i in FEW], others, use_tqdm=False)
        assert generate(llm, *FEW) == expected
        assert generate(llm, *FEW) == expected
        drafts = llm.get_stats().drafts
    assert drafts is not None
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens > 0


def test_an_engine_that_replaces_another_goes_on_with_the_same_tokens(make_llm: Make, alone: Result) -> None:
    number, num_known = FEW[-1], 7
    expected, _ = alone[number]
    with make_llm() as llm:
        core = core_of(llm)
        core.add_request(
            EngineCoreRequest(
                "again", PROMPTS[number], PARAMS[number], output_token_ids=expected[:num_known], is_replay=True
            )
        )
        tokens: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                tokens += output.new_token_ids
    assert tokens == expected[num_known:]


def test_the_states_decide_the_tokens(make_llm: Make, alone: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other tests would show nothing."""
    with make_llm(enable_prefix_caching=False) as llm:
        runner = core_of(llm).executor._worker.runner  # type: ignore[attr-defined]
        caches = [
            tensor
            for spec, tensors in zip(runner.model.state_specs, runner.kv_caches, strict=True)
            if isinstance(spec, RecurrentSpec)
            for tensor in tensors
        ]
        core, step = core_of(llm), core_of(llm).step

        def step_and_forget() -> Any:
            outputs = step()
            for tensor in caches:
                tensor.zero_()
            return outputs

        monkeypatch.setattr(core, "step", step_and_forget)
        changed = generate(llm)
    assert all(one[0] != other[0] for one, other in zip(changed, alone, strict=True))
