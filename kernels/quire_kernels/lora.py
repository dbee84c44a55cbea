"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685), a different one for each
row of a batch (Punica, Chen et al. 2023, https://arxiv.org/abs/2310.18547; S-LoRA, Sheng et al. 2023,
https://arxiv.org/abs/2311.03285).

::

    x [T, K] ─┬─ shrink: x · Aᵀ of the row's adapter ─► hidden [T, P, R] ─┐
              └─ linear: x · Wᵀ + bias ─────────────────────────────────( + ) hidden · Bᵀ ─► activation, gate ─► out

A layer may have P stacked projections, such as q, k and v; each has an A and a B of its own, or none. `pack_lora`
converts a pair once. A `LoraTable` has the adapters of a layer by slot; `linear` takes it with the slot of each row.

An adapter may have scales, as DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353), which multiply x · Wᵀ; on the
CPU alone.

The sums of both products are float32; `hidden` is rounded to the dtype of activations, as in Hugging Face's PEFT. A row
without an adapter has the bits that it has without the table, and a row's result does not depend on the others.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire_kernels.cpu import (
    FLOATS,
    GROUPS,
    Call,
    launch,
    library,
    structure,
    uses_triton,
    with_dense_rows,
)

_LoraLayer = structure("LoraLayer")
_LoraCall = structure("LoraCall")
MAX_RANK = 256
_TILE = 512
"""Numbers that a tile of AMX may read behind the last panel of B."""
LORA_PANEL = 16
"""Ranks of A, and output features of B, that lie together in a packed pair; as in kernels/csrc/lora.inc."""


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """A and B of a projection, in the form that the kernels read. Made by `pack_lora`."""

    rank: int
    in_features: int
    out_features: int
    a: torch.Tensor
    """[R, K]; packed for the C++ kernels: in panels, one after another."""
    b: torch.Tensor
    """[N, R]; packed likewise."""
    is_packed: bool
    scales: torch.Tensor | None = None
    """float32, [N] and 1 up to whole panels: what multiplies the results of the layer's weight, without the bias."""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A, [R, K], and B, [N, R]."""
        if not self.is_packed:
            return self.a, self.b
        group, in_features = GROUPS[self.a.dtype], self.in_features
        panels = torch.split(self.a, LORA_PANEL * in_features)
        a = [one.view(in_features // group, -1, group).transpose(0, 1).reshape(-1, in_features) for one in panels]
        b = self.b[:-_TILE].view(-1, -(-self.rank // group), LORA_PANEL, group).transpose(1, 2).flatten(2).flatten(0, 1)
        return torch.cat(a), b[: self.out_features, : self.rank]


def lora_sizes(rank: int, in_features: int, out_features: int, dtype: torch.dtype) -> tuple[int, int]:
    """Numbers of A and of B once `pack_lora` has packed them on the CPU."""
    if not _has_kernel(in_features, dtype, torch.device("cpu")):
        return rank * in_features, out_features * rank
    columns, rows = (size + -size % unit for size, unit in ((rank, GROUPS[dtype]), (out_features, LORA_PANEL)))
    return rank * in_features, rows * columns + _TILE


def pack_lora(
    a_RK: torch.Tensor,
    b_NR: torch.Tensor,
    scaling: float = 1.0,
    scales_N: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> LoraWeight:
    """Convert an adapter of one projection to the form that `linear` reads fastest. Raises TypeError or ValueError if A
    and B do not fit each other, or the rank is not between 1 and 256.

    Args:
        a_RK: in the dtype of activations, where they are.
        b_NR: likewise.
        scaling: multiplies B.
        scales_N: float32, multiply the results of the layer's weight; on the CPU alone.
        out: on the CPU, where to pack A and B: zeros in the same dtype, as many as `lora_sizes`. Not used for the
            kernels of GPUs.
    """
    if a_RK.dim() != 2 or b_NR.dim() != 2 or a_RK.shape[0] != b_NR.shape[1]:
        raise ValueError(f"A is {list(a_RK.shape)} beside B of {list(b_NR.shape)}; they must be [R, K] and [N, R]")
    if a_RK.dtype != b_NR.dtype or a_RK.device != b_NR.device:
        raise TypeError(
            f"A is {a_RK.dtype} on {a_RK.device} beside B of {b_NR.dtype} on {b_NR.device}; they must match"
        )
    (rank, in_features), out_features = a_RK.shape, len(b_NR)
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"A has rank {rank}; it must be between 1 and {MAX_RANK}")
    scales = None
    if scales_N is not None:
        if uses_triton(a_RK):
            raise ValueError(f"scales are given beside A on {a_RK.device}; there is no kernel with scales for GPUs")
        if scales_N.shape != (out_features,) or scales_N.dtype != torch.float32 or not scales_N.is_cpu:
            raise ValueError(
                f"scales are {scales_N.dtype} {list(scales_N.shape)} on {scales_N.device}; they must be "
                f"{torch.float32} [{out_features}] on the CPU"
            )
        scales = F.pad(scales_N, (0, -out_features % LORA_PANEL), value=1.0)
    if scaling != 1.0:
        b_NR = (b_NR.float() * scaling).to(b_NR.dtype)
    if not _has_kernel(in_features, a_RK.dtype, a_RK.device):
        pair = [one.contiguous() for one in (a_RK, b_NR)]
        if out is not None:
            pair = [own.view(one.shape).copy_(one) for own, one in zip(out, pair, strict=True)]
        a, b = (one.clone() if one.data_ptr() % 16 else one for one in pair)  # which the kernels of GPUs rely on
        return LoraWeight(rank, in_features, out_features, a, b, is_packed=False, scales=scales)
    group = GROUPS[a_RK.dtype]
    a, b = out or map(a_RK.new_zeros, lora_sizes(rank, in_features, out_features, a_RK.dtype))
    for panel, rows in zip(torch.split(a, LORA_PANEL * in_features), torch.split(a_RK, LORA_PANEL), strict=True):
        panel.view(torch.int32).view(-1, len(rows)).copy_(_by_group(rows).t())
    if rank % group or out_features % LORA_PANEL:
        b_NR = F.pad(b_NR, (0, -rank % group, 0, -out_features % LORA_PANEL))
    panels = _by_group(b_NR).view(-1, LORA_PANEL, b_NR.shape[1] // group).transpose(1, 2)
    b[:-_TILE].view(torch.int32).view(panels.shape).copy_(panels)
    return LoraWeight(rank, in_features, out_features, a, b, is_packed=True, scales=scales)


def rescale_lora(weight: LoraWeight, scales_N: torch.Tensor) -> None:
    """Multiply in place what an adapter adds, and its scales. Raises ValueError if it was packed without scales.

    Args:
        weight: of `pack_lora`, which may have kept B as it was; no step computes with it meanwhile.
        scales_N: float32.
    """
    if weight.scales is None:
        raise ValueError("the adapter has no scales; give scales_N to pack_lora")
    weight.scales[: len(scales_N)] *= scales_N
    if not weight.is_packed:
        weight.b.mul_(scales_N[:, None])
        return
    panels_N = F.pad(scales_N, (0, len(weight.scales) - len(scales_N))).view(-1, 1, LORA_PANEL, 1)
    group = GROUPS[weight.b.dtype]
    weight.b[:-_TILE].view(len(panels_N), -1, LORA_PANEL, group).mul_(panels_N)


def _by_group(matrix: torch.Tensor) -> torch.Tensor:
    """The numbers that lie together in a packed pair as one of 32 bits."""
    matrix = matrix.contiguous()
    # A single row counts as contiguous whatever its stride.
    if any(number * matrix.itemsize % 4 for number in (matrix.storage_offset(), *matrix.stride()[:-1])):
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int32)


def _has_kernel(in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the C++ kernels compute with adapters like these: at least where they compute with the layer's weight."""
    return library() is not None and device.type == "cpu" and dtype in FLOATS and in_features % GROUPS[dtype] == 0


