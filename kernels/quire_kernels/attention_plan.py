"""AttentionPlan: how the work of one step's attention is divided, made once and used by all layers."""

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
    """What is the same for all layers of the step."""
    partials: torch.Tensor
    """Where threads that share a sequence leave their parts: float32."""
    tensors: tuple[torch.Tensor, ...]
    """That `step` points to."""
    num_tokens: int
    shape: tuple[int, int, int, int]
    """Query heads, key/value heads, tokens per block, head size: what the plan holds for."""

    def copy_(self, other: "CpuAttentionPlan") -> None:
        """Become another plan, which is to be kept for as long, under the address that recorded calls know."""
        ctypes.memmove(ctypes.byref(self.step), ctypes.byref(other.step), ctypes.sizeof(self.step))


@dataclass(frozen=True, slots=True)
class GpuAttentionPlan:
    """What the host needs to know of one step's sequences to launch the kernels of `gpu/attention.py`."""

    prefill_programs: int
    """Of each tile of rows and KV head, if a sequence has more query rows than one tile of a decode; 0 if none has."""
    decode_rows: int
    """Of the other sequences with any row: most query rows for each KV head; 0 if there is no such sequence."""
    max_splits: int
    """Of those: into how many splits the keys of the longest are divided."""
    partials: torch.Tensor
    """Where the splits' results are left: [S, K, decode_rows, max_splits, D] float32, empty if there is one split."""
    partial_lse: torch.Tensor
    """[S, K, decode_rows, max_splits] float32, the base-2 logarithms of their sums of exponentials."""
    prefill_parts: torch.Tensor
    """Where programs that share a tile leave theirs: [T, H, parts, D] float32, empty if each tile has one."""
    prefill_parts_lse: torch.Tensor
    """[T, H, parts] float32, likewise."""


AttentionPlan: TypeAlias = CpuAttentionPlan | GpuAttentionPlan
"""Made by `plan_attention`."""
