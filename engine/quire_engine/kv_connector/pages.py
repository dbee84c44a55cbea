"""Pages: converts blocks of the KV cache to rows of bytes, in the order of `block_file`, and back."""

from collections.abc import Callable, Iterator, Sequence

import torch
from quire_kernels import PageConverter
from quire_kernels.kv_cache import natural_key_order, natural_value_order, tiled_key_order, tiled_value_order

from quire_engine.kv_cache import TOKENS, StateSpec
from quire_engine.models.step_context import KVCaches

_NATURAL = {0: natural_key_order, 1: natural_value_order}
_TILED = {0: tiled_key_order, 1: tiled_value_order}


class Pages:
    """The blocks of some layers.

    Args:
        kv_caches: returns the present caches of a stage. They are others after a sleep.
        specs: of the stage's layers.
        layers: places of these layers in the stage; unset: all.
    """

    def __init__(
        self, kv_caches: Callable[[], KVCaches], specs: Sequence[StateSpec], layers: Sequence[int] | None = None
    ) -> None:
        self._kv_caches = kv_caches
        self._layers = range(len(specs)) if layers is None else layers
        self._tensors = [tensor for layer in self._layers for tensor in specs[layer].tensors]
        self._converter: PageConverter | None = None
        self.block_bytes = sum(cache[0].nbytes for layer in self._present() for cache in layer)

    def read(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Copies of blocks: [n, block_bytes] uint8, on the caches' device."""
        caches = self._present()
        if (converter := self._present_converter(caches)) is not None:
            rows = torch.empty(len(block_ids), self.block_bytes, dtype=torch.uint8)
            converter.convert(block_ids, rows, to_cache=False)
            return rows
        ids_n = torch.tensor(block_ids, device=caches[0][0].device)
        rows = torch.empty(len(block_ids), self.block_bytes, dtype=torch.uint8, device=ids_n.device)
        for kind, cache, part in self._parts(caches):
            blocks = cache[ids_n]
            rows[:, part] = _as_bytes(blocks if kind is None else _NATURAL[kind](blocks))
        return rows

    def write(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write some blocks.

        Args:
            block_ids: which.
            rows: as `read` returns them, on any device.
        """
        caches = self._present()
        if (converter := self._present_converter(caches)) is not None:
            converter.convert(block_ids, rows.cpu(), to_cache=True)
            return
        ids_n = torch.tensor(block_ids, device=caches[0][0].device)
        rows = rows.to(ids_n.device, non_blocking=rows.is_pinned())
        for kind, cache, part in self._parts(caches):
            blocks = rows[:, part].contiguous().view(cache.dtype).view(len(block_ids), *cache.shape[1:])
            cache[ids_n] = blocks if kind is None else _TILED[kind](blocks)

    def _present(self) -> KVCaches:
        kv_caches = self._kv_caches()
        return [kv_caches[layer] for layer in self._layers]

    def _present_converter(self, caches: KVCaches) -> PageConverter | None:
        """None if a layer keeps states, which are never in tiles, or `PageConverter` does not support the caches."""
        if any(TOKENS not in tensor.shape for tensor in self._tensors):
            return None
        if self._converter is None or not self._converter.is_for(caches):
            self._converter = PageConverter.of(caches)
        return self._converter

    def _parts(self, caches: KVCaches) -> Iterator[tuple[int | None, torch.Tensor, slice]]:
        """For each tensor: 0 for keys, 1 for values, None for states; the tensor; its part of a row."""
        start, tensors = 0, iter(self._tensors)
        for layer in caches:
            for number, cache in enumerate(layer):
                end = start + cache[0].nbytes
                yield number if TOKENS in next(tensors).shape else None, cache, slice(start, end)
                start = end


def _as_bytes(cache_nKBD: torch.Tensor) -> torch.Tensor:
    return cache_nKBD.flatten(1).contiguous().view(torch.uint8)
