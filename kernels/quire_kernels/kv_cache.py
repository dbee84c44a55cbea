"""Memory layout of the paged KV cache: tensors of [N, K, B, D], where only the ops here know the order of B and D.

For the C++ kernels, the keys and values of one block and KV head are tiles of pairs (bfloat16) or single numbers
(float32), drawn in `kernels/csrc/attention.inc`; otherwise the layout is given by the strides. On a GPU it is
[N, B, K, D], so that a token's heads are contiguous, as they are written.
"""

import torch

from quire_kernels.cpu import FLOATS, GROUPS, HEAD_SIZE_STEP, MAX_HEAD_SIZE, check_tensor, library


def new_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A cache of keys, or of values, filled with zeros.

    Returns:
        [N, K, B, D], in the device's memory layout.
    """
    if torch.device(device).type == "cpu":
        return torch.zeros(num_blocks, num_kv_heads, block_size, head_size, dtype=dtype)
    cache_NBKD = torch.zeros(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=device)
    return cache_NBKD.transpose(1, 2)


def is_tiled(cache_NKBD: torch.Tensor) -> bool:
    """Whether the C++ kernels use a cache of this dtype and shape: the same for all caches of a process."""
    block_size, head_size = cache_NKBD.shape[2:]
    dtype = cache_NKBD.dtype
    if dtype not in FLOATS or not cache_NKBD.is_cpu or library() is None:
        return False
    return block_size % GROUPS[dtype] == 0 and head_size % HEAD_SIZE_STEP == 0 and head_size <= MAX_HEAD_SIZE


def check_caches(key_cache_NKBD: torch.Tensor, value_cache_NKBD: torch.Tensor | None) -> None:
    """Reject a tiled key cache and a value cache, if there is one, that do not match.

    Raises:
        TypeError: they are of different dtypes, or not both on the CPU.
        ValueError: they are of different shapes, or have gaps.
    """
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
    n, num_kv_heads, block_size, head_size = cache_NKBD.shape
    tiles = cache_NKBD.reshape(n, num_kv_heads, -1, head_size, GROUPS[cache_NKBD.dtype])
    return tiles.transpose(3, 4).reshape(n, num_kv_heads, block_size, head_size)


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
    tiles = values_nKBD.reshape(*values_nKBD.shape[:2], -1, GROUPS[values_nKBD.dtype], values_nKBD.shape[3])
    return tiles.transpose(3, 4).reshape(values_nKBD.shape)


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
    if is_tiled(key_cache_NKBD):
        group = GROUPS[key_cache_NKBD.dtype]
        keys = key_cache_NKBD.view(n, num_kv_heads, head_size // group, block_size, group)
        keys[blocks, :, :, offsets] = key_TKD.to(keys.dtype).reshape(-1, num_kv_heads, head_size // group, group)
        if value_TKD is not None and value_cache_NKBD is not None:
            values = value_cache_NKBD.view(n, num_kv_heads, block_size // group, head_size, group)
            values[blocks, :, offsets // group, :, offsets % group] = value_TKD.to(values.dtype)
        return
    for x, cache in ((key_TKD, key_cache_NKBD), (value_TKD, value_cache_NKBD)):
        if x is not None and cache is not None:
            cache[blocks, :, offsets] = _in_range(x, cache.dtype)


def _in_range(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to `dtype`; numbers beyond the range of an 8-bit type become its largest, not NaN."""
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        x = x.float().clamp(limits.min, limits.max)
    return x.to(dtype)
