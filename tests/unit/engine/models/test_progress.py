"""The share of the weights that is loaded, as it is told."""

import logging
from pathlib import Path

import pytest
import torch
from quire_engine.distributed import ParallelState
from quire_engine.models import CheckpointConfig, progress
from quire_engine.models.loader import load_model
from quire_engine.models.progress import reported_progress
from support.checkpoints import make_small_checkpoint


def load(folder: Path, parallel: ParallelState = ParallelState()) -> None:
    load_model(folder, CheckpointConfig.from_folder(folder), torch.float32, 64, parallel)


@pytest.mark.parametrize("parallel", [ParallelState(), ParallelState(pipeline_parallel_size=2)], ids=["whole", "stage"])
def test_it_grows_to_all_of_it(
    parallel: ParallelState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    shares: list[int] = []
    with reported_progress(shares.append):
        load(make_small_checkpoint(tmp_path), parallel)
    assert shares == sorted(shares)
    assert shares[0] < 50 < shares[-1] == 100
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        load(tmp_path, parallel)
    assert caplog.messages[-1] == "loading weights: 100% of 0 MB"


def test_of_several_ranks_the_first_speaks_and_short_loads_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[int] = []
    make_small_checkpoint(tmp_path)
    with reported_progress(shares.append):
        load(tmp_path)
        monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
        load(tmp_path, ParallelState(rank=1, tensor_parallel_size=2))
    assert shares == []