@dataclass(frozen=True, slots=True)
class LoraSlot:
    """An adapter of a layer, as a slot of its table takes it. Made by `LoraTable.prepare`."""

    weights: list[list[LoraWeight | None]]
    """By expert and projection."""
    pairs: torch.Tensor
    """int64 [experts, projections, 3], as of the table."""
    scales: torch.Tensor
    """int64 [experts, projections], likewise."""

    @property
    def is_empty(self) -> bool:
        """Whether the adapter changes nothing of the layer."""
        return all(one is None for own in self.weights for one in own)


class LoraTable:
    """The adapters of a linear layer, by slot. Its own tensors never move, so recordings and CUDA graphs remain valid
    when a slot changes; a slot must not change while a step computes with it.

    Experts, whose layers are alike, have one table. `linear` with the layer of expert e takes rows of slot s as of slot
    e · max_loras + s; `routed_experts` takes s.

    Args:
        sizes: output features of each projection, in the order in which they are stacked.
        in_features: of all of them.
        dtype: of activations.
        max_loras: slots.
        max_rank: the largest rank that a slot takes, at most 256.
        device: where the layer computes.
        num_experts: layers that have the table.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        in_features: int,
        dtype: torch.dtype,
        *,
        max_loras: int,
        max_rank: int = 64,
        device: torch.device | str = "cpu",
        num_experts: int = 1,
    ) -> None:
        if not 1 <= max_rank <= MAX_RANK:
            raise ValueError(f"max_rank is {max_rank}; it must be between 1 and {MAX_RANK}")
        if max_loras < 1 or not sizes:
            raise ValueError(
                f"max_loras is {max_loras} of {len(sizes)} projections; there must be at least one of each"
            )
        self.sizes, self.in_features, self.dtype = list(sizes), in_features, dtype
        self.max_loras, self.max_rank, self.device = max_loras, max_rank, torch.device(device)
        self.num_experts, num_slots = num_experts, num_experts * max_loras
        self.slots: list[list[LoraWeight | None]] = [[None] * len(self.sizes) for _ in range(num_slots)]
        self._filled: set[int] = set()
        self.pairs = torch.zeros(num_slots, len(self.sizes), 3, dtype=torch.int64, device=self.device)
        """By slot and projection: the addresses of A and B, and the rank."""
        self._scales = torch.zeros(num_slots, len(self.sizes), dtype=torch.int64, device="cpu")
        """Likewise the addresses of scales, or 0."""
        self.ends = torch.tensor(self.sizes).cumsum(0).to(self.device)
        self.hidden_size = -(-max_rank // 32) * 32
        self.layer: Call | None = None
        """For the C++ kernels."""
        if _has_kernel(in_features, dtype, self.device):
            self.layer = _LoraLayer(
                self.pairs.data_ptr(), self.ends.data_ptr(), len(self.sizes), num_slots, in_features, self.hidden_size,
                dtype == torch.float32, self._scales.data_ptr(),
            )  # fmt: skip

    def prepare(self, weights: Sequence[LoraWeight | None]) -> LoraSlot:
        """Make of an adapter what `set_slot` takes at once; other threads may compute with the table meanwhile. Raises
        TypeError or ValueError if a weight does not fit the layer.

        Args:
            weights: of each projection, of one expert after another; None: the adapter does not change it.
        """
        number, sizes = len(self.sizes), self.sizes * self.num_experts
        if len(weights) != len(sizes):
            raise ValueError(f"weights are {len(weights)}; they must be {len(sizes)}, one for each projection")
        for one, size in zip(weights, sizes, strict=True):
            if one is None:
                continue
            if one.a.dtype != self.dtype or one.a.device.type != self.device.type:
                raise TypeError(
                    f"an adapter is {one.a.dtype} on {one.a.device}; it must be {self.dtype} on {self.device}"
                )
            if (one.out_features, one.in_features) != (size, self.in_features):
                raise ValueError(
                    f"an adapter is of [{one.out_features}, {one.in_features}]; it must be of [{size}, "
                    f"{self.in_features}]"
                )
            if one.rank > self.max_rank:
                raise ValueError(f"an adapter has rank {one.rank}; it must be at most max_rank, {self.max_rank}")
        pairs = [(0, 0, 0) if one is None else (one.a.data_ptr(), one.b.data_ptr(), one.rank) for one in weights]
        scales = [0 if one is None or one.scales is None else one.scales.data_ptr() for one in weights]
        return LoraSlot(
            [list(weights[first : first + number]) for first in range(0, len(weights), number)],
            torch.tensor(pairs, device="cpu").view(-1, number, 3),
            torch.tensor(scales, device="cpu").view(-1, number),
        )

    def set_slot(self, slot: int, adapter: LoraSlot | Sequence[LoraWeight | None]) -> None:
        """Put an adapter into a slot, in place of what it held. The slot keeps its tensors alive. Raises ValueError if
        there is no such slot, and the errors of `prepare`.

        Args:
            slot: at least 0 and below `max_loras`.
            adapter: of `prepare`, or what that takes.
        """
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot is {slot}; it must be at least 0 and below max_loras, {self.max_loras}")
        if not isinstance(adapter, LoraSlot):
            adapter = self.prepare(adapter)
        if adapter.is_empty:
            self.clear_slot(slot)
        else:
            self._filled.add(slot)
            self._write(slot, adapter.weights, adapter.pairs, adapter.scales)

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: rows that name it are then computed as without an adapter."""
        if slot in self._filled:
            self._filled.remove(slot)
            self._write(slot, [[None] * len(self.sizes)] * self.num_experts, 0, 0)

    def _write(
        self, slot: int, weights: list[list[LoraWeight | None]], pairs: torch.Tensor | int, scales: torch.Tensor | int
    ) -> None:
        by_expert, number = (self.num_experts, self.max_loras), len(self.sizes)
        self.pairs.view(*by_expert, number, 3)[:, slot] = pairs
        self._scales.view(*by_expert, number)[:, slot] = scales
        self.slots[slot :: self.max_loras] = weights


