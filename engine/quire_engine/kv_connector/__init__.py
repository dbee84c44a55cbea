"""KV blocks that outlive the KV cache: saved when they are full, and loaded in place of being computed.

Two halves, as in vLLM's `KVConnectorBase_V1`. They tell each other what a step is to do in its message
(`messages.KVConnectorMetadata`), and what became of it in shared memory (`board`), so that no step waits for it::

    engine core   `ConnectorScheduler`    what is stored? which request waits for what? what is to be saved?
                        │ saves, loads, placements        ▲ how many blocks of a load are there
    each rank     `ConnectorWorker`       pages ⇄ host memory; a thread reads blocks, another one writes them
                        │
                  `BlockStore`            where blocks are kept; one of
                  `MemoryStore`           memory that the model's engines share; `KVMemory`: whose it is
                  `FolderStore`           files in a bounded folder, which other processes may use as well
                  `RemoteStore`           the same on another host, where `StoreServer` asks a `FolderStore`
                  `TieredStore`           several of these, one after the other
                  `block_file`            what is in a file: the layout, and the digest that is checked

Without the setting `kv_transfer_config` nothing of this is imported on the way of a step. What the scheduler asks of a
connector is in `scheduler/kv_connector.py`.
"""
