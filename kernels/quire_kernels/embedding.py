"""Embedding: rows of a table by token id; also of a packed table, which is the weight of a tied head."""

import ctypes

import torch
import torch.nn.functional as F

from quire_kernels.cpu import check_tensor, is_recording, launch, pointer, structure, uses_triton, with_dense_rows
from quire_kernels.linear import LinearWeight
from quire_kernels.store import load_rows

_EmbeddingCall = structure("EmbeddingCall")


def embedding(token_ids_T: torch.Tensor, weight: torch.Tensor | LinearWeight) -> torch.Tensor:
    """The tokens' rows of a table, [T, E], of the table's dtype, or of the dtype of the packed weight's activations.

    Args:
        token_ids_T: int64, each at least 0 and below the table's rows: not checked for a packed table.
        weight: [V, E], or the packed weight of a tied head; quantised rows come out dequantised.
    """
    if uses_triton(token_ids_T):
        from quire_kernels.gpu import rows as gpu

        if isinstance(weight, torch.Tensor):
            return gpu.embedding(token_ids_T, with_dense_rows(weight), None, weight.dtype)
        return gpu.embedding(token_ids_T, weight.data, weight.scales, weight.dtype)
    if isinstance(weight, torch.Tensor):
        if is_recording():
            return load_rows(weight, token_ids_T)
        return F.embedding(token_ids_T, weight)  # a copy per row, which torch does with less overhead
    if weight.call is None:
        out = F.embedding(token_ids_T, weight.data)
        return out if weight.scales is None else (out.float() * weight.scales[token_ids_T, None]).to(weight.dtype)
    token_ids_T, rows = token_ids_T.contiguous(), token_ids_T.numel()
    check_tensor("token_ids_T", token_ids_T, torch.int64, rows)
    out = torch.empty(rows, weight.in_features, dtype=weight.dtype)
    call = _EmbeddingCall(
        token_ids_T.data_ptr(), weight.data.data_ptr(), pointer(weight.scales), out.data_ptr(), rows,
        weight.in_features, weight.dtype == torch.float32, ctypes.addressof(weight.call) if weight.group_size else None,
    )  # fmt: skip
    launch("quire_embedding", call)
    return out
