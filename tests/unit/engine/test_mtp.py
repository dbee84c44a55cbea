"""Multi-token prediction: the layer of a checkpoint drafts what transformers computes of it, and changes no token."""

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from support.draft_engines import SMALL_STEPS, drafts_of
from support.engines import Stream, assert_same, engine, offline, params, run, until
from support.every_kind import PARAMS, PROMPTS, Told, assert_told, core_of
from support.full import FULL
from support.mtp import Reference, make_predictable
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always
from transformers import LlamaForCausalLM

TRAINING = Path(__file__).resolve().parents[2] / "training"
VOCAB_SIZE = 4096
FAMILIES = ["deepseek-v3-mtp", "glm4-moe-mtp", "mimo-mtp", "qwen3-5-mtp", "qwen3-next-mtp"]
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    **({"small steps": SMALL_STEPS} if FULL else {}),
    "small steps on two ranks": {**SMALL_STEPS, "tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}
BLOCK_BYTES = {
    "deepseek-v3-mtp": 16 * 4 * (4 * 48 + 64), "glm4-moe-mtp": 16 * 4 * (4 * 2 * 64 + 64),
    "mimo-mtp": 16 * 4 * (4 * 2 * 32 + 64), "qwen3-5-mtp": 3 * 16 * 4 * (2 * 2 * 96 + 64),
    "qwen3-next-mtp": 3 * 16 * 4 * (2 * 2 * 96 + 64),
}  # fmt: skip
"""Of the target and the layer, in float32. Two thirds are states where there are some."""
NUMBERS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 KV cache": {"kv_cache_dtype": "int8"},
}
FURTHER_WAYS: dict[str, dict[str, Any]] = {
    "ahead": {"async_scheduling": True},
    "few blocks": {},
    **NUMBERS,
}
LIKE_OTHERS = () if FULL else ("glm4-moe-mtp", "qwen3-next-mtp")
"""Families whose layers are like another family's, which is computed in further ways, and replayed."""
CHANGES_TOKENS = ("dtype", "quantization", "kv_cache_dtype")


@pytest.fixture(scope="module")
def predictable(
    checkpoint: Callable[[str], Path], made: Callable[[str, Callable[[Path], object]], Path]
) -> Callable[[str], Path]:
    """A family's checkpoint whose drafts are mostly right."""
    return lambda name: made(f"{name}-predictable", lambda folder: make_predictable(checkpoint(name), folder))


@contextmanager
def llm_of(folder: Path, most: int | None, **settings: Any) -> Iterator[LLM]:
    """One that computes all drafts, whether they pay off or not; without `most` it has none."""
    if most is not None:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": most}
    sizes = {"dtype": "float32", "max_model_len": 128, "device": "cpu", "kv_cache_memory_bytes": 2**24}
    with llm_of_thread_ranks(folder, **{**sizes, **settings}) as llm:
        if most is not None:
            draft_always(core_of(llm).scheduler, None, VOCAB_SIZE, most)
        yield llm


