"""MultiProcExecutor: says what UniProcExecutor says, survives failed steps, sees a rank end, and ends all of them."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.errors import AbortedError, CheckpointError, EngineDeadError, EngineError
from quire_engine.messages import SchedulerOutput, Sleep, WakeUp
from quire_engine.system.memory import resident_memory_bytes
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE
from support.faults import put_fault
from support.multiproc import bad_step, executor, settings, step
from support.processes import ended, eventually, idles, is_gone, open_descriptors, start_forked, state

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + i % 60 for i in range(40)], [7, 8, 9], [11] * 100]


@pytest.mark.parametrize("name", ["tied-gqa", "tinypy"])
def test_same_tokens_as_in_one_process(name: str, checkpoint: Callable[[str], Path]) -> None:
    answers = []
    for backend in ("uni", "mp"):
        llm = LLM(**settings(checkpoint(name), distributed_executor_backend=backend))
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        if backend == "mp":
            for level in (1, 2):
                llm.sleep(level)
                llm.wake_up()
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
                answers.append([output.outputs[0].token_ids for output in outputs])
        llm.shutdown()
    assert answers == [answers[0]] * 4


def test_sleeping_worker_gives_its_memory_back(checkpoint: Callable[[str], Path]) -> None:
    with executor(checkpoint("tinypy")) as workers:
        workers.submit(step("a"))
        workers.collect()
        (pid,) = workers.worker_pids
        awake = resident_memory_bytes(pid)
        workers.collective_rpc(Sleep(2))
        weight_bytes = sum(path.stat().st_size for path in checkpoint("tinypy").glob("*.safetensors"))
        assert awake - resident_memory_bytes(pid) >= 0.9 * weight_bytes
        workers.collective_rpc(WakeUp())
        workers.submit(step("b"))
        assert list(workers.collect().sampled_token_ids) == ["b"]


@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2}], ids=["1 rank", "2 ranks"])
def test_failed_step_is_an_error_and_the_next_one_works(more: Any, checkpoint: Callable[[str], Path]) -> None:
    with executor(checkpoint("tied-gqa"), **more) as workers:
        assert len(workers.worker_pids) == len(set(workers.worker_pids)) == more.get("tensor_parallel_size", 1)
        workers.submit(step("a"))
        expected = workers.collect().sampled_token_ids["a"]
        for i in range(3):
            workers.submit(bad_step())
            with pytest.raises(EngineError, match=r"KeyError.*unknown to the workers"):
                workers.collect()
            workers.submit(step(f"b{i}"))
            assert workers.collect().sampled_token_ids == {f"b{i}": expected}


def test_rank_that_fails_alone_leaves_nobody_waiting(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        submit_model = Worker.submit_model

        def fails(self, scheduler_output):
            step = submit_model(self, scheduler_output)
            if "poison" in scheduler_output.num_scheduled_tokens:
                if self.parallel.rank == 1:
                    raise RuntimeError("poisoned")
                self.parallel.tensor_group.all_reduce(torch.ones(3))
            return step

        Worker.submit_model = fails
    """)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        for i in range(3):
            workers.submit(step("poison"))
            with pytest.raises(EngineError, match="rank 1: RuntimeError: poisoned"):
                workers.collect()
            good = step(f"a{i}")
            good.dropped_request_ids = ["poison"]
            workers.submit(good)
            assert len(workers.collect().sampled_token_ids[f"a{i}"]) == 1


