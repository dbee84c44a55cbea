"""KV blocks that outlive the KV cache: saved when they are full, and loaded instead of being computed.

Two halves, as in vLLM's `KVConnectorBase_V1`. A step's message says what to do (`messages.KVConnectorMetadata`), and
shared memory says what was done (`board`), so that no step waits for it::

    engine core   `ConnectorScheduler`    what is stored, which request waits for what, what is saved
                        │ saves, loads, placements        ▲ how many blocks of a load are there
    each rank     `ConnectorWorker`       pages ⇄ host memory; a thread reads blocks, another one writes them
                        │
                  `BlockStore`            where blocks are kept; one of
                  `MemoryStore`           memory that the model's engines share, and `KVMemory` allocates
                  `FolderStore`           files in a bounded folder, which other processes may use as well
                  `RemoteStore`           the same on another host: `StoreServer` serves a `FolderStore`
                  `TieredStore`           several of these, one after the other
                  `block_file`            the layout of a file, and the digest that is checked

Without the setting `kv_transfer_config` a step imports nothing of this. The scheduler's seam is
`scheduler/kv_connector.py`.
"""
