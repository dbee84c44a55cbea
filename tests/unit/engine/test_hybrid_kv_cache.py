"""Layers with a sliding window beside layers that see everything: token for token what transformers says, while what
lies behind the windows is freed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.kv_cache import AttentionSpec
from quire_engine.messages import EngineCoreRequest
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers import attention
from quire_engine.worker.forward import recorded
from quire_engine.worker.worker import Worker
from quire_kernels.cpu import status
from quire_kernels.gpu.interpreter import INTERPRETED
from support.checkpoints import edit_json, with_windows
from support.oracle import generate_greedily, make_prompts
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always
from support.triton_interpreter import interpreted_kernels
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 515
WINDOW = 19
WINDOWS = (WINDOW, WINDOW, None, WINDOW, WINDOW, None, WINDOW)
"""By layer. Four groups of two: one sees everything, and three a window, of which the last has one layer only."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 192, "block_size": 4, "device": "cpu", "max_num_seqs": 4,
}  # fmt: skip
NUM_OUTPUT_TOKENS = 22
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("windows") / "checkpoint", checkpoint("tied-gqa"))


def write(folder: Path, other: Path, num_layers: int = len(WINDOWS)) -> Path:
    """A checkpoint with the tokenizer of another. Its `config.json` says nothing of windows: the model has them."""
    model(num_layers).save_pretrained(folder)
    (folder / "tokenizer.json").symlink_to(other / "tokenizer.json")
    edit_json(folder / "config.json", layer_types=None, sliding_window=None, use_sliding_window=False)
    return folder


def model(num_layers: int = len(WINDOWS)) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.4,
        use_sliding_window=True, sliding_window=WINDOW, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in WINDOWS[:num_layers]],
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def workload() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, some longer than several windows, and what transformers says after each."""
    prompts = make_prompts(3, VOCAB_SIZE, max_length=60)
    prompts += [make_prompts(1, VOCAB_SIZE, max_length=500, seed=seed)[0][:86] for seed in (2, 5)]
    assert [len(prompt) for prompt in prompts[-2:]] == [86, 86]
    oracle = model()
    return prompts, [generate_greedily(oracle, prompt, NUM_OUTPUT_TOKENS).token_ids for prompt in prompts]


@pytest.fixture
def make_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An engine of that model, with `tensor` × `pipeline` ranks."""
    from_folder = CheckpointConfig.from_folder

    monkeypatch.setattr(CheckpointConfig, "from_folder", lambda folder: with_windows(from_folder(folder), WINDOWS))

    @contextmanager
    def make(tensor: int = 1, pipeline: int = 1, folder: Path = folder, **settings: Any) -> Iterator[LLM]:
        settings = {**SETTINGS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **settings}
        with llm_of_thread_ranks(folder, **settings) as llm:
            try:
                yield llm
            finally:
                llm._core.scheduler.check_integrity()  # type: ignore[attr-defined]

    return make


def block_bytes(num_tensors: int = 2) -> int:
    """Keys and values of 4 tokens, of 2 heads of 16, in float32."""
    return num_tensors * 2 * 4 * 2 * 16 * 4


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("settings", "has_preemptions"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 24}, False),
        ({"max_num_batched_tokens": 7, "enable_prefix_caching": False}, False),
        ({"block_size": 16}, False),
        ({"kv_cache_memory_bytes": 62 * block_bytes(), "max_num_batched_tokens": 16}, True),
        ({"kv_cache_memory_bytes": 70 * block_bytes(), "max_num_batched_tokens": 24}, True),
        ({"disable_hybrid_kv_cache_manager": True}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
    ids=str,
)
def test_it_says_what_transformers_says(
    settings: dict[str, Any],
    has_preemptions: bool,
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
) -> None:
    prompts, expected = workload
    with make_llm(**settings) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts[::-1]) == expected[::-1]
        stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == has_preemptions
    assert (stats.num_blocks_used, stats.num_failed_steps) == (0, 0)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (1, 3)])
