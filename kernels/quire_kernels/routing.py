"""The router of a mixture of experts: softmax over the experts, and the k likeliest of each token.

Softmax in float32 before the choice, as Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088, section 2.1) and
Qwen's mixtures do; divided by the sum of the chosen ones, it is the softmax of these alone.
"""

import ctypes

import torch

from quire_kernels.cpu import Call, launch, library, with_dense_rows
from quire_kernels.dispatch import uses_triton

__all__ = ["topk_softmax"]


class _RouteCall(Call):
    """`RouteCall` of kernels/csrc/calls.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("expert_ids", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("renormalize", ctypes.c_int32),
    )


def topk_softmax(logits_TX: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts and their weights, likeliest first; of equal logits the lower id first.

    Args:
        logits_TX: float32, one per expert.
        top_k: experts per token.
        renormalize: the weights of a token add up to 1.

    Raises:
        TypeError: the logits are not float32.
        ValueError: `top_k` is more than there are experts.

    Returns:
        [T, top_k] float32, the weights, and [T, top_k] int64, the experts' ids.
    """
    if logits_TX.dtype != torch.float32:
        raise TypeError(f"logits_TX is {logits_TX.dtype}; it must be float32")
    logits_TX = with_dense_rows(logits_TX)
    rows, experts = logits_TX.shape
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to the number of experts, {experts}")
    handle = library()
    if handle is None or uses_triton(logits_TX) or not logits_TX.is_cpu:
        return _topk_softmax_torch(logits_TX, top_k, renormalize)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    expert_ids = torch.empty(rows, top_k, dtype=torch.int64)
    call = _RouteCall(
        logits_TX.data_ptr(), logits_TX.stride(0), weights.data_ptr(), expert_ids.data_ptr(), rows, experts, top_k,
        renormalize,
    )  # fmt: skip
    launch(handle.quire_route_tokens, call, weights, expert_ids)
    return weights, expert_ids


def _topk_softmax_torch(logits_TX: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU too: the numbers are few, and no operation waits for it."""
    expert_ids = torch.argsort(logits_TX, dim=1, descending=True, stable=True)[:, :top_k]  # `topk` orders ties anyhow
    weights = logits_TX.softmax(1).gather(1, expert_ids)
    return weights / weights.sum(1, keepdim=True) if renormalize else weights, expert_ids.contiguous()
