"""Converts pages of the KV cache to rows of bytes, in the order of `block_file`, and back."""

from collections.abc import Iterator, Sequence

import torch
from quire_kernels import PageConverter
from quire_kernels.kv_cache import natural_key_order, natural_value_order, tiled_key_order, tiled_value_order

from quire_engine.kv_cache import TOKENS, StateSpec
from quire_engine.models.step_context import KVCaches

_NATURAL = {0: natural_key_order, 1: natural_value_order}
_TILED = {0: tiled_key_order, 1: tiled_value_order}


def bytes_per_block(kv_caches: KVCaches) -> int:
    """Bytes of a block over all layers of a stage."""
    return sum(cache[0].numel() * cache.element_size() for layer in kv_caches for cache in layer)


def page_converter(kv_caches: KVCaches, specs: Sequence[StateSpec]) -> PageConverter | None:
    """`PageConverter.of` the caches; None if some layers keep states, which are never in tiles."""
    has_states = any(TOKENS not in tensor.shape for spec in specs for tensor in spec.tensors)
    return None if has_states else PageConverter.of(kv_caches)


def read_pages(
    kv_caches: KVCaches, specs: Sequence[StateSpec], block_ids: Sequence[int], converter: PageConverter | None = None
) -> torch.Tensor:
    """Copy some blocks.

    Args:
        kv_caches: to read from.
        specs: of the same layers.
        block_ids: which.
        converter: the caches' `page_converter`; None: plain torch copies.

    Returns:
        [n, bytes per block] uint8, on the caches' device.
    """
    if converter is not None:
        rows = torch.empty(len(block_ids), converter.block_bytes, dtype=torch.uint8)
        converter.convert(block_ids, rows, to_cache=False)
        return rows
    device = kv_caches[0][0].device
    ids_n = torch.tensor(block_ids, device=device)
    rows = torch.empty(len(block_ids), bytes_per_block(kv_caches), dtype=torch.uint8, device=device)
    for kind, cache, part in _caches(kv_caches, specs):
        blocks = cache[ids_n]
        rows[:, part] = _as_bytes(blocks if kind is None else _NATURAL[kind](blocks))
    return rows


def write_pages(
    kv_caches: KVCaches,
    specs: Sequence[StateSpec],
    block_ids: Sequence[int],
    rows: torch.Tensor,
    converter: PageConverter | None = None,
) -> None:
    """Write some blocks.

    Args:
        kv_caches: to write to.
        specs: of the same layers.
        block_ids: which.
        rows: as `read_pages` returns them, on any device.
        converter: as there.
    """
    if converter is not None:
        converter.convert(block_ids, rows.cpu(), to_cache=True)
        return
    device = kv_caches[0][0].device
    ids_n, rows = torch.tensor(block_ids, device=device), rows.to(device, non_blocking=rows.is_pinned())
    for kind, cache, part in _caches(kv_caches, specs):
        blocks = rows[:, part].contiguous().view(cache.dtype).view(len(block_ids), *cache.shape[1:])
        cache[ids_n] = blocks if kind is None else _TILED[kind](blocks)


def _caches(kv_caches: KVCaches, specs: Sequence[StateSpec]) -> Iterator[tuple[int | None, torch.Tensor, slice]]:
    """Each cache: 0 for keys, 1 for values, None for states; and where its blocks are in a row."""
    start = 0
    for layer, spec in zip(kv_caches, specs, strict=True):
        for number, (cache, tensor) in enumerate(zip(layer, spec.tensors, strict=True)):
            end = start + cache[0].nbytes
            yield number if TOKENS in tensor.shape else None, cache, slice(start, end)
            start = end


def _as_bytes(cache_nKBD: torch.Tensor) -> torch.Tensor:
    return cache_nKBD.reshape(len(cache_nKBD), -1).contiguous().view(torch.uint8)
