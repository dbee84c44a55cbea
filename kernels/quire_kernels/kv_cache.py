"""Memory layout of the paged KV cache: tensors of [N, K, B, D], where only the ops here know the order of B and D.

For the C++ kernels, the keys and values of one block and KV head are tiles of pairs (bfloat16), single numbers
(float32) or quadruples (int8), drawn in `kernels/csrc/attention.inc`; otherwise the layout is given by the strides. On
a GPU it is [N, B, K, D], so that a token's heads are contiguous, as they are written.

An int8 cache has rows of D + 4 bytes: the codes of a token and head, and their scale in float32. A number is its code
times the scale, which makes the largest of the row 127::

    natural order   │ D codes of token 0 │ scale │ D codes of token 1 │ scale │ …
    tile            │ B · D codes, in the order of attention.inc │ scales of the B tokens │
"""

import ctypes
import itertools
import weakref
from collections.abc import Sequence

import torch

from quire_kernels.cpu import (
    FLOATS,
    GROUPS,
    HEAD_SIZE_STEP,
    LARGEST,
    MAX_HEAD_SIZE,
    SCALE_BYTES,
    check_tensor,
    launch,
    library,
    structure,
)

KVCaches = Sequence[tuple[torch.Tensor, ...]]
_PagesCall = structure("PagesCall")


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scale that each row of a cache of this dtype ends with; 0: it has none."""
    return SCALE_BYTES if dtype is torch.int8 else 0


def head_size_of(cache_NKBD: torch.Tensor) -> int:
    """D, without the scale."""
    return cache_NKBD.shape[3] - scale_bytes(cache_NKBD.dtype)


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A cache of keys, or of values, filled with zeros: [N, K, B, D], or D + 4 in int8, in the device's memory
    layout."""
    head_size += scale_bytes(dtype)
    if torch.device(device).type == "cpu":
        return torch.zeros(num_blocks, num_kv_heads, block_size, head_size, dtype=dtype)
    cache_NBKD = torch.zeros(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=device)
    return cache_NBKD.transpose(1, 2)


def is_tiled(cache_NKBD: torch.Tensor) -> bool:
    """Whether the C++ kernels use a cache of this dtype and shape: the same for all caches of a process."""
    block_size, head_size, dtype = cache_NKBD.shape[2], head_size_of(cache_NKBD), cache_NKBD.dtype
    if dtype not in GROUPS or not cache_NKBD.is_cpu or library() is None:
        return False
    return block_size % GROUPS[dtype] == 0 and head_size % HEAD_SIZE_STEP == 0 and head_size <= MAX_HEAD_SIZE


def takes(cache_NKBD: torch.Tensor, *rows: torch.Tensor | None) -> bool:
    """Whether the C++ kernels write these rows to a cache, or multiply them with it."""
    dtypes = {x.dtype for x in rows if x is not None}
    if not is_tiled(cache_NKBD) or len(dtypes) != 1:
        return False
    return dtypes <= set(FLOATS) if cache_NKBD.dtype is torch.int8 else dtypes == {cache_NKBD.dtype}


def check_caches(key_cache_NKBD: torch.Tensor, value_cache_NKBD: torch.Tensor | None) -> None:
    """Reject a tiled key cache and a value cache, if there is one, that do not match, or have gaps: TypeError or
    ValueError."""
    if not key_cache_NKBD.is_contiguous():
        raise ValueError(f"key_cache_NKBD has strides {list(key_cache_NKBD.stride())}; it must be without gaps")
    if value_cache_NKBD is not None:
        check_tensor("value_cache_NKBD", value_cache_NKBD, key_cache_NKBD.dtype, *key_cache_NKBD.shape)


def natural_key_order(cache_NKBD: torch.Tensor) -> torch.Tensor:
    """Some blocks of a key cache, [n, K, B, D], in the order of their shape: a copy if they are tiled."""
    if not is_tiled(cache_NKBD):
        return cache_NKBD
    n, num_kv_heads, block_size, head_size = cache_NKBD.shape
    tiles = cache_NKBD.reshape(n, num_kv_heads, -1, block_size, GROUPS[cache_NKBD.dtype])
    return tiles.transpose(2, 3).reshape(n, num_kv_heads, block_size, head_size)


def natural_value_order(cache_NKBD: torch.Tensor) -> torch.Tensor:
    """Some blocks of a value cache, [n, K, B, D], in the order of their shape: a copy if they are tiled."""
    if not is_tiled(cache_NKBD):
        return cache_NKBD
    codes, scales = _value_tiles(cache_NKBD)
    return torch.cat((codes.transpose(3, 4).flatten(2, 3), scales), -1)


def tiled_key_order(keys_nKBD: torch.Tensor) -> torch.Tensor:
    """Some blocks of keys in the order of a key cache; the opposite of `natural_key_order`, bit for bit."""
    if not is_tiled(keys_nKBD):
        return keys_nKBD
    tiles = keys_nKBD.reshape(*keys_nKBD.shape[:3], -1, GROUPS[keys_nKBD.dtype])
    return tiles.transpose(2, 3).reshape(keys_nKBD.shape)


def tiled_value_order(values_nKBD: torch.Tensor) -> torch.Tensor:
    """Some blocks of values in the order of a value cache; the opposite of `natural_value_order`, bit for bit."""
    if not is_tiled(values_nKBD):
        return values_nKBD
    codes, scales = values_nKBD.tensor_split([head_size_of(values_nKBD)], -1)
    codes = torch.unflatten(codes, 2, (-1, GROUPS[values_nKBD.dtype])).transpose(3, 4)
    return torch.cat((codes.flatten(2), scales.flatten(2)), -1).view(values_nKBD.shape)


