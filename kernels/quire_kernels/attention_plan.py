"""AttentionPlan: how the work of one step's attention is divided; made once, for all layers of a kind."""

import ctypes
from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire_kernels.cpu import Call

__all__ = ["AttentionPlan", "CpuAttentionPlan", "GpuAttentionPlan"]


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """How the work of one step's `paged_attention` is divided among threads."""

    step: Call
    """The part of the call that is the same for all layers that the plan is valid for."""
    partials: torch.Tensor
    """float32, partial results of threads that share a sequence."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors that `step` points to."""
    num_tokens: int
    shape: tuple[int, int, int, int]
    """Query heads, key/value heads, tokens per block, head size: the shapes that the plan is valid for."""
    window: int | None
    """Of the layers that it is valid for."""

    def copy_(self, other: "CpuAttentionPlan") -> None:
        """Take over another plan's content, at the address that recorded calls use. Keep the other plan alive as long
        as this one is used."""
        ctypes.memmove(ctypes.byref(self.step), ctypes.byref(other.step), ctypes.sizeof(self.step))


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """What the host needs to know about one step's sequences to launch the kernels of `gpu/attention.py`."""

    prefill_programs: int
    """Programs per tile of rows and KV head, for sequences with more query rows than a decode's tile; 0 if there are
    none."""
    decode_rows: int
    """Largest number of query rows per KV head among the other sequences; 0 if there are none."""
    max_splits: int
    """Number of splits of the keys of the longest of these sequences."""
    partials: torch.Tensor
    """The splits' results: [S, K, decode_rows, max_splits, D] float32, empty if there is one split."""
    partial_lse: torch.Tensor
    """[S, K, decode_rows, max_splits] float32, the base-2 logarithms of their sums of exponentials."""
    prefill_parts: torch.Tensor
    """Results of programs that share a tile: [T, H, parts, D] float32, empty if each tile has one program."""
    prefill_parts_lse: torch.Tensor
    """[T, H, parts] float32, likewise."""


AttentionPlan: TypeAlias = CpuAttentionPlan | GpuAttentionPlan
"""Made by `plan_attention`."""
