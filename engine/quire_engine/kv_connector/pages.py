"""Pages of the KV cache as rows of bytes, in the order of `block_file`, and back. The only place that knows both."""

from collections.abc import Iterator, Sequence

import torch
from quire_kernels import PageConverter
from quire_kernels.kv_cache import natural_key_order, natural_value_order, write_blocks

from quire_engine.models.step_context import KVCaches

__all__ = ["bytes_per_block", "read_pages", "write_pages"]


def bytes_per_block(kv_caches: KVCaches) -> int:
    """Of all layers of a stage."""
    return sum(cache[0].numel() * cache.element_size() for layer in kv_caches for cache in layer)


def read_pages(kv_caches: KVCaches, block_ids: Sequence[int], converter: PageConverter | None = None) -> torch.Tensor:
    """Copy some blocks.

    Args:
        kv_caches: to read from.
        block_ids: which.
        converter: `PageConverter.of` the caches, if somebody has it already.

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
    for (keys, values), key_bytes, value_bytes in _layers(kv_caches):
        rows[:, key_bytes] = _as_bytes(natural_key_order(keys[ids_n]))
        rows[:, value_bytes] = _as_bytes(natural_value_order(values[ids_n]))
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
    for (keys, values), key_bytes, value_bytes in _layers(kv_caches):
        shape = (len(block_ids), *keys.shape[1:])
        keys_nKBD = rows[:, key_bytes].contiguous().view(keys.dtype).view(shape)
        values_nKBD = rows[:, value_bytes].contiguous().view(values.dtype).view(shape)
        write_blocks(keys_nKBD, values_nKBD, ids_n, keys, values)


def _layers(kv_caches: KVCaches) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], slice, slice]]:
    """Each layer, and where its keys and values are in a row."""
    start = 0
    for keys, values in kv_caches:
        middle = start + keys[0].numel() * keys.element_size()
        end = middle + values[0].numel() * values.element_size()
        yield (keys, values), slice(start, middle), slice(middle, end)
        start = end


def _as_bytes(cache_nKBD: torch.Tensor) -> torch.Tensor:
    return cache_nKBD.reshape(len(cache_nKBD), -1).contiguous().view(torch.uint8)
