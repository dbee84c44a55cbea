"""AttentionPlan: how the work of one step's attention is divided; made once, for all layers of a kind."""

import ctypes
from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire_kernels.cpu import Call, library, structure

PLAN_CAPACITY = 1 << 14
"""First size of a plan in bytes: enough for about 600 items."""
UNBOUNDED = 1 << 62
"""The C++ kernels' window if there is none: more keys than any sequence has."""

_PlanCall = structure("PlanCall")
_AttentionPlan = structure("AttentionPlan")
_AttentionStep = structure("AttentionStep")


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
    """The window of the layers that it is valid for."""
    is_causal: bool
    """Likewise."""


class StandingPlan:
    """A plan that is made again for each step, without new tensors: recorded calls keep the address of its `step`. The
    tensors of at most S sequences are read when the plan is made and when it is used."""

    def __init__(
        self,
        block_table_SM: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        shape: tuple[int, int, int, int],
        window: int | None,
        is_causal: bool = True,
    ) -> None:
        heads, kv_heads, block_size, head_size = shape
        self._inputs = (block_table_SM, query_start_loc, seq_lens)
        self._shape, self._window, self._is_causal = shape, window, is_causal
        self._call = _PlanCall(
            query_start_loc=query_start_loc.data_ptr(), seq_lens=seq_lens.data_ptr(), heads=heads, kv_heads=kv_heads,
            head_size=head_size, block_size=block_size, window=window or UNBOUNDED,
            is_causal=is_causal,
        )  # fmt: skip
        self._step = _AttentionStep(
            block_table=block_table_SM.data_ptr(),
            block_table_stride=block_table_SM.stride(0),
            query_start_loc=query_start_loc.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
        )
        self._partials = torch.empty(0)
        self._reserve(PLAN_CAPACITY)

    @property
    def plan(self) -> CpuAttentionPlan:
        """As it was made last."""
        tensors = (*self._inputs, self._data, self._partials)
        num_tokens = int(self._inputs[1][self._call.sequences])
        return CpuAttentionPlan(
            self._step, self._partials, tensors, num_tokens, self._shape, self._window, self._is_causal
        )

    @property
    def has_shared_sequences(self) -> bool:
        """Whether threads share a sequence: in as many parts as its length asks for, so that the plan is for this
        length alone. Any other plan computes shorter sequences as well."""
        return bool(self._head.partials)

    def plan_for(self, num_sequences: int) -> None:
        """Divide the work of the first so many sequences, as they are now."""
        handle, call = library(), self._call
        assert handle is not None, "without the C++ kernels there are no plans"
        call.sequences = num_sequences
        num_bytes = handle.quire_plan_attention(ctypes.byref(call))
        if num_bytes > call.capacity:
            self._reserve(num_bytes)
            handle.quire_plan_attention(ctypes.byref(call))
        if self._head.partials > len(self._partials):
            self._partials = torch.empty(self._head.partials)
            self._step.partials = self._partials.data_ptr()

    def _reserve(self, num_bytes: int) -> None:
        self._data = torch.empty(-(-num_bytes // 8), dtype=torch.int64)
        address = self._data.data_ptr()
        self._head = _AttentionPlan.from_address(address)
        self._step.plan = self._call.plan = address
        self._call.capacity = num_bytes


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
