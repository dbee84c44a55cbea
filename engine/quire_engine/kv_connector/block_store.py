"""BlockStore: where KV blocks are kept outside the KV cache; StoredBlocks: which ones are there."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

MAX_BAD = 100_000
"""Limit of the blocks that are known to be bad."""

Block = tuple[bytes, memoryview]
"""A block's hash and its bytes, or the room for them."""


class BlockStore(Protocol):
    """The blocks of one rank of one namespace. Any thread may call any method. They raise OSError where the store
    cannot be reached, read or written."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""

    def read(self, blocks: Sequence[Block]) -> int:
        """Read blocks of one size. Returns how many there are, up to the first that is not there.

        Raises:
            BlockFileError: something else is in the place of the first.
        """

    def write(self, blocks: Sequence[Block]) -> int:
        """Keep blocks of one size that are not there already. Returns how many are there now, the first ones."""

    def close(self) -> None:
        """Close what is open. A call meanwhile raises OSError."""


class ListedStore(BlockStore, Protocol):
    """A store whose blocks are listed now and then (`BlockIndex`), as finding one takes too long for a step."""

    def describe(self, text: str) -> None:
        """Write down what the namespace stands for."""

    def folders(self) -> dict[str, int]:
        """The parts that have blocks, and when each last changed, in nanoseconds."""

    def hashes(self, folder: str) -> set[bytes]:
        """The blocks of one part."""


class StoredBlocks(ABC):
    """Which blocks are stored, as far as the engine core knows without a wait."""

    def __init__(self) -> None:
        self._bad: set[bytes] = set()
        """Blocks that could not be loaded: another rank may lack them."""

    @abstractmethod
    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there, up to the first that is not."""

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether a block need not be saved: all stores have it."""
        return self.num_stored([block_hash]) == 1

    def add(self, block_hash: bytes) -> None:
        """A block is being saved."""
        self._bad.discard(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded. It counts as absent until it is saved again."""
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad.add(block_hash)

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""
