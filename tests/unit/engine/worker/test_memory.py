"""How much of the memory the KV cache gets, and what is said when that is nothing."""

import gc
import mmap
import random
import threading
from pathlib import Path

import pytest
import torch
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.messages import SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.models.layers.parallel import Packable
from quire_engine.models.loader import load_model
from quire_engine.models.mapped import HUGE_PAGE, HugePages, mapped_zeros, move_to_huge_pages
from quire_engine.system.memory import paused_gc, release_code_pages, release_pages, resident_memory_bytes
from quire_engine.worker import Worker
from quire_engine.worker.model_runner import ModelRunner
from quire_engine.worker.profiler import TRIAL_TOKENS
from quire_engine.worker.submitted_step import SubmittedStep
from support.ranks import run_on_ranks, thread_ranks

TINYPY = Path(__file__).resolve().parents[4] / "model_repository" / "tinypy" / "1" / "model"


def test_too_small_a_share_of_the_memory_names_the_setting_that_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization is 1e-07: .* raise it, or set kv_cache_memory_bytes"
    ):
        LLM(str(TINYPY), max_model_len=64, max_num_batched_tokens=64, gpu_memory_utilization=1e-7)


def test_a_cache_beyond_the_machines_memory_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(
        ValueError, match=r"^kv_cache_memory_bytes is 10{15}, and this machine has [0-9]+ bytes of memor"
    ):
        LLM(str(TINYPY), max_num_seqs=1, kv_cache_memory_bytes=10**15)


def test_an_fp8_cache_holds_twice_the_tokens() -> None:
    """Of a model in bfloat16."""
    blocks = [
        LLM(TINYPY, kv_cache_memory_bytes=1 << 20, max_num_seqs=4, **settings).get_stats().num_blocks_free
        for settings in ({}, {"kv_cache_dtype": "fp8"})
    ]
    assert blocks[1] == 2 * blocks[0] > 0


def test_a_cache_that_nobody_has_used_is_no_memory() -> None:
    size = 512 << 20
    before = resident_memory_bytes()
    llm = LLM(TINYPY, kv_cache_memory_bytes=size, max_num_seqs=4)
    assert resident_memory_bytes() - before < size / 2
    llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
    assert resident_memory_bytes() - before < size / 2


def test_memory_of_a_step_is_measured_on_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    num_layers = []
    submit_step = ModelRunner.submit

    def submit(runner: ModelRunner, scheduler_output: SchedulerOutput) -> SubmittedStep:
        num_layers.append((len(runner.model.layers), len(runner.kv_caches)))
        return submit_step(runner, scheduler_output)

    monkeypatch.setattr(ModelRunner, "submit", submit)
    llm = LLM(TINYPY, max_num_seqs=4)
    assert num_layers == [(1, 1)]
    llm.generate("def f(", SamplingParams(max_tokens=1), use_tqdm=False)
    layers = CheckpointConfig.from_folder(TINYPY).num_layers
    assert layers > 1
    assert num_layers[1:] == [(layers, layers)]


