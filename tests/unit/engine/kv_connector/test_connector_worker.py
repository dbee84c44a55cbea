"""What the ranks' half of a KV connector saves and loads."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from quire_engine.kv_cache import RecurrentSpec
from quire_engine.kv_connector.board import ROW, TransferBoard
from quire_engine.kv_connector.connector_worker import ConnectorWorker
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.messages import KVConnectorMetadata, KVLoad, KVPlacement

HASHES = [bytes([number]) * 32 for number in range(4)]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_a_stage_without_attention_has_its_state_back(num_parts: int, tmp_path: Path) -> None:
    """The other stages say in how many parts a state is kept."""
    states = torch.randn(3, 5)
    caches, board = [(states,)], TransferBoard(np.zeros((1, ROW), dtype=np.int64))
    store, specs = FolderStore(tmp_path, b"n" * 32, 0, 1 << 20), [RecurrentSpec(((5,),), ())]
    worker = ConnectorWorker(lambda: caches, specs, [1], store, board, 0, 1 << 20, num_parts)
    block, parts = HASHES[0], HASHES[1 : 1 + num_parts]
    worker.begin_step(KVConnectorMetadata(saves=[(block, [0])], state_saves=[(parts, 1)]))
    number, deadline = 0, time.monotonic() + 30
    while board.loaded(0, number) != 1 + num_parts:  # it is being saved
        assert time.monotonic() < deadline
        if number == 0 or board.loaded(0, number) is not None:
            number += 1
            worker.begin_step(KVConnectorMetadata(loads=[KVLoad(number, 0, [block, *parts])]))
        time.sleep(0.001)
    worker.begin_step(KVConnectorMetadata(placements=[KVPlacement(number, 0, [[0]], 2)]))
    worker.close()
    assert states[2].equal(states[1])
