"""BlockStore: where KV blocks are kept outside the KV cache. `open_store` makes the one that the settings name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire_engine.config import TierConfig
from quire_engine.kv_connector.folder_store import FolderStore

MAX_FILE_BYTES = 16 << 30
"""If the setting does not say how much."""

Block = tuple[bytes, memoryview]
"""A block's hash and its bytes, or the room for them."""


class BlockStore(Protocol):
    """The blocks of one rank of one namespace. Every method may be called by any thread, and raises OSError where the
    store cannot be reached, read or written."""

    @property
    def place(self) -> str:
        """Where it is, for people."""

    def prepare(self, block_bytes: int) -> None:
        """No block is larger than this. Said once by the engine core, before any is read or written."""

    def read(self, blocks: Sequence[Block]) -> int:
        """Read blocks of one size. Returns how many there are, up to the first that is not there.

        Raises:
            BlockFileError: something else is in the place of the first.
        """

    def write(self, blocks: Sequence[Block]) -> int:
        """Keep blocks of one size that are not there already. Returns how many are there now, the first ones."""

    def describe(self, text: str) -> None:
        """Write down what the namespace stands for."""

    def folders(self) -> dict[str, int]:
        """The parts that it has blocks in, and when each last changed, in nanoseconds."""

    def hashes(self, folder: str) -> set[bytes]:
        """Of the blocks that are in one of them now."""

    def close(self) -> None:
        """Close what it has open. A call meanwhile raises OSError."""


def open_store(tier: TierConfig, memory: int | None, namespace: bytes, rank: int) -> BlockStore:
    """The store of a rank.

    Args:
        tier: what keeps the blocks.
        memory: the descriptor of the memory that they may be kept in.
        namespace: 32 bytes.
        rank: whose blocks.

    Raises:
        OSError: it cannot be had, such as a folder that cannot be made.
        ValueError: the keys of this host are not as they have to be.
    """
    storage = tier.kv_connector_extra_config
    match tier.kv_connector:
        case "RemoteStorageConnector":
            from quire_engine.kv_connector.remote_store import RemoteStore

            return RemoteStore.connect(storage, namespace, rank)
        case "SharedMemoryConnector":
            from quire_engine.kv_connector.memory_store import MemoryStore

            if memory is None:
                raise OSError("whoever starts the engine has allocated no memory for its KV blocks")
            return MemoryStore(memory, namespace, rank)
    max_bytes = MAX_FILE_BYTES if storage.max_bytes is None else storage.max_bytes
    return FolderStore(Path(storage.shared_storage_path), namespace, rank, max_bytes)