class LoraRows(NamedTuple):
    """The adapter of each row of a batch: an argument of `linear`."""

    table: LoraTable
    slots: torch.Tensor
    """int64 [T], the slot of each row, below `max_loras`; -1: none. Not checked by the kernels."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What adapters add to the result of a linear: `hidden · Bᵀ` of each row that has one. Made by `shrink`."""

    table: LoraTable
    slots: torch.Tensor
    hidden: torch.Tensor
    """[T, P, R] in the dtype of activations. In C++ the rows whose adapter changes the layer are sorted by slot, and
    there is room for a tile of 16 rows behind the last."""
    sorted: torch.Tensor | None
    """In C++: int64 [1 + T], how many rows have an adapter that changes the layer, and then which."""
    first: int = 0
    """The number of the result's first output feature in the table."""

    def write_to(self, call: Call) -> None:
        """Make the C++ kernel of a linear add it."""
        assert self.table.layer is not None
        assert self.sorted is not None
        call.lora, call.lora_index = ctypes.addressof(self.table.layer), self.slots.data_ptr()
        call.lora_sorted = self.sorted.data_ptr()
        call.lora_hidden, call.lora_first = self.hidden.data_ptr(), self.first

    def add_to(self, out_TN: torch.Tensor, bias_N: torch.Tensor | None = None) -> None:
        """Add it in place, to results that are multiplied by the scales, without the bias in them. A row without an
        adapter is not written."""
        if uses_triton(out_TN):
            from quire_kernels.gpu import lora as gpu

            table = self.table
            gpu.expand(self.hidden, self.slots, table.pairs, table.ends, max(table.sizes), out_TN, self.first)
            return
        columns = out_TN.shape[1]
        places_T = torch.arange(len(out_TN))
        if self.sorted is not None:
            count = int(self.sorted[0])
            places_T[self.sorted[1 : 1 + count]] = torch.arange(count)
        for slot in sorted(set(self.slots.tolist()) - {-1}):
            rows, start = torch.where(self.slots == slot)[0], -self.first
            for projection, weight in enumerate(self.table.slots[slot]):
                end = start + self.table.sizes[projection]
                low, high = max(start, 0), min(end, columns)
                if weight is not None and low < high:
                    b_NR = weight.unpacked()[1][low - start : high - start].float()
                    hidden_TR = self.hidden[places_T[rows], projection, : weight.rank].float()
                    own_TN = out_TN[rows, low:high].float()
                    if weight.scales is not None:
                        scales_N = weight.scales[low - start : high - start]
                        own_TN = own_TN * scales_N
                        own_TN = own_TN if bias_N is None else own_TN + (1 - scales_N) * bias_N[low:high].float()
                    out_TN[rows, low:high] = (own_TN + hidden_TR @ b_NR.t()).to(out_TN.dtype)
                start = end