def test_however_it_is_cut_among_ranks(
    tensor: int, pipeline: int, make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    with make_llm(tensor, pipeline, max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts[-1:]) == expected[-1:]
        assert llm.get_stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "between"),
    [(512, False), (24, False), (24, True)],
    ids=["at once", "in chunks", "others between"],
)
def test_the_same_long_prompt_four_times_in_a_row(
    max_num_batched_tokens: int,
    between: bool,
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
) -> None:
    prompts, expected = workload
    prompt, answer = prompts[-2], expected[-2]
    assert len(prompt) > 4 * WINDOW
    settings = {"kv_cache_memory_bytes": 70 * block_bytes()} if between else {}
    with make_llm(max_num_batched_tokens=max_num_batched_tokens, **settings) as llm:
        hits = []
        for _ in range(4):
            before = llm.get_stats().prefix_cache_hits
            assert generate(llm, [prompt]) == [answer]
            hits.append(llm.get_stats().prefix_cache_hits - before)
            if between:
                assert generate(llm, prompts) == expected
        assert (llm.get_stats().num_preemptions > 0) == between
    full = (len(prompt) - 1) // 4 * 4
    assert hits[0] == 0
    if not between:
        assert hits[1:] == [full] * 3, "all but the last token, each time"


def test_a_prompt_that_goes_on_after_another_finds_its_end_alone(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Behind the windows is what others have taken since; of the layers that see everything all is there."""
    prompts, expected = workload
    prompt, answer = prompts[-2], expected[-2]
    with make_llm() as llm:
        assert generate(llm, [prompt]) == [answer]
        before = llm.get_stats().prefix_cache_hits
        assert generate(llm, [[*prompt, *answer[:12]]])[0][: NUM_OUTPUT_TOKENS - 12] == answer[12:]
        assert llm.get_stats().prefix_cache_hits - before == (len(prompt) + 12 - 1) // 4 * 4


def test_completions_of_one_prompt_share_its_blocks(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompt = workload[0][-2]
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    with make_llm() as llm:
        together = [one.token_ids for one in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
        assert len({tuple(one) for one in together}) == 3
    with make_llm(enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = [one.token_ids for one in llm.generate([prompt], params, use_tqdm=False)[0].outputs]
    assert together == alone


def test_an_engine_that_replaces_another_goes_on_with_the_same_tokens(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """A replay is a request with output: its tokens are computed again, and the next one is the one that was due."""
    prompt, answer = workload[0][-2], workload[1][-2]
    with make_llm() as llm:
        core = llm._core
        message = EngineCoreRequest(
            "again", prompt, PARAMS, output_token_ids=answer[:17], is_replay=True, num_preemptions=1
        )
        core.add_request(message)
        tokens: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                tokens += output.new_token_ids
    assert tokens == answer[17:]


def test_small_steps_of_groups_are_recorded(
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With windows that no request fills, so that attention without one says the same."""
    monkeypatch.setattr(attention, "AttentionSpec", lambda *shape_and_window, **_: AttentionSpec(*shape_and_window[:3]))
    from_folder = CheckpointConfig.from_folder

    windows = [None if window is None else 180 for window in WINDOWS]
    monkeypatch.setattr(CheckpointConfig, "from_folder", lambda folder: with_windows(from_folder(folder), windows))
    prompts = workload[0]
    tokens = []
    for recorded_tokens in (0, 64):
        monkeypatch.setattr(recorded, "RECORDED_TOKENS", recorded_tokens)
        with make_llm(block_size=16, max_num_batched_tokens=48) as llm:
            runner = llm._core.executor._worker.runner
            assert len(runner.batch.block_tables) == 4
            tokens.append(generate(llm, prompts))
            if recorded_tokens and status().instruction_set is not None:
                assert runner.recorded_bytes > 0
    assert tokens[0] == tokens[1]
    assert len({tuple(one) for one in tokens[0]}) == len(prompts)


@pytest.mark.slow
def test_graphs_of_groups(
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """With the kernels of GPUs, in Triton's interpreter, of three layers in as many groups, as seven take 19 s."""
    if not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    prompts = [workload[0][-1][:36], workload[0][-2][:5]]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    folder = write(tmp_path / "checkpoint", checkpoint("tied-gqa"), num_layers=3)
    settings: dict[str, Any] = {
        "folder": folder, "max_num_seqs": 2, "max_model_len": 48, "block_size": 16, "max_num_batched_tokens": 44,
    }  # fmt: skip
    with make_llm(**settings) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with interpreted_kernels(), make_llm(**settings) as llm:
        runner = llm._core.executor._worker.runner
        assert (runner.graphs.max_size, len(runner.batch.block_tables)) == (2, 3)
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert got == expected


def test_the_cache_is_sized_for_groups(make_llm: Callable[..., Any]) -> None:
    """Two tensors for seven layers, and as many more blocks."""
    with make_llm(kv_cache_memory_bytes=50 * block_bytes()) as llm:
        core = llm._core
        worker: Worker = core.executor._worker
        kept = {keys.data_ptr() for keys, _ in worker.runner.kv_caches}
        assert (len(worker.runner.kv_caches), len(kept)) == (7, 2)
        assert [len(keys) for keys, _ in worker.runner.kv_caches] == [50] * 7
        assert worker.runner.group_ids == [1, 2, 0, 3, 1, 0, 2]
        stats = llm.get_stats()
        assert (stats.num_blocks_free, stats.kv_cache_usage) == (50, 0.0)
        assert core.ready.num_kv_cache_tokens == 48, "four groups, each with all tokens up to so few"
    with make_llm(kv_cache_memory_bytes=50 * block_bytes(7), disable_hybrid_kv_cache_manager=True) as llm:
        assert llm.get_stats().num_blocks_free == 50
        assert llm._core.ready.num_kv_cache_tokens == 200


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3)])
def test_blocks_of_all_groups_are_kept_elsewhere(
    tensor: int,
    pipeline: int,
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
) -> None:
    """What one engine keeps, the next one loads; what its windows do not see stays in the file."""
    prompts, expected = workload
    extra = {"shared_storage_path": str(tmp_path)}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(4, len(prompt), 4)}
    for is_first in (True, False):
        with make_llm(tensor, pipeline, max_num_batched_tokens=32, kv_transfer_config=transfer) as llm:
            assert generate(llm, prompts) == expected
            stats = llm._core.make_stats().kv_connector
        assert (stats.num_failed_blocks, stats.num_unsaved_blocks) == (0, 0)
        assert stats.num_loaded_blocks >= (0 if is_first else len(blocks))