def _value_tiles(cache_NKBD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of tiles: values [N, K, B/G, D, G], and the bytes of their scales [N, K, B, 4], or [N, K, B, 0]."""
    block_size, head_size, dtype = cache_NKBD.shape[2], head_size_of(cache_NKBD), cache_NKBD.dtype
    codes, scales = cache_NKBD.flatten(2).tensor_split([block_size * head_size], -1)
    codes = torch.unflatten(codes, -1, (block_size // GROUPS[dtype], head_size, GROUPS[dtype]))
    return codes, torch.unflatten(scales, -1, (block_size, scale_bytes(dtype)))


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of numbers, [.., D], as an int8 cache has them: [.., D + 4]. One with a NaN or an infinity has a scale of
    NaN."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / LARGEST[torch.int8]
    scales += (x * 0.0).sum(-1, keepdim=True)
    codes = (x / scales).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """The opposite of `quantize_rows`, in float32."""
    codes, scales = rows.tensor_split([rows.shape[-1] - SCALE_BYTES], -1)
    return codes.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)


def write_kv_cache(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor | None,
    slot_mapping_T: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor | None,
) -> None:
    """Write keys, and values if there are any, to their slots, in the caches' layout; in plain torch."""
    n, num_kv_heads, block_size, head_size = key_cache_NKBD.shape
    blocks, offsets = slot_mapping_T // block_size, slot_mapping_T % block_size
    if key_cache_NKBD.dtype is torch.int8:
        key_TKD, value_TKD = quantize_rows(key_TKD), None if value_TKD is None else quantize_rows(value_TKD)
    if is_tiled(key_cache_NKBD):
        group = GROUPS[key_cache_NKBD.dtype]
        keys = key_cache_NKBD.view(n, num_kv_heads, head_size // group, block_size, group)
        keys[blocks, :, :, offsets] = key_TKD.to(keys.dtype).reshape(-1, num_kv_heads, head_size // group, group)
        if value_TKD is not None and value_cache_NKBD is not None:
            values, scales = _value_tiles(value_cache_NKBD)
            value_TKD, scales_TK4 = value_TKD.to(values.dtype).tensor_split([values.shape[3]], -1)
            values[blocks, :, offsets // group, :, offsets % group] = value_TKD
            if scales.numel():
                scales[blocks, :, offsets] = scales_TK4
        return
    for x, cache in ((key_TKD, key_cache_NKBD), (value_TKD, value_cache_NKBD)):
        if x is not None and cache is not None:
            cache[blocks, :, offsets] = _in_range(x, cache.dtype)


def _in_range(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to `dtype`; numbers beyond the range of an 8-bit float become its largest, not NaN."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        limits = torch.finfo(dtype)
        x = x.float().clamp(limits.min, limits.max)
    return x.to(dtype)


class PageConverter:
    """Copies blocks of the caches of some layers, all in tiles, to rows in the order of their shape, and back
    (`kernels/csrc/pages.inc`). Keeps no cache alive. Others than tiles are converted in torch, by `natural_key_order`
    and its like."""

    def __init__(self, kv_caches: KVCaches) -> None:
        first = kv_caches[0][0]
        self._first = weakref.ref(first)
        self._num_blocks = min(len(layer[0]) for layer in kv_caches)
        self.block_bytes = sum(one[0].nbytes for layer in kv_caches for one in layer)
        addresses = ([*(one.data_ptr() for one in layer), 0][:2] for layer in kv_caches)
        caches = (ctypes.c_uint64 * (2 * len(kv_caches)))(*itertools.chain(*addresses))
        shapes = (ctypes.c_int64 * (2 * len(kv_caches)))(*(n for layer in kv_caches for n in layer[0].shape[1:4:2]))
        self._call = _PagesCall(
            caches=ctypes.addressof(caches), shapes=ctypes.addressof(shapes), layers=len(kv_caches),
            block_size=first.shape[2], number_bytes=first.itemsize,
        )  # fmt: skip
        self._arrays = caches, shapes

    @classmethod
    def of(cls, kv_caches: KVCaches) -> "PageConverter | None":
        """None unless all are in tiles, of one dtype and block size, and keys and values of a layer of one shape."""
        first = kv_caches[0][0]
        is_possible = all(
            is_tiled(one)
            and one.shape == layer[0].shape
            and (one.dtype, one.shape[2]) == (first.dtype, first.shape[2])
            and one.is_contiguous()
            for layer in kv_caches
            for one in layer
        )
        return cls(kv_caches) if is_possible else None

    def is_for(self, kv_caches: KVCaches) -> bool:
        """Whether these are the caches: they may have been freed since, and others allocated."""
        return bool(kv_caches) and self._first() is kv_caches[0][0]

    def convert(self, block_ids: Sequence[int], rows: torch.Tensor, to_cache: bool) -> None:
        """Copy blocks to rows, [n, bytes of a block] uint8 on the CPU, or rows to blocks, while the caches are there.
        For one thread at a time. Raises ValueError if the rows are others, or there is no such block."""
        is_right = rows.dtype is torch.uint8 and rows.is_cpu and rows.shape == (len(block_ids), self.block_bytes)
        if not is_right or rows.stride(1) != 1:
            raise ValueError(f"rows are {rows.dtype} of {list(rows.shape)}; they must be uint8 of "
                             f"{[len(block_ids), self.block_bytes]}, without gaps in a row")  # fmt: skip
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"blocks {list(block_ids)} are given; there are {self._num_blocks}")
        ids, call = (ctypes.c_int64 * len(block_ids))(*block_ids), self._call
        call.block_ids, call.blocks = ctypes.addressof(ids), len(block_ids)
        call.rows, call.row_stride, call.to_cache = rows.data_ptr(), rows.stride(0), to_cache
        launch("quire_convert_pages", call)
