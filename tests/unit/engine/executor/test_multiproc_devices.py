"""What GPUs change, as far as it can be had without one: other groups, and errors that are the engine's end."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.executor import make_executor, multiproc, worker_processes
from quire_engine.executor.multiproc import MultiProcExecutor
from quire_engine.messages import Sleep
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.worker.worker import Worker
from support.multiproc import bad_step, executor, settings, step
from support.processes import open_descriptors

PROMPTS = [[5 + i % 60 for i in range(40)], [7, 8, 9], [11] * 100]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FAILS_AS_TOLD = """
submit_model = Worker.submit_model

def fails(self, scheduler_output):
    for name in scheduler_output.dropped_request_ids:
        raise getattr(torch, name)("CUDA error: as told\\nmore of it")
    return submit_model(self, scheduler_output)

Worker.submit_model = fails
"""
FAILS_ON_RANK_1 = """
submit_model = Worker.submit_model

def fails(self, scheduler_output):
    if self.parallel.rank == 1 and "poison" in scheduler_output.num_scheduled_tokens:
        raise RuntimeError("poisoned")
    return submit_model(self, scheduler_output)

Worker.submit_model = fails
"""


@pytest.fixture
def torch_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks talk as GPUs do: over torch.distributed, which on the CPU is gloo."""
    monkeypatch.setattr(worker_processes, "uses_shared_memory", lambda config: False)


@pytest.mark.usefixtures("torch_groups", "started_as_ever")
def test_ranks_meet_and_give_the_same_tokens(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the interpreter of each ends, beside gloo's threads."""
    monkeypatch.setattr(multiproc, "SHUTDOWN_SECONDS", 60.0)  # on a busy machine it takes long
    answers = []
    for more in ({"distributed_executor_backend": "uni"},
                 {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):  # fmt: skip
        llm = LLM(**settings(checkpoint("tied-gqa"), **more))
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        workers = llm._core.executor
        llm.shutdown()
    assert answers[0] == answers[1]
    assert isinstance(workers, MultiProcExecutor)
    assert [process.returncode for process in workers._workers._processes] == [0] * 4


def test_devices_that_are_not_there_leave_nothing_open(checkpoint: Callable[[str], Path]) -> None:
    descriptors = open_descriptors()
    with pytest.raises(ValueError, match="gpu_device_ids"):
        LLM(**settings(checkpoint("tied-gqa"), tensor_parallel_size=2, gpu_device_ids=[1000, 1001]))
    assert open_descriptors() <= descriptors


@pytest.mark.usefixtures("torch_groups")
def test_an_error_of_one_of_several_ranks_is_the_end(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    """The other rank waits for a sum that never comes."""
    in_workers(FAILS_ON_RANK_1)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        workers.submit(step("a"))
        assert list(workers.collect().sampled_token_ids) == ["a"]
        workers.submit(step("poison"))
        with pytest.raises(EngineDeadError, match=r"^rank 1: RuntimeError: poisoned$"):
            workers.collect()
        with pytest.raises(EngineDeadError):
            workers.submit(step("b"))
        with pytest.raises(EngineDeadError):
            workers.check_health()


@pytest.mark.usefixtures("torch_groups")
def test_a_method_does_not_wait_for_a_step_that_cannot_end(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers(FAILS_ON_RANK_1)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        workers.submit(step("poison"))
        with pytest.raises(EngineDeadError, match=r"^rank 1: RuntimeError: poisoned$"):
            workers.rank_step_seconds()
        with pytest.raises(EngineDeadError):
            workers.check_health()


@pytest.mark.usefixtures("torch_groups")
def test_error_of_a_method_is_its_own_and_the_end(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        def sleeps(self, level):
            if self.parallel.rank == 1:
                raise ValueError(f"not {level}")
            self.parallel.tensor_group.all_reduce(torch.ones(3))

        Worker.sleep = sleeps
    """)
    with executor(checkpoint("tied-gqa"), tensor_parallel_size=2) as workers:
        with pytest.raises(ValueError, match=r"^not 1$"):
            workers.collective_rpc(Sleep(1))
        with pytest.raises(EngineDeadError, match="not 1"):
            workers.check_health()


@pytest.mark.usefixtures("torch_groups")
def test_rank_that_cannot_start_does_not_wait_for_the_others(
    checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers("""
        from quire_engine.device import placement as device
        prepare_device = device.prepare_device

        def fails(config, checkpoint, rank):
            if rank == 1:
                raise ValueError("no GPU for rank 1")
            return prepare_device(config, checkpoint, rank)

        device.prepare_device = fails
    """)
    began_at = time.monotonic()
    with pytest.raises(ValueError, match=r"^no GPU for rank 1$"):
        MultiProcExecutor(EngineConfig.from_settings(settings(checkpoint("tied-gqa"), tensor_parallel_size=2)), 256)
    assert time.monotonic() - began_at < 60, "waited until the ranks gave up meeting"


@pytest.mark.parametrize("more", [{}, {"async_scheduling": True}, {"tensor_parallel_size": 2}],
                         ids=["one", "ahead", "two"])  # fmt: skip
def test_lost_gpu_is_the_end_and_memory_that_ran_out_is_not(
    more: dict[str, bool | int], checkpoint: Callable[[str], Path], in_workers: Callable[[str], None]
) -> None:
    in_workers(FAILS_AS_TOLD)
    with executor(checkpoint("tied-gqa"), **more) as workers:
        out_of_memory = bad_step()
        out_of_memory.dropped_request_ids = ["OutOfMemoryError"]
        workers.submit(out_of_memory)
        with pytest.raises(EngineError, match="OutOfMemoryError") as error:
            workers.collect()
        assert not isinstance(error.value, EngineDeadError)
        workers.submit(step("a"))
        assert list(workers.collect().sampled_token_ids) == ["a"]
        lost = step("b")
        lost.dropped_request_ids = ["AcceleratorError"]
        workers.submit(lost)
        with pytest.raises(EngineDeadError, match=r"the GPU cannot be used any more: AcceleratorError: .* as told$"):
            workers.collect()
        with pytest.raises(EngineDeadError):
            workers.check_health()


def test_lost_gpu_in_the_engines_own_process(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    folder = checkpoint("tied-gqa")
    config = EngineConfig.from_settings(settings(folder, distributed_executor_backend="uni"))
    uniproc = make_executor(config, CheckpointConfig.from_folder(folder), 256)
    uniproc.initialize_cache(8)
    for error, expected in (
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), EngineDeadError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ):

        def fails(self: Worker, scheduler_output: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "submit_model", fails)
            uniproc.submit(step("a"))
            with pytest.raises(expected):
                uniproc.collect()
    uniproc.submit(step("b"))
    assert list(uniproc.collect().sampled_token_ids) == ["b"]
    uniproc.shutdown()


def test_a_gpu_that_is_not_there_is_the_error_of_the_start(checkpoint: Callable[[str], Path]) -> None:
    for backend, ids in (("uni", [63]), ("mp", [63])):
        with pytest.raises(ValueError, match=r"^gpu_device_ids (is \[63\], but torch|names GPU 63 for rank 0)"):
            LLM(**settings(checkpoint("tied-gqa"), distributed_executor_backend=backend, gpu_device_ids=ids))
