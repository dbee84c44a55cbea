"""A layer that keeps a state instead of keys and values says what a plain recurrence over the whole text says: in
chunks, from cached prefixes, after preemption and rejected drafts, replayed, on several ranks."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, RequestOutput, SamplingParams
from quire_engine.messages import EngineCoreRequest
from quire_kernels.cpu import library
from support.engines import Recorder, Stream, engine, params, run, until
from support.every_kind import core_of
from support.oracle import make_prompts
from support.ranks import llm_of_thread_ranks
from support.recurrent import IN_PROCESSES, LAYERS, PlainRecurrent, install
from support.remote import store_server
from support.scheduling import draft_always
from transformers import AutoModelForCausalLM

VOCAB_SIZE, NUM_OUTPUT_TOKENS, BLOCK_SIZE = 515, 20, 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "block_size": BLOCK_SIZE, "device": "cpu", "max_num_seqs": 4,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def workload(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what the oracle says after each."""
    prompts = [*make_prompts(4, VOCAB_SIZE, max_length=60), [7, 5, 3, 9, 2] * 10]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for number in LAYERS:
        model.model.layers[number].self_attn = PlainRecurrent()
    answers = []
    for prompt in prompts:
        token_ids = list(prompt)
        for _ in range(NUM_OUTPUT_TOKENS):
            with torch.inference_mode():
                token_ids.append(int(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(token_ids[len(prompt) :])
    return prompts, answers


@pytest.fixture
def make_llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An engine of that model, with `tensor` × `pipeline` ranks."""
    install(monkeypatch.setattr)

    @contextmanager
    def make(tensor: int = 1, pipeline: int = 1, **settings: Any) -> Iterator[LLM]:
        settings = {**SETTINGS, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **settings}
        with llm_of_thread_ranks(folder, **settings) as llm:
            try:
                yield llm
            finally:
                core_of(llm).scheduler.check_integrity()

    return make


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 24, "async_scheduling": True},
        {"enable_prefix_caching": False},
        {"block_size": 16},
        {"disable_hybrid_kv_cache_manager": True},
    ],
    ids=str,
)
def test_it_says_what_the_recurrence_says(
    settings: dict[str, Any], make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    assert len({tuple(one) for one in expected}) == len(prompts)
    with make_llm(**settings) as llm:
        assert generate(llm, prompts) == expected
        before = llm.get_stats().prefix_cache_hits
        assert generate(llm, prompts[::-1]) == expected[::-1]
        hits = llm.get_stats().prefix_cache_hits - before
        stats = llm.get_stats()
    size = settings.get("block_size", BLOCK_SIZE)
    full = sum((len(prompt) - 1) // size * size for prompt in prompts)
    assert (0 < hits <= full) if settings.get("enable_prefix_caching", True) else hits == 0
    assert (stats.num_blocks_used, stats.num_failed_steps) == (0, 0)


def test_a_request_keeps_its_last_state_alone(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Its other blocks are those of the layer that attends to all tokens; and a long prompt goes on from the last full
    block of a shorter one."""
    prompts, expected = workload
    prompt, answer = prompts[-1], expected[-1]
    with make_llm() as llm:
        assert generate(llm, [prompt]) == [answer]
        before = llm.get_stats().prefix_cache_hits
        assert generate(llm, [[*prompt, *answer[:12]]])[0][: NUM_OUTPUT_TOKENS - 12] == answer[12:]
        assert llm.get_stats().prefix_cache_hits - before == (len(prompt) + 12 - 1) // BLOCK_SIZE * BLOCK_SIZE
        core = core_of(llm)
        core.add_request(EngineCoreRequest("long", prompt[::-1], PARAMS))
        held = []
        while core.has_requests():
            core.step()
            held.append(core.scheduler.kv_cache.num_blocks_of("long"))
    assert max(held) <= -(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE) + 2 * (-(-len(prompt) // BLOCK_SIZE) + 1)
    assert held[-2] <= -(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE) + 2 * 2


def test_preempted(make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, expected = workload
    with make_llm(kv_cache_memory_bytes=1 << 17, max_num_batched_tokens=16) as llm:
        assert generate(llm, prompts * 2) == expected * 2
        assert llm.get_stats().num_preemptions > 0


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_rejected_drafts_leave_no_trace(
    num_drafts: int, make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """With more drafts than a block has tokens, too."""
    prompts, expected = workload
    with make_llm(speculative_config={"method": "ngram", "num_speculative_tokens": num_drafts}) as llm:
        scheduler = core_of(llm).scheduler
        drafter = scheduler._drafter  # it would draft what pays on this machine
        draft_always(scheduler, drafter._proposer, drafter._vocab_size, num_drafts)
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected
        drafts = llm.get_stats().drafts
    assert drafts is not None
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens


def test_it_goes_on_after_a_sleep_a_reset_and_a_failed_step(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, expected = workload
    with make_llm() as llm:
        assert generate(llm, prompts) == expected
        llm.sleep(level=1)
        llm.wake_up()
        assert generate(llm, prompts) == expected
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts) == expected
        runner = core_of(llm).executor._worker.runner
        submit, steps = runner.submit, iter(range(100))
        monkeypatch.setattr(runner, "submit", lambda output: 1 / 0 if next(steps) == 3 else submit(output))
        assert generate(llm, prompts) == expected
        assert llm.get_stats().num_failed_steps == 1


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 1}, {"max_num_seqs": 1, "kv_cache_memory_bytes": 60_000}], ids=str
)
def test_one_request_at_a_time(
    settings: dict[str, Any], make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    with make_llm(**settings) as llm:
        assert generate(llm, prompts) == expected


def test_samples_and_log_probabilities_of_prompts(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Several samples go on from one prompt's states; log-probabilities of a prompt need all of its tokens computed."""
    prompts, expected = workload
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, n=3)
    with make_llm() as llm:
        for output, answer in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
            assert [one.token_ids for one in output.outputs] == [answer] * 3
        scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        outputs = llm.generate(prompts, scored, use_tqdm=False)
    for output, prompt, answer in zip(outputs, prompts, expected, strict=True):
        assert output.outputs[0].token_ids == answer[:2]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3)])
def test_however_it_is_cut_among_ranks(
    tensor: int, pipeline: int, make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload
    with make_llm(tensor, pipeline, max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected
        assert llm.get_stats().prefix_cache_hits > 0


def test_an_engine_that_replaces_another_goes_on_with_the_same_tokens(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompt, answer = workload[0][-1], workload[1][-1]
    with make_llm() as llm:
        core = core_of(llm)
        core.add_request(
            EngineCoreRequest("again", prompt, PARAMS, output_token_ids=answer[:11], is_replay=True, num_preemptions=1)
        )
        tokens: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                tokens += output.new_token_ids
    assert tokens == answer[11:]


def kept_in(place: str, folder: Path) -> dict[str, Any]:
    """A connector."""
    files = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    memory = {"kv_connector": "SharedMemoryConnector"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [memory, files]}}
    return {"files": files, "memory and files": both}[place]


def assert_loaded(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], **settings: Any
) -> None:
    """What an engine keeps, the next one loads, and goes on with the same tokens."""
    prompts, expected = workload
    blocks = {tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)}
    for is_first in (True, False):
        with make_llm(**settings) as llm:
            assert generate(llm, prompts) == expected
            stats = core_of(llm).make_stats().kv_connector
        assert stats is not None
        assert (stats.num_failed_blocks, stats.num_unsaved_blocks) == (0, 0)
        assert stats.num_loaded_blocks >= (0 if is_first else len(blocks))


needs_kernels = pytest.mark.skipif(library() is None, reason="memory needs the C++ kernels")


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("place", ["files", pytest.param("memory and files", marks=needs_kernels)])
def test_states_are_kept_elsewhere_with_the_blocks(
    place: str,
    tensor: int,
    pipeline: int,
    keeps_all: bool,
    make_llm: Callable[..., Any],
    workload: tuple[list[list[int]], list[list[int]]],
    tmp_path: Path,
) -> None:
    settings = {"kv_transfer_config": kept_in(place, tmp_path), "disable_hybrid_kv_cache_manager": keeps_all}
    assert_loaded(make_llm, workload, tensor=tensor, pipeline=pipeline, **settings)


def test_a_small_cache_loads_the_states_that_it_has_lost(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    prompts, expected = workload
    settings = {"kv_transfer_config": kept_in("files", tmp_path), "max_num_batched_tokens": 16}
    with make_llm(kv_cache_memory_bytes=1 << 17, **settings) as llm:
        assert generate(llm, prompts * 2) == expected * 2
        assert generate(llm, prompts) == expected
        stats = core_of(llm).make_stats()
    assert stats.num_preemptions > 0
    assert stats.kv_connector is not None
    assert stats.kv_connector.num_loaded_blocks > 0


def test_states_are_kept_on_another_host(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    with store_server(tmp_path) as (_, transfer):
        assert_loaded(make_llm, workload, kv_transfer_config=transfer)


def test_states_of_other_drafts_are_not_loaded(
    make_llm: Callable[..., Any], workload: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    """How many states a block has, and where its last one is, depends on the number of drafts."""
    for num_drafts in (1, 3):
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts}
        assert_loaded(make_llm, workload, kv_transfer_config=kept_in("files", tmp_path), speculative_config=drafts)
    assert len(list(tmp_path.glob("*/0"))) == 2


@pytest.fixture
def _recurrent_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_PROCESSES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_recurrent_processes")
@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_killed_engine_is_replayed(
    keeps_all: bool, tensor: int, folder: Path, workload: tuple[list[list[int]], list[list[int]]]
) -> None:
    prompts, expected = workload

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, params(max_tokens=NUM_OUTPUT_TOKENS)) for prompt in prompts[-4:]]
        await until(lambda: min(stream.num_tokens for stream in streams) > 5)
        assert not any(stream.task.done() for stream in streams)
        os.kill(llm.engine_pid if tensor == 1 else llm.worker_pids[1], signal.SIGKILL)
        return await asyncio.gather(*(stream.task for stream in streams))

    settings = {**SETTINGS, "tensor_parallel_size": tensor, "disable_hybrid_kv_cache_manager": keeps_all}
    with engine(folder, step_seconds=0.02, kv_cache_memory_bytes=2**22, **settings) as (llm, recorder):
        outputs = run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (1, 4)
    assert [output.outputs[0].token_ids for output in outputs] == expected[-4:]


class DecodeSide(Recorder):
    """Counts what the engine that decodes has loaded."""

    num_loaded_blocks = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        super().record(scheduler_stats, iteration_stats)
        if scheduler_stats is not None and scheduler_stats.kv_connector and iteration_stats.engine_index == 1:
            self.num_loaded_blocks = scheduler_stats.kv_connector.num_loaded_blocks


@pytest.mark.slow
@pytest.mark.usefixtures("_recurrent_processes")
@pytest.mark.parametrize("place", ["files", pytest.param("memory", marks=needs_kernels)])
def test_prompts_are_computed_by_one_engine_and_what_follows_by_another(
    place: str, folder: Path, workload: tuple[list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    prompts, expected = workload
    settings = {**SETTINGS, "disaggregation": {"prefill": 1, "decode": 1}}
    if place == "files":
        settings["kv_transfer_config"] = kept_in("files", tmp_path / "blocks")

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(
            *(Stream(llm, prompt, params(max_tokens=NUM_OUTPUT_TOKENS)).task for prompt in prompts)
        )

    with engine(folder, DecodeSide(), step_seconds=0.01, kv_cache_memory_bytes=2**22, **settings) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_loaded_blocks > 0
    assert [output.outputs[0].token_ids for output in outputs] == expected