def test_where_the_size_of_the_cache_is_set_a_small_step_shows_that_the_model_can_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit, tokens = ModelRunner.submit, []

    def count(runner: ModelRunner, scheduler_output: SchedulerOutput) -> SubmittedStep:
        tokens.append(sum(scheduler_output.num_scheduled_tokens.values()))
        return submit(runner, scheduler_output)

    monkeypatch.setattr(ModelRunner, "submit", count)
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 4}
    for size in ({}, {"kv_cache_memory_bytes": 1 << 20}):
        LLM(TINYPY, **settings, **size).shutdown()
    assert tokens == [512, TRIAL_TOKENS]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_of_all_kinds_are_run_where_kernels_are_compiled_when_first_used(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks alike: they wait for each other."""

    class Planner:
        def __init__(self, *_: object) -> None: ...

        def plan(self, tables: object, starts: torch.Tensor, seq_lens: torch.Tensor) -> None:
            planned.append(seq_lens.tolist())

    planned: list[list[int]] = []
    monkeypatch.setattr("quire_engine.worker.profiler.ContextBuilder", Planner)
    monkeypatch.setattr("quire_engine.worker.worker.uses_triton", lambda tensor: True)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "async_scheduling": async_scheduling}
    config = EngineConfig.from_settings({"model": str(TINYPY), "enforce_eager": True, **settings})
    steps: dict[int, list[list[int]]] = {0: [], 1: []}
    submit_step = ModelRunner.submit

    def submit(runner: ModelRunner, scheduler_output: SchedulerOutput) -> SubmittedStep:
        steps[runner.parallel.rank].append(list(scheduler_output.num_scheduled_tokens.values()))
        return submit_step(runner, scheduler_output)

    def profile(parallel: ParallelState) -> int:
        worker = workers[parallel.rank]
        worker.determine_num_blocks()
        return len(worker.runner.batch.slots)

    monkeypatch.setattr(ModelRunner, "submit", submit)
    ranks = thread_ranks(2, 1)
    # Not in the ranks' threads: while a model is built, torch's default dtype is its own, in all threads.
    workers = [Worker(config, CheckpointConfig.from_folder(TINYPY), 64, parallel) for parallel in ranks]
    assert run_on_ranks(ranks, profile) == [0, 0], "nothing is left of it"
    assert steps[0] == steps[1] == [[4] * 8, [1] * 8, [32], [1]]
    # Eight decodes and a short suffix, on each rank.
    assert planned == [[64] * 9] * 2, "room for what the longest sequences need"


def test_a_model_without_memory_has_no_mappings() -> None:
    with torch.device("meta"):
        assert mapped_zeros((4, 4), torch.float32).is_meta


def test_pages_that_are_let_go_are_read_from_the_file_again(tmp_path: Path) -> None:
    size = 64 * mmap.PAGESIZE
    content = bytes(range(256)) * (size // 256)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        mapping = torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    first = mapping.data_ptr()
    assert bytes(mapping.numpy()) == content
    before = resident_pages(f"{first:x}-")
    release_pages(first + 1, size - 2)  # not the two pages that it has parts of
    assert before >= 64
    assert resident_pages(f"{first:x}-") == before - 62
    assert bytes(mapping.numpy()) == content


def resident_pages(beginning: str, kind: str = "Rss:") -> int:
    """Of the mappings whose line in /proc/self/smaps begins, or ends, so."""
    pages, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(maxsplit=1)[0].count("-") == 1:
            counts = line.startswith(beginning) or line.endswith(beginning)
        elif counts and line.startswith(kind):
            pages += int(line.split()[1]) * 1024 // mmap.PAGESIZE
    return pages


def test_pages_of_code_come_back_when_they_are_needed() -> None:
    def code_pages() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        return sum(
            int(next(rest for rest in lines if rest.startswith("Rss:")).split()[1])
            for line in lines
            if " r-xp " in line and line.endswith("libtorch_cpu.so")
        )

    x = torch.randn(64, 64)
    expected, before = torch.linalg.inv(x), code_pages()
    release_code_pages.__wrapped__()  # whatever this process has done before
    assert code_pages() < before
    assert torch.equal(torch.linalg.inv(x), expected)


def test_loading_lets_go_of_the_file_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    pack = Packable.pack

    def watched(module: Packable) -> None:
        mapped.append(resident_pages(str(TINYPY / "model.safetensors")))
        pack(module)

    monkeypatch.setattr(Packable, "pack", watched)
    load_model(TINYPY, CheckpointConfig.from_folder(TINYPY), torch.bfloat16, 64)
    assert len(mapped) > 10
    assert 0 < max(mapped) < (TINYPY / "model.safetensors").stat().st_size / mmap.PAGESIZE / 2


@pytest.mark.parametrize("huge_pages", [False, True])
def test_mapped_memory_is_taken_when_written_and_given_back_when_freed(huge_pages: bool) -> None:
    size = 64 << 20
    before = resident_memory_bytes()
    tensor = mapped_zeros((size // 4, 2), torch.bfloat16, huge_pages=huge_pages)
    assert resident_memory_bytes() - before < size / 4
    tensor.fill_(1)
    assert resident_memory_bytes() - before > size * 3 / 4
    assert tensor.sum(dtype=torch.float32) == size / 2
    del tensor
    assert resident_memory_bytes() - before < size / 4


def test_places_in_huge_pages_are_apart_and_freed_with_the_last() -> None:
    pages, before = HugePages(), resident_memory_bytes()
    taken = [pages.take(size) for size in (1, 100, 0, HUGE_PAGE, 40 << 20, 7)]
    assert [len(one) for one in taken] == [1, 100, 0, HUGE_PAGE, 40 << 20, 7]
    assert all(one.data_ptr() % 64 == 0 and (not len(one) or int(one.max()) == 0) for one in taken)
    for number, one in enumerate(taken):
        one.fill_(number)
    assert all(int(one.min()) == int(one.max()) == number for number, one in enumerate(taken) if len(one))
    del pages, taken, one
    assert resident_memory_bytes() - before < 20 << 20


def test_a_files_pages_become_huge_ones_while_others_read_them(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(5 << 20)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        mapping = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    expected, moved, wrong = mapping.clone(), threading.Event(), []

    def read() -> None:
        while not moved.is_set():
            wrong.append(not mapping.equal(expected))

    reader = threading.Thread(target=read)
    reader.start()
    mappings_before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        move_to_huge_pages(mapping.data_ptr(), len(mapping))
    moved.set()
    reader.join()
    assert wrong
    assert not any(wrong)
    assert mapping.equal(expected)
    first = -(-mapping.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    assert resident_pages(f"{first:x}-", "Anonymous:") > 0, "they are no longer the file's"
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings_before + 20, "nothing is left mapped"


def test_what_fills_no_huge_page_stays() -> None:
    tensor = torch.arange(1000)
    move_to_huge_pages(tensor.data_ptr(), tensor.nbytes)
    move_to_huge_pages(tensor.data_ptr(), 0)
    assert tensor.equal(torch.arange(1000))


def test_mapped_memory_may_be_none() -> None:
    assert mapped_zeros((3, 0), torch.float32).shape == (3, 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_once_it_has_rested(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with paused_gc():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_pauses_of_garbage_collection_may_overlap() -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable()
        one, other = paused_gc(), paused_gc()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert not gc.isenabled()
        other.__exit__(None, None, None)
        assert gc.isenabled()
    finally:
        (gc.enable if was_enabled else gc.disable)()
