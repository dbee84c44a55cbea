"""StateSpec: what a layer keeps of a request, in the blocks of the paged cache.

::

    block of 4 tokens      t0 t1 t2 t3        what it holds of a layer
    attention              k  k  k  k         rows per token: keys and values, or one latent row
                           v  v  v  v

The bytes of a block, the tensors and which of them layers share derive from the specs alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

__all__ = ["TOKENS", "AttentionSpec", "StateSpec", "StateTensor", "block_bytes"]

TOKENS = -1
"""In the shape of a `StateTensor`: the tokens of a block."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer, with a part for each block.

    Attributes:
        shape: of a block's part; `TOKENS` stands for the tokens of a block.
        dtype: None: that of the cache, `kv_cache_dtype`.
    """

    shape: tuple[int, ...]
    dtype: Literal["float32"] | None = None

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """The shape of a block's part."""
        return tuple(block_size if size == TOKENS else size for size in self.shape)


class StateSpec(Protocol):
    """What a layer keeps. Layers whose specs have the same tensors can share memory, block by block."""

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Those of the layer, in the order in which it takes them; empty if it keeps nothing."""

    @property
    def window(self) -> int | None:
        """How many of its last tokens, itself among them, a token needs; None: all. A prefix can be restored wherever
        the blocks of its last `window - 1` tokens are cached; a draft can be rolled back if what it writes is never
        read by a token at or before its position."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The properties of a layer's attention that its KV cache and kernels depend on; layers may differ.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key and value heads of this rank.
        head_size: of queries, keys and values alike.
        window: each row sees at most its last `window` keys; None: all.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Keys and values."""
        return (StateTensor((self.num_kv_heads, TOKENS, self.head_size)),) * 2


def block_bytes(specs: Iterable[StateSpec], block_size: int, dtype_bytes: int) -> int:
    """Bytes of one block over all layers.

    Args:
        specs: by layer.
        block_size: tokens per block.
        dtype_bytes: of a number of the cache's dtype.
    """
    num_bytes = 0
    for tensor in (tensor for spec in specs for tensor in spec.tensors):
        num_bytes += prod(tensor.block_shape(block_size)) * (dtype_bytes if tensor.dtype is None else 4)
    return num_bytes
