"""StateSpec: what a layer keeps of a request, in the blocks of the paged cache.

::

    block of 4 tokens      t0 t1 t2 t3        what it holds of a layer
    attention              k  k  k  k         rows per token: keys and values, or one latent row; in int8, each head's
                           v  v  v  v         ends with its scale
    recurrent              state after t3     a state, and the inputs of the last tokens (`quire_kernels.states`)

The bytes of a block, the tensors and which of them layers share derive from the specs alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Literal, Protocol

TOKENS = -1
"""In the shape of a `StateTensor`: the tokens of a block."""
DRAFTS = -2
"""Likewise: the drafts that a step may compute for a request, and `StateTensor.num_rows` more."""
STATE = 0
"""What layers that keep a state have for a window: they need no keys of earlier tokens. A token needs the state after
the one before it, so a prefix can be restored where the block with the state after its last token is cached."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer, with a part for each block.

    Attributes:
        shape: of a block's part; `TOKENS` and `DRAFTS` stand for numbers of the engine.
        dtype: None: that of the cache, `kv_cache_dtype`.
        num_rows: see `DRAFTS`.
    """

    shape: tuple[int, ...]
    dtype: Literal["float32"] | None = None
    num_rows: int = 0

    def block_shape(self, block_size: int, max_drafts: int = 0, scale_size: int = 0) -> tuple[int, ...]:
        """The shape of a block's part.

        Args:
            block_size: tokens per block.
            max_drafts: see `DRAFTS`.
            scale_size: what the scale of a row takes in the cache's dtype, in numbers; a row is a token's, or a head's.
        """
        sizes = {TOKENS: block_size, DRAFTS: max_drafts + self.num_rows}
        *rows, row_size = (sizes.get(size, size) for size in self.shape)
        return (*rows, row_size + scale_size if self.dtype is None else row_size)


class StateSpec(Protocol):
    """What a layer keeps. Layers whose specs have the same tensors can share memory, block by block."""

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Tensors of the layer, in the order of its arguments; empty if it keeps nothing."""

    @property
    def window(self) -> int | None:
        """How many of its last tokens, itself among them, a token needs; None: all; `STATE`: none. A prefix can be
        restored wherever the blocks of its last `window - 1` tokens are cached; a draft can be rolled back if what it
        writes is never read by a token at or before its position."""

    @property
    def is_lasting(self) -> bool:
        """Whether a later step reads it; else layers with the same tensors use the same memory."""

    @property
    def cache_of(self) -> int | None:
        """The number of the layer whose tensors are its own; None: it has some."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The properties of a layer's attention that its KV cache and kernels depend on; layers may differ.

    Attributes:
        num_heads: query heads of this rank.
        num_kv_heads: key and value heads of this rank.
        head_size: of queries and keys, and of values that are cached.
        window: each row sees at most its last `window` keys; None: all.
        value_size: of values that are the last features of their keys, so that only keys are cached; None: values are
            cached as well.
        is_causal: a row sees no key after its own; else as many as before. Keys and values are then needed only while
            the layer computes the step that has all of them, and layers share their memory.
        is_chunked: a row sees no key before its chunk of `window`, counted from the sequence's first.
        cache_of: the number of the layer whose cache it reads, and does not write; None: its own. Layers that differ in
            this alone are of one kind.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    value_size: int | None = None
    is_causal: bool = True
    is_chunked: bool = False
    cache_of: int | None = field(default=None, compare=False)

    @property
    def signed_window(self) -> int | None:
        """The window as `paged_attention` takes it."""
        return -self.window if self.is_chunked and self.window is not None else self.window

    @property
    def is_lasting(self) -> bool:
        """Whether it is needed after the step that writes it."""
        return self.is_causal

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """Keys, and values if they are cached."""
        if self.cache_of is not None:
            return ()
        num_tensors = 2 if self.value_size is None else 1
        return (StateTensor((self.num_kv_heads, TOKENS, self.head_size)),) * num_tensors


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What a recurrent layer keeps of a request: states, such as those of linear attention, and rings with the inputs
    of its last tokens, such as those of a short convolution (`quire_kernels.states`).

    Attributes:
        shapes: of the states, on this rank.
        rings: of the rings, on this rank: how many rows each has besides one for each draft, and of what size.
    """

    shapes: tuple[tuple[int, ...], ...]
    rings: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """States, then rings; in float32, as errors add up over a sequence."""
        states = (StateTensor(shape, "float32") for shape in self.shapes)
        return (*states, *(StateTensor((DRAFTS, size), "float32", rows) for rows, size in self.rings))

    @property
    def window(self) -> int:
        return STATE

    @property
    def is_lasting(self) -> bool:
        return True

    @property
    def cache_of(self) -> None:
        """None: each layer has states."""


def block_bytes(
    specs: Iterable[StateSpec], block_size: int, dtype_bytes: int, max_drafts: int = 0, scale_size: int = 0
) -> int:
    """Bytes of one block over all layers.

    Args:
        specs: by layer.
        block_size: tokens per block.
        dtype_bytes: of a number of the cache's dtype.
        max_drafts: see `DRAFTS`.
        scale_size: see `StateTensor.block_shape`.
    """
    num_bytes = 0
    for tensor in (tensor for spec in specs for tensor in spec.tensors):
        shape = tensor.block_shape(block_size, max_drafts, scale_size)
        num_bytes += prod(shape) * (dtype_bytes if tensor.dtype is None else 4)
    return num_bytes