def test_the_cause_is_told_though_another_rank_answers_first(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        class Slow(Exception):
            def __str__(self):
                time.sleep(0.2)  # once the other ranks have been let go
                return "poisoned"

        submit_model = Worker.submit_model

        def fails(self, scheduler_output):
            if self.parallel.rank == 1 and "poison" in scheduler_output.num_scheduled_tokens:
                raise Slow
            return submit_model(self, scheduler_output)

        Worker.submit_model = fails
    """)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        workers.submit(step("poison"))
        with pytest.raises(EngineError, match="rank 1: Slow: poisoned"):
            workers.collect()


def test_a_slow_rank_is_told_from_the_one_that_waits_for_it(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault.json"
    monkeypatch.setenv(FAULT_INJECTION_VARIABLE, str(fault))
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        assert workers.busy_seconds() == [0.0, 0.0]
        put_fault(fault, action="slow", rank=1, seconds=0.2)
        before = workers.busy_seconds()
        for i in range(6):
            workers.submit(step(f"a{i}"))
            workers.collect()
        fast, slow = (now - then for now, then in zip(workers.busy_seconds(), before, strict=True))
        assert slow >= 5 * 0.2  # of the last step the other rank may be the first to tell
        assert fast < slow / 2, "its waits do not count"
        put_fault(fault, action="slow", seconds=0.2)
        before = workers.busy_seconds()
        for i in range(6):
            workers.submit(step(f"b{i}"))
            workers.collect()
        assert all(now - then >= 5 * 0.2 for now, then in zip(workers.busy_seconds(), before, strict=True))
    assert workers.busy_seconds() == []


def test_steps_in_flight_are_collected_in_order(checkpoint: Callable[[str], Path]) -> None:
    with executor(checkpoint("tied-gqa"), pipeline_parallel_size=2) as workers:
        assert workers.max_concurrent_batches == 2
        for i in range(0, 6, 2):
            workers.submit(step(f"a{i}"))
            workers.submit(step(f"a{i + 1}"))
            assert [list(workers.collect().sampled_token_ids) for _ in range(2)] == [[f"a{i}"], [f"a{i + 1}"]]
        workers.submit(bad_step())
        workers.submit(step("b"))
        with pytest.raises(EngineError, match="KeyError"):
            workers.collect()
        with contextlib.suppress(EngineError):  # it may have been computed, or have failed with the one before
            workers.collect()
        workers.submit(step("c"))
        assert list(workers.collect().sampled_token_ids) == ["c"]


def test_step_that_is_aborted_because_of_the_next_one_says_so(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    """The first stage fails in the second step before the last stage has come to its part of the first."""
    in_workers("""
        submit_model = Worker.submit_model

        def fails(self, scheduler_output):
            if self.parallel.rank == 0 and "poison" in scheduler_output.num_scheduled_tokens:
                raise RuntimeError("poisoned")
            if self.parallel.rank == 1 and "innocent" in scheduler_output.num_scheduled_tokens:
                while not self.parallel.pipeline_group._abort._flag.is_released():
                    time.sleep(0.001)
            return submit_model(self, scheduler_output)

        Worker.submit_model = fails
    """)
    with executor(checkpoint("tied-gqa"), pipeline_parallel_size=2) as workers:
        workers.submit(step("innocent"))
        workers.submit(step("poison"))
        with pytest.raises(AbortedError, match="rank 1: AbortedError: another rank failed"):
            workers.collect()
        with pytest.raises(EngineError, match="rank 0: RuntimeError: poisoned"):
            workers.collect()
        workers.submit(step("next"))
        assert list(workers.collect().sampled_token_ids) == ["next"]


def test_large_calls_and_large_answers_do_not_wait_for_each_other(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    """Together they are more than fits into the queues, in both directions."""
    in_workers("""
        class Step:
            def __init__(self, request_ids):
                self.request_ids = request_ids

            def result(self):
                return ModelRunnerOutput({request_id: [1] for request_id in self.request_ids})

        def submit_step(self, scheduler_output):
            if scheduler_output.num_scheduled_tokens:
                return submit_model(self, scheduler_output)
            return Step(scheduler_output.dropped_request_ids)

        submit_model, Worker.submit_model = Worker.submit_model, submit_step
    """)
    size = 6 * 2**20
    with executor(checkpoint("tied-gqa"), pipeline_parallel_size=2) as workers:
        for _ in range(2):
            workers.submit(SchedulerOutput({}, dropped_request_ids=["x" * size]))
        for _ in range(2):
            (request_id,) = workers.collect().sampled_token_ids
            assert len(request_id) == size


def test_the_rank_with_the_least_memory_decides_and_all_share_it(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        from quire_engine.worker import cache_allocator, cache_memory
        cache_memory.available_memory_bytes = lambda: 2**30
        cache_memory.peak_memory_growth = lambda function: function() or 0
        cache_allocator.num_blocks_for = lambda available_bytes, **others: available_bytes
        determine_num_blocks = Worker.determine_num_blocks
        Worker.determine_num_blocks = lambda self: determine_num_blocks(self) + 1 - self.parallel.rank
        Worker.initialize_cache = lambda self, num_blocks: 0
    """)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2, kv_cache_memory_bytes=None) as workers:
        assert workers.determine_num_blocks() == int(2**30 * 0.5 * 0.9 / 2)


