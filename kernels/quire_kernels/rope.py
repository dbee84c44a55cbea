"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), fused with the KV-cache write.

The half-split layout of Hugging Face checkpoints: of the first R features of a head, feature i is rotated together with
feature i + R/2. R is D, or less (partial rotary, Black et al. 2022, https://arxiv.org/abs/2204.06745, section 2.1), or
0 in layers without positions (Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466).
"""

import torch

from quire_kernels.cpu import check_tensor, launch, pointer, structure, uses_triton, with_dense_heads
from quire_kernels.kv_cache import check_caches, head_size_of, takes, write_kv_cache
from quire_kernels.layernorm import rms_norm

_RopeCall = structure("RopeCall")


def rope_and_cache(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor | None,
    *,
    query_norm_D: torch.Tensor | None = None,
    key_norm_D: torch.Tensor | None = None,
    value_norm_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    query_cos_sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, [T, H, D], and write keys and values to their slots of the paged cache; returns the
    queries. Raises TypeError or ValueError if a tensor does not fit the others.

    Args:
        query_THD: queries, any strides.
        key_TKD: keys, any strides. Without heads, queries alone are rotated, and the caches are not written.
        value_TKD: values, any strides; None, as `value_cache_NKBD` then is: each is a part of its key.
        positions_T: int64, each token's position in its sequence.
        cos_sin: [max_position, R] float32; a row is cos of the R/2 angles, then sin. R is even and at most D.
        slot_mapping_T: int64; slot = block id * B + offset within the block. No two tokens share a slot.
        key_cache_NKBD: written in place, in the order of `kv_cache.py`; in int8, keys and values are rounded to it.
        value_cache_NKBD: likewise.
        query_norm_D: weight, of the queries' dtype or float32, of the RMSNorm of each query head before its rotation
            (Henry et al. 2020, https://arxiv.org/abs/2010.04245, with RMSNorm as in Qwen 3); None for no norm.
        key_norm_D: likewise for the keys; of the same dtype.
        value_norm_D: likewise for the values, which are not rotated.
        eps: of these norms.
        query_cos_sin: like `cos_sin`, for the queries; None: both have the same.
    """
    if (value_TKD is None) != (value_cache_NKBD is None):
        raise ValueError("value_TKD and value_cache_NKBD must be given together, or neither of them")
    query_cos_sin = cos_sin if query_cos_sin is None else query_cos_sin
    if uses_triton(query_THD):
        from quire_kernels.gpu import rope as gpu

        return gpu.rope_and_cache(
            query_THD, key_TKD, value_TKD, positions_T, cos_sin, slot_mapping_T, key_cache_NKBD, value_cache_NKBD,
            query_norm_D, key_norm_D, value_norm_D, eps, query_cos_sin,
        )  # fmt: skip
    if takes(key_cache_NKBD, query_THD, key_TKD, value_TKD):
        tensors = (query_THD, key_TKD, value_TKD, positions_T, cos_sin, slot_mapping_T)
        return _rope_and_cache_cpu(
            *tensors, key_cache_NKBD, value_cache_NKBD, query_norm_D, key_norm_D, value_norm_D, eps, query_cos_sin
        )
    if key_TKD.shape[1]:
        rotated_TKD = _rotate(_with_normed_heads(key_TKD, key_norm_D, eps), cos_sin[positions_T])
        value_TKD = None if value_TKD is None else _with_normed_heads(value_TKD, value_norm_D, eps)
        write_kv_cache(rotated_TKD, value_TKD, slot_mapping_T, key_cache_NKBD, value_cache_NKBD)
    return _rotate(_with_normed_heads(query_THD, query_norm_D, eps), query_cos_sin[positions_T])


def _rope_and_cache_cpu(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor | None,
    query_norm_D: torch.Tensor | None,
    key_norm_D: torch.Tensor | None,
    value_norm_D: torch.Tensor | None,
    eps: float,
    query_cos_sin: torch.Tensor,
) -> torch.Tensor:
    query_THD, query_token_stride, query_head_stride = with_dense_heads(query_THD)
    key_TKD, key_token_stride, key_head_stride = with_dense_heads(key_TKD)
    value_token_stride = value_head_stride = 0
    if value_TKD is not None:
        value_TKD, value_token_stride, value_head_stride = with_dense_heads(value_TKD)
    positions_T, slot_mapping_T = positions_T.contiguous(), slot_mapping_T.contiguous()
    num_tokens, num_heads, head_size = query_THD.shape
    _, num_kv_heads, block_size, _ = key_cache_NKBD.shape
    num_kv_heads = num_kv_heads if key_TKD.shape[1] else 0
    cache_head_size = head_size_of(key_cache_NKBD)
    check_caches(key_cache_NKBD, value_cache_NKBD)
    check_tensor("positions_T", positions_T, torch.int64, num_tokens)
    check_tensor("slot_mapping_T", slot_mapping_T, torch.int64, num_tokens)
    rotary_size = cos_sin.shape[-1]
    if rotary_size % 2 or rotary_size > cache_head_size:
        raise ValueError(f"cos_sin has {rotary_size} columns; it must be an even number up to {cache_head_size}")
    for name, table in (("cos_sin", cos_sin), ("query_cos_sin", query_cos_sin)):
        check_tensor(name, table, torch.float32, cos_sin.shape[0], rotary_size)
    named = (("query_norm_D", query_norm_D), ("key_norm_D", key_norm_D), ("value_norm_D", value_norm_D))
    norms = [(name, weight_D) for name, weight_D in named if weight_D is not None]
    norm_is_float = bool(norms) and all(weight_D.dtype == torch.float32 for _, weight_D in norms)
    for name, weight_D in norms:
        check_tensor(name, weight_D, torch.float32 if norm_is_float else query_THD.dtype, cache_head_size)
    wanted = (num_tokens, num_kv_heads, cache_head_size)
    heads = [key_TKD] if value_TKD is None else [key_TKD, value_TKD]
    if head_size != cache_head_size or any(x.shape != wanted for x in heads):
        shapes = ", ".join(str(list(x.shape)) for x in (query_THD, *heads))
        raise ValueError(f"queries, keys and values are {shapes}; keys and values must be {list(wanted)}")
    if not all(x.is_cpu for x in (query_THD, *heads)):
        raise TypeError("queries, keys and values must be on the CPU, like the caches")
    is_rotated = rotary_size > 0 or query_norm_D is not None
    rotated_THD = query_THD.new_empty(num_tokens, num_heads, head_size) if is_rotated else query_THD
    call = _RopeCall(
        query=query_THD.data_ptr(), query_token_stride=query_token_stride, query_head_stride=query_head_stride,
        key=key_TKD.data_ptr(), key_token_stride=key_token_stride, key_head_stride=key_head_stride,
        value=pointer(value_TKD), value_token_stride=value_token_stride, value_head_stride=value_head_stride,
        query_norm=pointer(query_norm_D), key_norm=pointer(key_norm_D), value_norm=pointer(value_norm_D),
        positions=positions_T.data_ptr(), cos_sin=cos_sin.data_ptr(), query_cos_sin=query_cos_sin.data_ptr(),
        slot_mapping=slot_mapping_T.data_ptr(), rotated_query=rotated_THD.data_ptr(),
        key_cache=key_cache_NKBD.data_ptr(), value_cache=pointer(value_cache_NKBD), rows=num_tokens,
        heads=num_heads if is_rotated else 0, kv_heads=num_kv_heads, head_size=head_size, rotary_size=rotary_size,
        block_size=block_size, eps=eps, is_float=query_THD.dtype == torch.float32, norm_is_float=norm_is_float,
        cache_is_int8=key_cache_NKBD.dtype is torch.int8,
    )  # fmt: skip
    launch("quire_rope", call)
    return rotated_THD


def _with_normed_heads(x_THD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x_THD if weight_D is None else rms_norm(x_THD.flatten(0, 1), weight_D, eps).view(x_THD.shape)


def _rotate(x: torch.Tensor, cos_sin_TR: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin_TR.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    x1, x2, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
