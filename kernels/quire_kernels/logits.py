"""Ops on logits: soft cap (Bello et al. 2016, https://arxiv.org/abs/1611.09940, section 3; as in Gemma 2), masking by
one bit per token, and the probabilities of given tokens."""

import numpy as np
import torch

from quire_kernels.cpu import check_tensor, launch, library_for, structure, uses_triton, with_dense_rows

_SoftCapCall = structure("SoftCapCall")
_BitmaskCall = structure("BitmaskCall")
_TokenProbabilitiesCall = structure("TokenProbabilitiesCall")


def soft_cap(logits_SV: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, in place, of float32 logits whose rows may be strided; returns them. Raises TypeError
    or ValueError for others."""
    if logits_SV.dtype != torch.float32:
        raise TypeError(f"logits_SV is {logits_SV.dtype}; it must be {torch.float32}")
    if logits_SV.dim() != 2 or logits_SV.stride(1) != 1:
        raise ValueError(
            f"logits_SV has shape {list(logits_SV.shape)} and strides {list(logits_SV.stride())}; it must have two "
            "dimensions, and no gaps between the elements of a row"
        )
    if library_for(logits_SV) is None:  # on a GPU too: three kernels of torch, once in a step
        return logits_SV.div_(cap).tanh_().mul_(cap)
    rows, size = logits_SV.shape
    launch("quire_soft_cap", _SoftCapCall(logits_SV.data_ptr(), logits_SV.stride(0), rows, size, cap))
    return logits_SV


def apply_token_bitmask(logits_SV: torch.Tensor, row_ids_R: torch.Tensor, bitmask_RW: torch.Tensor) -> None:
    """Mask in place, in the given rows, the tokens whose bit is not set. Raises TypeError or ValueError if a tensor
    does not fit the others.

    Args:
        logits_SV: the logits.
        row_ids_R: int64, R of their S rows; the others do not change. For logits on a GPU, on the GPU or the host.
        bitmask_RW: int32, bit i % 32 of word i // 32 belongs to token i; likewise.
    """
    if uses_triton(logits_SV) and logits_SV.stride(1) == 1:
        from quire_kernels.gpu import rows as gpu

        gpu.apply_token_bitmask(logits_SV, row_ids_R, bitmask_RW.contiguous())
        return
    if logits_SV.dtype != torch.float32 or logits_SV.stride(1) != 1 or library_for(logits_SV) is None:
        forbidden_RV = _unset_bits(bitmask_RW.cpu(), logits_SV.shape[1]).to(logits_SV.device)
        logits_SV[row_ids_R] = logits_SV[row_ids_R].masked_fill(forbidden_RV, float("-inf"))
        return
    row_ids_R, bitmask_RW = row_ids_R.contiguous(), bitmask_RW.contiguous()
    rows, vocab_size = row_ids_R.numel(), logits_SV.shape[1]
    words = -(-vocab_size // 32)
    check_tensor("row_ids_R", row_ids_R, torch.int64, rows)
    check_tensor("bitmask_RW", bitmask_RW, torch.int32, rows, max(words, bitmask_RW.shape[-1]))
    call = _BitmaskCall(
        logits_SV.data_ptr(), logits_SV.stride(0), row_ids_R.data_ptr(), bitmask_RW.data_ptr(), bitmask_RW.shape[1],
        rows, vocab_size,
    )  # fmt: skip
    launch("quire_apply_bitmask", call)


def _unset_bits(bitmask_RW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    bits = np.unpackbits((~bitmask_RW.numpy()).view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool)


def token_probabilities(logits_SV: torch.Tensor, token_ids_S: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, at one token of it: [S] float32.

    Args:
        logits_SV: float32; minus infinity is allowed, but not for all of a row.
        token_ids_S: int64, each at least 0 and below V: not checked by the C++ kernel.
    """
    if logits_SV.dtype != torch.float32 or library_for(logits_SV) is None:
        return (logits_SV.gather(1, token_ids_S[:, None])[:, 0] - logits_SV.logsumexp(-1)).exp_()
    logits_SV = with_dense_rows(logits_SV)
    rows, vocab_size = logits_SV.shape
    check_tensor("token_ids_S", token_ids_S, torch.int64, rows)
    out = torch.empty(rows, dtype=torch.float32)
    call = _TokenProbabilitiesCall(
        logits_SV.data_ptr(), logits_SV.stride(0), token_ids_S.data_ptr(), out.data_ptr(), rows, vocab_size
    )
    launch("quire_token_probabilities", call)
    return out