def test_worker_that_dies_at_start_is_named(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        def dies(self, config, checkpoint, max_model_len, parallel, *others):
            if parallel.rank == 1:
                os._exit(3)
            time.sleep(60)

        Worker.__init__ = dies
    """)
    descriptors = open_descriptors()
    with pytest.raises(EngineDeadError, match=r"worker rank 1 .* ended with exit code 3"):
        LLM(**settings(checkpoint("tied-gqa"), tensor_parallel_size=2))
    assert open_descriptors() <= descriptors


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
@pytest.mark.parametrize("when", ["before", "while waiting"])
def test_end_of_a_rank_is_noticed_at_once(
    signal_number: signal.Signals, when: str, checkpoint: Callable[[str], Path]
) -> None:
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        output_rank, victim = workers.worker_pids
        os.kill(output_rank, signal.SIGSTOP)  # so that there is something to wait for; it takes 0.2 s to be noticed
        assert eventually(lambda: state(output_rank) == "T")
        timer = threading.Timer(0 if when == "before" else 0.05, os.kill, (victim, signal_number))
        timer.start()
        if when == "before":
            timer.join()
            assert eventually(lambda: state(victim) in "TZX")
        workers.submit(step("a"))
        stopped = signal_number == signal.SIGSTOP
        how = r"[01] .* is stopped" if stopped else rf"1 \(process {victim}\) was killed by {signal_number.name}"
        with pytest.raises(EngineDeadError, match=f"worker rank {how}"):
            workers.collect()
        timer.join()
        with pytest.raises(EngineDeadError):
            workers.submit(step("b"))
        with pytest.raises(EngineDeadError):
            workers.collective_rpc(Sleep(1))


def test_error_at_start_is_the_workers_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    descriptors = open_descriptors()
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoint("tied-gqa").iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[:-100] if path.suffix == ".safetensors" else data)
    for backend in ("uni", "mp"):
        with pytest.raises(CheckpointError, match=r"truncated|safetensors"):
            LLM(**settings(broken, distributed_executor_backend=backend))
    with pytest.raises(ValueError, match=r"^kv_cache_memory_bytes: one block"):
        LLM(**settings(checkpoint("tied-gqa"), kv_cache_memory_bytes=10))
    assert open_descriptors() <= descriptors


def test_dropped_executor_ends_its_workers(checkpoint: Callable[[str], Path]) -> None:
    import gc

    llm = LLM(**settings(checkpoint("tied-gqa")))
    (pid,) = llm._core.ready.worker_pids
    del llm
    gc.collect()
    assert is_gone(pid)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_die_with_their_parent(stopped: bool, checkpoint: Callable[[str], Path]) -> None:
    source = """
        import sys, time
        from pathlib import Path
        from quire_engine import EngineConfig
        from quire_engine.executor.multiproc import MultiProcExecutor
        config = EngineConfig.from_settings({"model": sys.argv[1], "tensor_parallel_size": 2, "max_model_len": 256})
        executor = MultiProcExecutor(config, 256)
        print(*executor.worker_pids, flush=True)
        time.sleep(100)
    """
    parent = start_forked(source, str(checkpoint("tied-gqa")))
    assert parent.stdout is not None
    with ended([parent]):
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
            assert eventually(lambda: state(pids[0]) == "T")
        parent.kill()
        assert eventually(lambda: all(is_gone(pid) for pid in pids))


def test_idle_workers_use_no_cpu(checkpoint: Callable[[str], Path]) -> None:
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        workers.submit(step("a"))
        workers.collect()
        assert eventually(lambda: all(state(pid) == "S" for pid in workers.worker_pids))
        assert asyncio.run(idles(*workers.worker_pids, most=0.02))
        assert not any(map(is_gone, workers.worker_pids))


def test_stacks_and_log_lines_of_a_rank(checkpoint: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        capfd.readouterr()
        text = ""

        def dumped() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "worker_process.py" in text and "in main" in text

        os.kill(workers.worker_pids[1], signal.SIGUSR1)
        assert eventually(dumped)
        workers.submit(bad_step())
        with pytest.raises(EngineError):
            workers.collect()
        text += capfd.readouterr().err
        assert f"quire worker[rank 1, {workers.worker_pids[1]}] ERROR: a step failed" in text
