"""Blocks of a paged KV cache that is kept in tiles, as rows in the order of their shape, and back; see
`kernels/csrc/pages.inc`. Others are not converted here: `kv_cache.natural_key_order` and its like do that in torch."""

import ctypes
from collections.abc import Sequence

import torch

from quire_kernels import kv_cache
from quire_kernels.cpu import Call, launch, library

__all__ = ["can_convert_pages", "convert_pages"]

KVCaches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class _PagesCall(Call):
    _fields_ = (
        ("caches", ctypes.c_void_p),
        ("shapes", ctypes.c_void_p),
        ("block_ids", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("is_float", ctypes.c_int32),
        ("to_cache", ctypes.c_int32),
    )


def can_convert_pages(kv_caches: KVCaches) -> bool:
    """Whether all of these are in tiles, of one dtype and block size, and keys and values of a layer of one shape."""
    first = kv_caches[0][0]
    return all(
        kv_cache.is_tiled(keys)
        and keys.shape == values.shape
        and (keys.dtype, values.dtype, keys.shape[2]) == (first.dtype, first.dtype, first.shape[2])
        and keys.is_contiguous()
        and values.is_contiguous()
        for keys, values in kv_caches
    )


def convert_pages(kv_caches: KVCaches, block_ids: Sequence[int], rows: torch.Tensor, to_cache: bool) -> None:
    """Copy blocks to rows, or rows to blocks.

    Args:
        kv_caches: keys and values of each layer, for which `can_convert_pages`.
        block_ids: which.
        rows: [n, bytes of a block] uint8 on the CPU.
        to_cache: the direction.

    Raises:
        ValueError: the rows are not as they have to be, or there is no such block.
    """
    num_bytes = sum(2 * keys[0].numel() * keys.element_size() for keys, _ in kv_caches)
    num_blocks = min(keys.shape[0] for keys, _ in kv_caches)
    is_right = rows.dtype is torch.uint8 and rows.is_cpu and rows.shape == (len(block_ids), num_bytes)
    if not is_right or rows.stride(1) != 1:
        raise ValueError(f"rows are {rows.dtype} of {list(rows.shape)}; they must be uint8 of "
                         f"{[len(block_ids), num_bytes]}, without gaps in a row")  # fmt: skip
    if any(not 0 <= block_id < num_blocks for block_id in block_ids):
        raise ValueError(f"blocks {list(block_ids)} are asked for; there are {num_blocks}")
    handle = library()
    assert handle is not None
    caches = (ctypes.c_uint64 * (2 * len(kv_caches)))(*(one.data_ptr() for layer in kv_caches for one in layer))
    shapes = (ctypes.c_int64 * (2 * len(kv_caches)))(*(n for keys, _ in kv_caches for n in keys.shape[1:4:2]))
    call = _PagesCall(
        ctypes.addressof(caches), ctypes.addressof(shapes),
        ctypes.addressof(ids := (ctypes.c_int64 * len(block_ids))(*block_ids)), rows.data_ptr(), rows.stride(0),
        len(kv_caches), len(block_ids), kv_caches[0][0].shape[2], kv_caches[0][0].dtype is torch.float32, to_cache,
    )  # fmt: skip
    launch(handle.quire_convert_pages, call)
    del ids
