"""Threads: as many as the model is worth, of the cores that a rank may count as its own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.messages import UseCores
from quire_engine.worker import threads
from quire_engine.worker.threads import (
    CATCH_UP_PARAMETERS_PER_THREAD,
    PARAMETERS_PER_THREAD,
    configure_threads,
    threads_to_catch_up,
)
from quire_kernels import cpu


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_parameters", "expected"),
    [
        (8, 1, 100 * PARAMETERS_PER_THREAD, 8),
        (8, 2, 100 * PARAMETERS_PER_THREAD, 4),
        (8, 3, 100 * PARAMETERS_PER_THREAD, 2),
        (2, 4, 100 * PARAMETERS_PER_THREAD, 1),
        (8, 2, 3 * PARAMETERS_PER_THREAD, 3),
        (8, 2, 5, 1),
    ],
)
def test_ranks_divide_the_cores(
    num_cores: int, num_ranks: int, num_parameters: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr(cpu, "set_num_threads", lambda number, *, torch_computes: chosen.append(number))
    configure_threads(num_parameters, num_ranks)
    assert chosen == [expected]
    configure_threads(2 * CATCH_UP_PARAMETERS_PER_THREAD, can_generate=False)
    assert chosen[1:] == [2], "prompts alone are worth more threads"


def test_replicas_get_no_more_threads_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(cpu, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "set_num_threads", lambda number, *, torch_computes: None)
    assert configure_threads(5, 2, num_replicas=2) == 2
    assert configure_threads(5, 4) == 2, "ranks of one engine may"
    with pytest.raises(ValueError, match=r"OMP_NUM_THREADS=2: each of 4 ranks has 1 of 4 cores; .* at most 1"):
        configure_threads(5, 4, num_replicas=4)


@pytest.mark.parametrize(("settings", "torch_threads"), [({"dtype": "bfloat16"}, 1), ({"dtype": "float16"}, 3)])
def test_torch_has_threads_where_it_computes(
    settings: dict[str, str],
    torch_threads: int,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    before = cpu.get_num_threads(), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        cpu.set_num_threads(3)
        LLM(checkpoint("tied-gqa"), **settings)
        assert (cpu.get_num_threads(), torch.get_num_threads()) == (3, torch_threads)
    finally:
        cpu.set_num_threads(before[0])
        torch.set_num_threads(before[1])


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "own", "num_parameters", "expected"),
    [
        (8, 1, 2, 100 * CATCH_UP_PARAMETERS_PER_THREAD, 8),
        (8, 3, 2, 100 * CATCH_UP_PARAMETERS_PER_THREAD, 2),
        (8, 16, 2, 100 * CATCH_UP_PARAMETERS_PER_THREAD, 2),
        (8, 1, 1, 3 * CATCH_UP_PARAMETERS_PER_THREAD, 3),
        (8, 1, 1, 5, 1),
    ],
)
def test_what_is_left_behind_is_computed_with_the_cores_that_are_left(
    num_cores: int, num_ranks: int, own: int, num_parameters: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert threads_to_catch_up(own, num_parameters, num_ranks) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", str(own))
    assert threads_to_catch_up(own, num_parameters, num_ranks) == own, "which says so"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_the_same_with_the_cores_of_others(
    dtype: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, and then it has its own number of threads again."""
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    before = cpu.get_num_threads(), torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(threads, "CATCH_UP_PARAMETERS_PER_THREAD", 1)
    prompts = [[(7 * i + j * j) % 500 for j in range(90 + i)] for i in range(12)]
    wanted = SamplingParams(max_tokens=4, temperature=0, logprobs=3)
    try:
        llm = LLM(checkpoint("tied-gqa"), dtype=dtype, enable_prefix_caching=False)
        answers = []
        for num_engines, num_threads in ((0, 1), (1, 4), (2, 2), (0, 1)):
            assert llm._core.call_utility(UseCores(num_engines)) is True
            assert cpu.get_num_threads() == num_threads
            answers.append([output.outputs[0] for output in llm.generate(prompts, wanted, use_tqdm=False)])
        assert all(answer == answers[0] for answer in answers)
    finally:
        cpu.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def test_torch_keeps_its_threads(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As what it computes may depend on their number."""
    before = cpu.get_num_threads(), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    try:
        llm = LLM(checkpoint("tied-gqa"), dtype="float16")
        own = cpu.get_num_threads(), torch.get_num_threads()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(threads, "CATCH_UP_PARAMETERS_PER_THREAD", 1)
        assert llm._core.call_utility(UseCores(1)) is True
        assert (cpu.get_num_threads(), torch.get_num_threads()) == own
    finally:
        cpu.set_num_threads(before[0])
        torch.set_num_threads(before[1])
