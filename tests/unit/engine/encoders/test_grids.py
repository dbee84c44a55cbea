"""Positions of three dimensions: as transformers counts them, and the same results however a prompt is computed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import RequestError
from quire_engine.messages import EngineCoreReady, EngineCoreRequest, NewRequestData, PromptPart
from quire_engine.models.step_context import GRID_POSITIONS, StepRows
from quire_engine.scheduler.validation import validate_request
from quire_engine.worker.batch.input_batch import InputBatch
from support.pictures import PICTURES, image_of
from support.ranks import llm_of_thread_ranks
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

NAMES = ["qwen3-5", "qwen3-vl"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
IMAGES = [image_of(*size, seed=number) for number, size in enumerate([(150, 14), (14, 150), (80, 90), (14, 14)])]
ROW, COLUMN, LARGE, SMALL = IMAGES
PROMPTS = [
    ("{}", [ROW]), ("{} a column", [COLUMN]), ("def f({}, {}):", [LARGE, SMALL]), ("text alone, and more of it", []),
    ("ends with {}", [LARGE]), ("{}{}{}{}", [SMALL, LARGE, SMALL, COLUMN]),
]  # fmt: skip
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 2**23}
Results = list[tuple[list[int], list[float]]]


@pytest.fixture
def folder(name: str, picture_checkpoint: Callable[[str], Path]) -> Path:
    return picture_checkpoint(name)


def results(llm: LLM, turns: int = 1) -> Results:
    image = PICTURES["qwen2-vl"]["around"].format(PICTURES["qwen2-vl"]["image_token"])
    prompts = [
        {"prompt": text.format(*[image] * len(own)), "multi_modal_data": {"image": own}} if own else text
        for text, own in PROMPTS
    ]
    for _ in range(turns):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    if turns > 1:
        assert outputs[2].num_cached_tokens >= 16, "or the prefix cache was not used within a picture"
    assert llm.get_stats().num_failed_steps == 0
    found = []
    for output in outputs:
        (completion,) = output.outputs
        assert completion.logprobs is not None
        token_ids = completion.token_ids
        found.append((token_ids, [own[i].logprob for own, i in zip(completion.logprobs, token_ids, strict=True)]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_same_results_however_it_is_computed(name: str, folder: Path) -> None:
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        expected = results(llm, turns=2)
    for settings in (
        {"max_num_batched_tokens": 64, "max_num_seqs": 6, "long_prefill_token_threshold": 1},
        {"max_num_batched_tokens": 64, "max_num_seqs": 6, "long_prefill_token_threshold": 7},
    ):
        with llm_of_thread_ranks(folder, **SETTINGS, enable_prefix_caching=False, **settings) as llm:
            assert results(llm) == expected
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with llm_of_thread_ranks(folder, **SETTINGS, **sizes, max_num_batched_tokens=32, max_num_seqs=8) as llm:
            for (token_ids, logprobs), (own_ids, own_logprobs) in zip(results(llm), expected, strict=True):
                assert token_ids == own_ids
                assert logprobs == pytest.approx(own_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl"])
def test_preempted(name: str, folder: Path) -> None:
    with llm_of_thread_ranks(folder, **SETTINGS) as llm:
        expected = results(llm)
    block_bytes = 4 * 2 * 2 * 16 * 16 * 4  # of 16 tokens in 4 layers of 2 heads of 16 float32 numbers
    scarce = {**SETTINGS, "max_model_len": 112, "kv_cache_memory_bytes": 8 * block_bytes}
    with llm_of_thread_ranks(folder, **scarce) as llm:
        assert results(llm) == expected
        assert llm.get_stats().num_preemptions > 0


def layout(rng: np.random.Generator) -> tuple[list[PromptPart], int]:
    """Parts of a prompt with one to three images, and its length."""
    parts, end = [], int(rng.integers(0, 4))
    for _ in range(rng.integers(1, 4)):
        grid = (1, *rng.integers(1, 6, 2).tolist())
        length = grid[1] * grid[2]
        parts.append(PromptPart(end, length, b"", b"", grid))
        end += length + int(rng.integers(1, 4))
    return parts, end + int(rng.integers(0, 4))


def reference(parts: list[PromptPart], length: int) -> torch.Tensor:
    """[3, length], what transformers counts."""
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1))
    model = SimpleNamespace(
        config=config, get_vision_position_ids=partial(Qwen2VLModel.get_vision_position_ids, None)
    )  # fmt: skip
    types = torch.zeros(1, length, dtype=torch.int64)
    for part in parts:
        types[0, part.start : part.end] = 1
    grids = torch.tensor([part.grid for part in parts])
    return Qwen2VLModel.get_rope_index(model, torch.zeros_like(types), types, image_grid_thw=grids)[0][:, 0]


def test_positions_are_those_of_transformers_in_any_chunks() -> None:
    rng = np.random.default_rng(3)
    batch = InputBatch(3, 512, 16, 100, columns=[GRID_POSITIONS])
    (column,) = batch.columns
    for turn in range(30):
        layouts = [layout(rng) if number else ([], 20) for number in range(3)]
        for number, (parts, length) in enumerate(layouts):
            batch.add(NewRequestData(
                request_id=str(number), token_ids=[0] * length, num_prompt_tokens=length,
                sampling_params=SamplingParams(), stop_token_ids=[], block_ids=[], num_computed_tokens=0,
                prompt_parts=parts,
            ))  # fmt: skip
        slots = np.array([batch.slots[str(number)] for number in range(3)])
        starts = np.array([rng.integers(0, length + 5) for _, length in layouts])
        ends = starts + (rng.integers(1, 30, 3) if turn % 2 else 1)
        found = column.values(StepRows(**batch.lay_out(slots, starts, ends)))
        expected = []
        for (parts, length), start, end in zip(layouts, starts.tolist(), ends.tolist(), strict=True):
            whole = reference(parts, length + 40) if parts else torch.arange(60).expand(3, -1)
            expected.append(whole[:, start:end].numpy())
        np.testing.assert_array_equal(found, np.concatenate(expected, 1))
        for number in range(3):
            batch.remove(str(number))


@pytest.mark.parametrize(
    ("grid", "width", "message"),
    [
        ((1, 2, 2), 6, r"a grid of \(1, 2, 2\) has no 6 places"),
        ((1, 6), 6, "a grid of"),
        ((-1, -2, 3), 6, "a grid of"),
        ((1, 2, 3), 2, "6 rows of 6 numbers are expected"),
        ((), 6, "6 rows of 2 numbers are expected"),
    ],
)
def test_bad_parts_are_rejected(grid: tuple[int, ...], width: int, message: str) -> None:
    def validate(part: PromptPart) -> None:
        request = EngineCoreRequest("r", [0] * 8, SamplingParams(max_tokens=1), prompt_parts=[part])
        ready = EngineCoreReady(
            vocab_size=9, max_model_len=9, num_kv_cache_tokens=9, hidden_size=2, num_deepstack_layers=2
        )
        validate_request(request, ready)

    validate(PromptPart(1, 6, b"", b"0" * 4 * 6 * 6, (1, 2, 3)))
    with pytest.raises(RequestError, match=message):
        validate(PromptPart(1, 6, b"", b"0" * 4 * 6 * width, grid))