def shrink(x_TK: torch.Tensor, lora: LoraRows) -> LoraDelta:
    """`x · Aᵀ` of the adapter of each row. Raises TypeError or ValueError if the activations do not fit the table."""
    table, slots_T = lora
    if x_TK.dtype != table.dtype or x_TK.shape[1:] != (table.in_features,):
        raise ValueError(
            f"activations are {list(x_TK.shape)} of {x_TK.dtype}; the table of adapters is for {table.in_features} "
            f"columns of {table.dtype}"
        )
    if slots_T.dtype != torch.int64 or slots_T.shape != x_TK.shape[:1] or not slots_T.is_contiguous():
        raise ValueError(
            f"the slots of rows are {slots_T.dtype} {list(slots_T.shape)}; they must be {torch.int64} [{len(x_TK)}], "
            "without gaps"
        )
    num_rows, shape = len(x_TK), (len(table.sizes), table.hidden_size)
    if table.layer is not None:
        x_TK = with_dense_rows(x_TK)
        hidden_TPR = x_TK.new_empty(num_rows + LORA_PANEL - 1, *shape)
        order = torch.empty(1 + num_rows, dtype=torch.int64)
        call = _LoraCall(
            ctypes.addressof(table.layer), x_TK.data_ptr(), x_TK.stride(0), slots_T.data_ptr(), order.data_ptr(),
            hidden_TPR.data_ptr(), num_rows,
        )  # fmt: skip
        launch("quire_lora_shrink", call)
        return LoraDelta(table, slots_T, hidden_TPR, order)
    hidden_TPR = x_TK.new_empty(num_rows, *shape)
    if uses_triton(x_TK):
        from quire_kernels.gpu import lora as gpu

        gpu.shrink(with_dense_rows(x_TK), slots_T, table.pairs, hidden_TPR)
        return LoraDelta(table, slots_T, hidden_TPR, None)
    for slot in sorted(set(slots_T.tolist()) - {-1}):
        rows = torch.where(slots_T == slot)[0]
        for projection, weight in enumerate(table.slots[slot]):
            if weight is not None:
                hidden_TR = x_TK[rows].float() @ weight.unpacked()[0].float().t()
                hidden_TPR[rows, projection, : weight.rank] = hidden_TR.to(table.dtype)
    return LoraDelta(table, slots_T, hidden_TPR, None)