def test_a_small_cache_loads_what_it_has_lost(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    prompts, expected = workload
    extra = {"shared_storage_path": str(tmp_path)}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    settings = {"max_num_batched_tokens": 24, "kv_transfer_config": transfer}
    with make_llm(kv_cache_memory_bytes=70 * block_bytes(), **settings) as llm:
        for _ in range(3):
            assert generate(llm, prompts) == expected
        stats = llm._core.make_stats().kv_connector
    assert stats.num_loaded_blocks > 0


@pytest.mark.parametrize(("num_blocks", "has_preemptions"), [(None, False), (75, True)])
def test_a_model_that_drafts_keeps_all_tokens_beside_the_layers_that_do(
    num_blocks: int | None,
    has_preemptions: bool,
    make_llm: Callable[..., Any],
    folder: Path,
    workload: tuple[list[list[int]], list[list[int]]],
) -> None:
    """It drafts for itself, so all drafts are right, unless keys or values are missing or those of others."""
    prompts, expected = workload
    drafts, settings = {"model": str(folder), "num_speculative_tokens": 3}, {}
    if num_blocks is not None:
        own_bytes = block_bytes(len(WINDOWS))
        settings = {"kv_cache_memory_bytes": num_blocks * (block_bytes() + own_bytes), "max_num_batched_tokens": 24}
    with make_llm(speculative_config=drafts, **settings) as llm:
        draft_always(llm._core.scheduler, None, VOCAB_SIZE, 3)
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts[::-1]) == expected[::-1]
        stats = llm.get_stats()
    assert (stats.num_preemptions > 0) == has_preemptions
    assert stats.drafts.num_accepted_tokens == stats.drafts.num_draft_tokens > 50


def test_a_model_that_drafts_needs_a_layer_that_keeps_all_tokens(checkpoint: Callable[[str], Path]) -> None:
    drafts = {"method": "draft_model", "model": str(checkpoint("tied-gqa")), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="'draft_model' needs a KV cache that keeps all tokens"):
        LLM(checkpoint("mistral"), speculative_config=drafts, **SETTINGS)
