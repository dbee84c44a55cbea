"""Ranks that are processes of their own and talk over torch.distributed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine.system.child_process import start_module
from support.oracle import Expected

Workload = tuple[list[list[int]], list[int], list[Expected]]

LOOPBACK = "0100007F"


def run_ranks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank reports."""
    processes = [
        start_module("support.distributed_rank", {**job, "rank": rank}, stdout=subprocess.PIPE)
        for rank in range(job["tensor"] * job["pipeline"])
    ]
    try:
        results = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output.splitlines()[-1]) for output in results]


def check_group(report: dict[str, Any], size: int, rank: int) -> None:
    assert (report["size"], report["rank"]) == (size, rank)
    total = 15 * sum(0.1 + other for other in range(size))
    assert report["sums"] == [pytest.approx(total, rel=1e-5), pytest.approx(total, rel=1e-2)]
    rows = [[start + 10.0 * other for other in range(size) for start in (first, first + 1)] for first in (0, 2)]
    assert report["gathered"] == (rows if rank == 0 else None)
    assert report["received"] == ([[0.0] * 2, [1.0] * 4, [2.0] * 6] if rank == 1 else [])


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (2, 2)])
def test_ranks_form_their_groups_and_compute_together(
    tensor: int,
    pipeline: int,
    tmp_path: Path,
    checkpoint: Callable[[str], Path],
    workload: Callable[[str], Workload],
) -> None:
    prompts, _, expected = workload("tied-gqa")
    reports = run_ranks(
        {
            "tensor": tensor,
            "pipeline": pipeline,
            "init_method": (tmp_path / "meeting").as_uri(),
            "folder": str(checkpoint("tied-gqa")),
            "prompts": prompts[:8],
        }
    )
    for rank, report in enumerate(reports):
        check_group(report["tensor_group"], tensor, rank % tensor)
        if pipeline > 1:
            check_group(report["pipeline_group"], pipeline, rank // tensor)
        else:
            assert report["pipeline_group"] is None
        assert set(report["listens"]) == {LOOPBACK}, "reachable from outside"
    for name in ("tensor_group", "pipeline_group")[: 1 + (pipeline > 1)]:
        assert len({tuple(report[name]["sums"]) for report in reports}) == 1, "other bits than on the other ranks"
    output_rank = tensor * (pipeline - 1)
    assert reports.pop(output_rank)["token_ids"] == [want.token_ids[0] for want in expected[:8]]
    assert [report["token_ids"] for report in reports] == [[]] * len(reports)
