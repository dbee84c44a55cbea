"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), fused with the KV-cache write.

The half-split layout of Hugging Face checkpoints: dimension i is rotated together with dimension i + D/2.
"""

import torch

__all__ = ["rope_and_cache"]


def rope_and_cache(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots of the paged cache.

    Args:
        query_THD: queries, any strides.
        key_TKD: keys, any strides.
        value_TKD: values, any strides.
        positions_T: int64, each token's position in its sequence.
        cos_sin: [max_position, D] float32; a row is cos of the D/2 angles, then sin.
        slot_mapping_T: int64; slot = block id * B + offset within the block. No two tokens share a slot.
        key_cache_NKBD: written in place.
        value_cache_NKBD: written in place.

    Returns:
        The rotated queries, [T, H, D].
    """
    cos, sin = cos_sin[positions_T].to(query_THD.dtype).unsqueeze(1).chunk(2, dim=-1)
    block_size = key_cache_NKBD.shape[2]
    blocks, offsets = slot_mapping_T // block_size, slot_mapping_T % block_size
    key_cache_NKBD[blocks, :, offsets] = _rotate(key_TKD, cos, sin).to(key_cache_NKBD.dtype)
    value_cache_NKBD[blocks, :, offsets] = value_TKD.to(value_cache_NKBD.dtype)
    return _rotate(query_THD, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
