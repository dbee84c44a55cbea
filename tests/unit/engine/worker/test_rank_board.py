"""The board that ranks post to: every process that has its descriptor sees the same numbers, each part in its place."""

import os
from typing import Any

import numpy as np
import pytest
from quire_engine.config import EngineConfig, EngineCoreConfig
from quire_engine.worker.rank_board import RankBoard

CONNECTOR = {
    "kv_connector": "SharedStorageConnector",
    "kv_connector_extra_config": {"shared_storage_path": "/none"},
}


def config_of(**settings: Any) -> EngineCoreConfig:
    return EngineConfig.from_settings({"model": "/m", **settings}).core


@pytest.mark.parametrize("has_connector", [False, True])
@pytest.mark.parametrize("expert_shape", [None, (3, 5)])
def test_what_one_process_posts_the_others_read(has_connector: bool, expert_shape: tuple[int, int] | None) -> None:
    config = config_of(tensor_parallel_size=2, **({"kv_transfer_config": CONNECTOR} if has_connector else {}))
    reader = RankBoard(config, expert_shape)
    writers = [RankBoard(config, expert_shape, os.dup(reader.descriptor)) for _ in range(2)]
    for rank, writer in enumerate(writers):
        writer.add_busy(rank, 10**9 * (rank + 1))
        writer.add_busy(rank, 5 * 10**8)
        if writer.transfers is not None:
            writer.transfers.put(rank, 63, 7, 3 + rank)
            writer.transfers.count_saved(rank, 100)
        if writer.expert_tokens is not None:
            writer.expert_tokens[rank] += rank + 1
    for board in (reader, *writers):
        board.close()  # the memory stays
    assert reader.busy_seconds() == [1.5, 2.5]
    assert (reader.transfers is not None) == has_connector
    if reader.transfers is not None:
        assert (reader.transfers.loaded(63, 7), reader.transfers.saved()) == (3, (1, 200, 0))
    assert (reader.expert_tokens is not None) == (expert_shape is not None)
    if reader.expert_tokens is not None:
        assert np.array_equal(reader.expert_tokens, np.array([[1] * 5, [2] * 5, [0] * 5]))


def test_a_board_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    board = RankBoard(config_of(kv_transfer_config=CONNECTOR), (2, 4))
    assert len(os.listdir("/proc/self/fd")) > before
    board.close()
    del board
    assert len(os.listdir("/proc/self/fd")) == before
