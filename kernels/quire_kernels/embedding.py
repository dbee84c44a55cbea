"""Embedding: rows of a table by token id, also of a table that is packed because it is the head's weight as well."""

import ctypes

import torch
import torch.nn.functional as F

from quire_kernels.cpu import library, library_for, pointer
from quire_kernels.linear import LinearWeight

__all__ = ["embedding"]

_PLAIN, _PACKED, _PACKED_INT8 = 0, 1, 2


class _EmbeddingCall(ctypes.Structure):
    """`EmbeddingCall` of kernels/csrc/calls.h."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("is_float", ctypes.c_int32),
    )


def embedding(token_ids_T: torch.Tensor, weight: torch.Tensor | LinearWeight) -> torch.Tensor:
    """The tokens' rows of a table.

    Args:
        token_ids_T: int64, each at least 0 and below the table's rows: no one checks that.
        weight: [V, E], or the packed weight of a tied head; an int8 weight's rows come out as `int8 · scale`.

    Returns:
        [T, E], of the table's dtype, or of the dtype of the packed weight's activations.
    """
    if isinstance(weight, LinearWeight):
        if weight.call is None:
            rows = F.embedding(token_ids_T, weight.data)
            return rows if weight.scales is None else (rows * weight.scales[token_ids_T, None]).to(weight.dtype)
        table, size, dtype, stride = weight.data, weight.in_features, weight.dtype, 0
        kind = _PACKED_INT8 if weight.is_quantized else _PACKED
        handle = library()
        assert handle is not None
    else:
        handle = library_for(weight)
        if handle is None or weight.stride(1) != 1:
            return F.embedding(token_ids_T, weight)
        table, size, dtype = weight, weight.shape[1], weight.dtype
        kind, stride = _PLAIN, weight.stride(0) * weight.element_size()
    token_ids_T = token_ids_T.contiguous()
    out = torch.empty(len(token_ids_T), size, dtype=dtype)
    scales = weight.scales if isinstance(weight, LinearWeight) else None
    call = _EmbeddingCall(
        token_ids_T.data_ptr(), table.data_ptr(), stride, pointer(scales), out.data_ptr(), len(token_ids_T), size, kind,
        dtype == torch.float32,
    )  # fmt: skip
    handle.quire_embedding(ctypes.byref(call))
    return out