@pytest.mark.parametrize("way", [
    "small steps on two ranks", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if "two ranks" not in way),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_transformers(
    family: str, way: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Long prompts and short ones; the second time they are found in the prefix cache, where there is one."""
    folder = shutil.copytree(checkpoint(family), tmp_path / family)
    reference, prompts = Reference(folder), make_prompts(4, VOCAB_SIZE, max_length=60)
    with llm_of(folder, 3, **WAYS[way]) as llm:
        for _ in range(2):
            for known, own in drafts_of(llm, prompts):
                assert own.token_ids == reference.drafts(known, len(own.token_ids))


@pytest.fixture(scope="module")
def expected(predictable: Callable[[str], Path]) -> Callable[..., list[Told]]:
    """What comes of every request without drafts, by settings that may change tokens."""

    @cache
    def expected(family: str, **settings: Any) -> list[Told]:
        with llm_of(predictable(family), None, **settings) as llm:
            return [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

    return expected


@pytest.mark.parametrize(("family", "way"), [
    pytest.param(family, way, marks=[pytest.mark.slow] if way != "roomy" else [])
    for family in FAMILIES for way in [*WAYS, *FURTHER_WAYS] if not (family in LIKE_OTHERS and way in FURTHER_WAYS)
])  # fmt: skip
def test_every_kind_of_request(
    family: str, way: str, expected: Callable[..., list[Told]], predictable: Callable[[str], Path]
) -> None:
    settings = {**WAYS, **FURTHER_WAYS}[way]
    if way == "few blocks":
        settings = {"kv_cache_memory_bytes": 14 * BLOCK_BYTES[family]}
    want = expected(family, **{name: settings[name] for name in CHANGES_TOKENS if name in settings})
    with llm_of(predictable(family), 3, **settings) as llm:
        for _ in range(2 if way == "roomy" else 1):
            assert_told(llm.generate(PROMPTS, PARAMS, use_tqdm=False), want)
        stats = llm.get_stats()
        assert (stats.num_failed_steps, stats.num_blocks_used, stats.num_running) == (0, 0, 0)
        assert stats.drafts is not None
        assert stats.drafts.num_accepted_tokens >= 20
        assert stats.num_preemptions >= (way == "few blocks")
        core_of(llm).scheduler.check_integrity()


def test_a_trained_layer_drafts_as_it_was_trained(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train_drafts.py mtp` writes the demo model in MiMo's layout; the layer is here as it is before training."""
    target = checkpoint("tinypy")
    monkeypatch.syspath_prepend(TRAINING)
    script = importlib.import_module("train_drafts")
    drafter = script.Mtp(LlamaForCausalLM.from_pretrained(target, dtype=torch.float32), target)
    with torch.no_grad():
        for name, parameter in drafter.module.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    drafter.save(tmp_path / "mtp")
    drafter.load(tmp_path / "mtp")  # as it was rounded
    prompts = make_prompts(3, VOCAB_SIZE, max_length=60)
    with llm_of(tmp_path / "mtp", script.NUM_DRAFT_TOKENS) as llm:
        for known, own in drafts_of(llm, prompts):
            (expected,) = drafter.draft(torch.tensor([known])).tolist()
            assert own.token_ids == expected[: len(own.token_ids)]
    sampling_params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = []
    for folder, most in ((target, None), (tmp_path / "mtp", 3)):
        with llm_of(folder, most) as llm:
            texts.append([out.outputs[0].token_ids for out in llm.generate(prompts, sampling_params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_random_weights_are_drafted_with_as_well(checkpoint: Callable[[str], Path]) -> None:
    with llm_of(checkpoint("mimo-mtp"), 3, load_format="dummy") as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert llm.get_stats().drafts.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LIKE_OTHERS])
def test_killed_at_every_token_of_a_window_and_aborted(
    family: str, predictable: Callable[[str], Path], fault: Callable[..., Path]
) -> None:
    """A step with drafts yields several tokens; the engine dies when any of them is the last it has sampled. Then a
    request is aborted beside others."""
    folder, most = predictable(family), 8 if FULL else 4
    prompts = [[5, 6, 7] * 8, [9, 8, 7], [100, 200, 300, 400] * 6]
    sampling_params = params(temperature=0, max_tokens=40)
    undisturbed = offline(folder, prompts, sampling_params, max_model_len=128)
    numbers = range(20, 22 + most)  # a window is of one token more than there are drafts

    async def main() -> None:
        for number in numbers:
            file = fault(action="kill", num_output_tokens=number, once=True)
            output = await Stream(llm, prompts[0], sampling_params).task
            assert not file.exists(), "it was killed"
            assert_same(output.outputs, undisturbed[0])
        for _ in range(3):
            streams = [Stream(llm, prompt, sampling_params) for prompt in prompts]
            await until(lambda: streams[1].num_tokens > 2)  # noqa: B023
            streams[1].task.cancel()
            for i in (0, 2):
                assert_same((await streams[i].task).outputs, undisturbed[i])
        assert_same((await Stream(llm, prompts[1], sampling_params).task).outputs, undisturbed[1])

    settings = {"max_model_len": 128, "speculative_config": {"method": "mtp", "num_speculative_tokens": most}}
    with engine(folder, **settings) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == len(numbers)
