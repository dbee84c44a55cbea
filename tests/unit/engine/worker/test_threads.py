"""Threads: as many as the model is worth, of the cores that a rank may count as its own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine import LLM
from quire_engine.worker.threads import (
    PARAMETERS_PER_THREAD,
    PROMPT_PARAMETERS_PER_THREAD,
    configure_threads,
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
    configure_threads(2 * PROMPT_PARAMETERS_PER_THREAD, can_generate=False)
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
