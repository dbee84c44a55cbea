"""What the scheduler's half of a KV connector loads."""

from random import Random

import numpy as np
from quire_engine.config import KVTransferConfig
from quire_engine.kv_cache import STATE, KVCacheGroups, KVCacheManager
from quire_engine.kv_cache.hashing import hash_state_parts
from quire_engine.kv_connector.board import ROW, TransferBoard
from quire_engine.kv_connector.connector_scheduler import ConnectorScheduler
from quire_engine.messages import SchedulerOutput
from support.kv_connectors import FakeIndex
from support.scheduling import make_request

NUM_STATE_PARTS = 6


def test_a_load_reaches_the_next_snapshot_however_little_memory_it_has() -> None:
    """A state is about as large as keys and values of the blocks from one snapshot to the next."""
    kv_cache, index = KVCacheManager(100, 4, True, KVCacheGroups((None, STATE), (), 8), 20), FakeIndex(Random(0), 0.0)
    extra = {"shared_storage_path": "/none", "staging_bytes": 10}
    config = KVTransferConfig.from_value({"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra})
    board = TransferBoard(np.zeros((1, ROW), dtype=np.int64))
    connector = ConnectorScheduler(config, kv_cache, index, board, [1], num_state_parts=NUM_STATE_PARTS)
    requests = [make_request(range(number, 40 + number)) for number in range(2)]
    stored = []
    for request in requests:
        assert kv_cache.get_computed_blocks(request) == []
        stored.append([*request.block_hashes[:8], *hash_state_parts(request.block_hashes[7], NUM_STATE_PARTS)])
        index.known.update(stored[-1])
        assert connector.begin_load(request, 0)
    output = SchedulerOutput({})
    connector.end_step(output)
    assert output.kv_connector_metadata is not None
    assert [load.block_hashes for load in output.kv_connector_metadata.loads] == stored[:1], "the other waits for room"
