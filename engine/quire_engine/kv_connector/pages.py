"""Pages of the KV cache as rows of bytes, in the order of `block_file`, and back. The only place that knows both."""

from collections.abc import Iterator, Sequence

import torch
from quire_kernels import PageConverter
from quire_kernels.kv_cache import natural_key_order, natural_value_order, tiled_key_order, tiled_value_order

from quire_engine.models.step_context import KVCaches


def bytes_per_block(kv_caches: KVCaches) -> int:
    """Of all layers of a stage."""
    return sum(cache[0].numel() * cache.element_size() for layer in kv_caches for cache in layer)


def read_pages(kv_caches: KVCaches, block_ids: Sequence[int], converter: PageConverter | None = None) -> torch.Tensor:
    """Copy some blocks.

    Args:
        kv_caches: to read from.
        block_ids: which.
        converter: `PageConverter.of` the caches, if it exists already.

    Returns:
        [n, bytes per block] uint8, on the caches' device.
    """
    device = kv_caches[0][0].device
    converter = converter or PageConverter.of(kv_caches)
    if converter is not None:
        rows = torch.empty(len(block_ids), converter.block_bytes, dtype=torch.uint8)
        converter.convert(block_ids, rows, to_cache=False)
        return rows
    ids_n = torch.tensor(block_ids, device=device)
    rows = torch.empty(len(block_ids), bytes_per_block(kv_caches), dtype=torch.uint8, device=device)
    for is_key, cache, part in _caches(kv_caches):
        blocks = cache[ids_n]
        rows[:, part] = _as_bytes(natural_key_order(blocks) if is_key else natural_value_order(blocks))
    return rows


def write_pages(
    kv_caches: KVCaches, block_ids: Sequence[int], rows: torch.Tensor, converter: PageConverter | None = None
) -> None:
    """Write some blocks.

    Args:
        kv_caches: to write to.
        block_ids: which.
        rows: as `read_pages` returns them, on any device.
        converter: as there.
    """
    device = kv_caches[0][0].device
    converter = converter or PageConverter.of(kv_caches)
    if converter is not None:
        converter.convert(block_ids, rows.cpu(), to_cache=True)
        return
    ids_n, rows = torch.tensor(block_ids, device=device), rows.to(device, non_blocking=rows.is_pinned())
    for is_key, cache, part in _caches(kv_caches):
        blocks = rows[:, part].contiguous().view(cache.dtype).view(len(block_ids), *cache.shape[1:])
        cache[ids_n] = tiled_key_order(blocks) if is_key else tiled_value_order(blocks)


def _caches(kv_caches: KVCaches) -> Iterator[tuple[bool, torch.Tensor, slice]]:
    """Each cache: whether it has keys, and where its blocks are in a row."""
    start = 0
    for layer in kv_caches:
        for number, cache in enumerate(layer):
            end = start + cache[0].nbytes
            yield number == 0, cache, slice(start, end)
            start = end


def _as_bytes(cache_nKBD: torch.Tensor) -> torch.Tensor:
    return cache_nKBD.reshape(len(cache_nKBD), -1).contiguous().view(torch.uint8)
