"""The routed experts of a feed-forward layer (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): `pack_experts`
once, then `routed_experts`; or `expert_results` where others need single results, which `sum_results` adds up.

::

    x ─► the token's experts, each activation(gate) · up ─► down  ─► Σ weight · result [+ sigmoid(shared_gate) · shared]

Tokens are sorted by expert, and only the weights of experts that a token has chosen are read. Each expert's linears are
those of `linear`: a token has the bits that they would give it alone. The sum is in the order of the token's experts,
likeliest first, in float32, and rounded once; so, as with `linear`, a token's result does not depend on the others.

Adapters of experts (`lora.py`) are added where `linear` adds them, before the activation; on the CPU alone.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire_kernels.cpu import (
    FLOATS,
    Call,
    check_tensor,
    launch,
    library,
    pointer,
    structure,
    uses_triton,
    with_dense_rows,
)
from quire_kernels.linear import LinearCall, LinearWeight, linear
from quire_kernels.lora import LoraRows, LoraTable

_ExpertsCall = structure("ExpertsCall")


@dataclass(slots=True)
class ExpertsWeight:
    """The experts of a layer that are here, in the form that `routed_experts` reads. Made by `pack_experts`."""

    gate_up: Sequence[LinearWeight]
    """[2 * I, E] each, gated; or [I, E], whose results are activated."""
    down: Sequence[LinearWeight]
    """[E, I] each."""
    expert_map: torch.Tensor
    """int64, by id: the expert's place in these lists, or -1 if it is not here."""
    calls: tuple[ctypes.Array[Call], ctypes.Array[Call]] | None
    """For the C++ kernel; None if the linears have none."""
    pointers: tuple[torch.Tensor, torch.Tensor]
    """For the kernels of GPUs, of both lists: int64 [2, experts], addresses of weights and of scales."""
    biases: tuple[torch.Tensor, torch.Tensor] | None
    """For the kernels of GPUs, of both lists: float32 [experts, features]; None if there are none."""

    def tensors_of(self, place: int) -> list[torch.Tensor]:
        """All tensors of the expert at a place; what is written to them takes effect."""
        weights = (self.gate_up[place], self.down[place])
        parts = [part for one in weights for part in (one.data, one.bias, one.scales, one.offsets, *one.extra)]
        parts += [] if self.biases is None else [each[place] for each in self.biases]
        return [part for part in parts if part is not None]

    @property
    def hidden_size(self) -> int:
        return self.down[0].out_features

    @property
    def intermediate_size(self) -> int:
        return self.down[0].in_features


class ExpertsLora(NamedTuple):
    """The adapter of each row of a batch: an argument of `routed_experts`."""

    gate_up: LoraTable
    """Of all experts that are here, in their order."""
    down: LoraTable
    slots: torch.Tensor
    """int64 [T], the slot of each row, below `max_loras`; -1: none. Not checked by the kernels."""


def pack_experts(
    gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], expert_map: torch.Tensor
) -> ExpertsWeight:
    """Bring the packed linears of experts together; no weight is copied. Raises ValueError if there are no experts,
    they are not all alike, or the map is not of these lists.

    Args:
        gate_up: by expert, from `pack_linear` with `gated` or `activates`; all with a bias, or none.
        down: by expert, likewise, whatever gate_up has.
        expert_map: int64, by id: the expert's place in these lists, or -1 for one that is not here, which adds
            nothing.
    """
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(f"there are {len(gate_up)} gate_up and {len(down)} down; there must be one of each per expert")
    for one, like in [*((one, gate_up[0]) for one in gate_up), *((one, down[0]) for one in down)]:
        if _kind(one) != _kind(like):
            raise ValueError(f"an expert is {_kind(one)}; all must be {_kind(like)}")
    if not (gate_up[0].gated or gate_up[0].activates) or down[0].gated or down[0].activates:
        raise ValueError("gate_up must be gated, or activate its results, and down must not")
    sizes = (gate_up[0].out_features, gate_up[0].in_features)
    if sizes != ((2 if gate_up[0].gated else 1) * down[0].in_features, down[0].out_features):
        raise ValueError(f"gate_up is {sizes} beside down of {down[0].out_features, down[0].in_features}; it must fit")
    if expert_map.dtype != torch.int64 or expert_map.dim() != 1 or int(expert_map.max()) >= len(down):
        raise ValueError(f"expert_map is {expert_map}; it must be int64, and below {len(down)}")
    calls = None
    of_gate_up, of_down = ([one.call for one in each if one.call is not None] for each in (gate_up, down))
    if len(of_gate_up) == len(of_down) == len(down):
        kind = LinearCall * len(down)
        calls = kind(*of_gate_up), kind(*of_down)
    device = down[0].data.device
    pointers = [
        torch.tensor([[one.data.data_ptr() for one in each], [pointer(one.scales) or 0 for one in each]], device=device)
        for each in (gate_up, down)
    ]
    biases = None
    if calls is None and (gate_up[0].bias is not None or down[0].bias is not None):
        biases = _stacked_biases(gate_up), _stacked_biases(down)
    return ExpertsWeight(gate_up, down, expert_map.to(device), calls, (pointers[0], pointers[1]), biases)


def _stacked_biases(weights: Sequence[LinearWeight]) -> torch.Tensor:
    zeros = weights[0].data.new_zeros(weights[0].out_features, dtype=torch.float32)
    return torch.stack([zeros if one.bias is None else one.bias.float() for one in weights])


def _kind(weight: LinearWeight) -> tuple[object, ...]:
    bias = "without bias" if weight.bias is None else "with bias"
    kind = (weight.out_features, weight.in_features, weight.gated, weight.activates, weight.activation, weight.dtype)
    return (*kind, weight.data.dtype, weight.group_size, weight.data.device, bias)


def routed_experts(
    x_TE: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    experts: ExpertsWeight,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T1: torch.Tensor | None = None,
    lora: ExpertsLora | None = None,
) -> torch.Tensor:
    """The weighted sum of the outputs of each token's experts, those that are here: [T, E]. Raises TypeError or
    ValueError if an argument does not fit the experts.

    Args:
        x_TE: activations, in the experts' dtype; rows may be strided.
        weights_TK: float32, from `topk_softmax`, as the ids.
        expert_ids_TK: int64, each at least 0 and below the length of the experts' map: not checked by the kernels.
        experts: from `pack_experts`.
        shared_TE: added to the sum before it is rounded: the output of experts that all tokens share.
        shared_gate_T1: float32, whose sigmoid multiplies `shared_TE`.
        lora: adapters; on the CPU alone.
    """
    x_TE = with_dense_rows(x_TE)
    (rows, size), top_k = x_TE.shape, expert_ids_TK.shape[1]
    if x_TE.dtype != experts.down[0].dtype or x_TE.device != experts.expert_map.device:
        raise TypeError(f"activations are {x_TE.dtype} on {x_TE.device}; they must be as the experts were packed for")
    if size != experts.hidden_size:
        raise ValueError(f"activations have {size} columns; the experts were packed for {experts.hidden_size}")
    if shared_TE is not None and (shared_TE.shape != x_TE.shape or shared_TE.dtype != x_TE.dtype):
        raise ValueError(f"shared_TE is {list(shared_TE.shape)}; it must be {list(x_TE.shape)}, of {x_TE.dtype}")
    shared_TE = None if shared_TE is None else with_dense_rows(shared_TE)
    if lora is not None:
        _check_lora(lora, experts, rows)
    if uses_triton(x_TE):
        if lora is not None:
            raise ValueError("lora is given; there is no kernel of experts with adapters for GPUs")
        from quire_kernels.gpu import experts as gpu

        return gpu.routed_experts(
            x_TE, weights_TK, expert_ids_TK, experts.expert_map, experts.pointers, experts.biases,
            experts.down[0].data.dtype, experts.gate_up[0].activation, experts.gate_up[0].gated,
            experts.intermediate_size, shared_TE, shared_gate_T1,
        )  # fmt: skip
    check_tensor("weights_TK", weights_TK, torch.float32, rows, top_k)
    check_tensor("expert_ids_TK", expert_ids_TK, torch.int64, rows, top_k)
    if shared_gate_T1 is not None:
        check_tensor("shared_gate_T1", shared_gate_T1, torch.float32, rows, 1)
    if experts.calls is None or library() is None:
        results_TKE = _results_torch(x_TE, experts.expert_map[expert_ids_TK], experts, lora)
        return combine_experts(results_TKE, weights_TK, shared_TE, shared_gate_T1).to(x_TE.dtype)
    out_TE = torch.empty(rows, size, dtype=x_TE.dtype)
    return _run(out_TE, weights_TK, x_TE.dtype, (experts, x_TE, expert_ids_TK), shared_TE, shared_gate_T1, lora=lora)


def _check_lora(lora: ExpertsLora, experts: ExpertsWeight, rows: int) -> None:
    check_tensor("lora.slots", lora.slots, torch.int64, rows)
    for name, table, linears in (("gate_up", lora.gate_up, experts.gate_up), ("down", lora.down, experts.down)):
        own = (table.num_experts, sum(table.sizes), table.in_features, table.dtype)
        wanted = (len(linears), linears[0].out_features, linears[0].in_features, linears[0].dtype)
        if own != wanted:
            raise ValueError(f"lora.{name} is of {own}: experts, features and dtype; it must be of {wanted}")


def expert_results(x_PE: torch.Tensor, expert_ids_P: torch.Tensor, experts: ExpertsWeight) -> torch.Tensor:
    """The output of one expert for each row, [P, E] float32, neither weighted nor rounded: the terms of
    `routed_experts`' sum, on the CPU. The int64 ids are those of experts that are here. Raises TypeError or ValueError
    if an argument does not fit the experts."""
    x_PE = with_dense_rows(x_PE)
    rows, size = x_PE.shape
    if x_PE.dtype != experts.down[0].dtype or x_PE.device.type != "cpu":
        raise TypeError(f"activations are {x_PE.dtype} on {x_PE.device}; they must be as the experts, on the CPU")
    if size != experts.hidden_size:
        raise ValueError(f"activations have {size} columns; the experts were packed for {experts.hidden_size}")
    check_tensor("expert_ids_P", expert_ids_P, torch.int64, rows)
    if experts.calls is None or library() is None:
        return _results_torch(x_PE, experts.expert_map[expert_ids_P][:, None], experts)[:, 0]
    out_PE = torch.empty(rows, size, dtype=torch.float32)
    return _run(out_PE, torch.ones(rows, 1, dtype=torch.float32), x_PE.dtype, (experts, x_PE, expert_ids_P))


def sum_results(
    results_TKE: torch.Tensor,
    weights_TK: torch.Tensor,
    dtype: torch.dtype,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum at the end of `routed_experts`, with the same bits, in a dtype, of results that were computed one by one
    (`expert_results`), on the CPU."""
    rows, top_k, size = results_TKE.shape
    if library() is None or dtype not in FLOATS:
        return combine_experts(results_TKE, weights_TK, shared_TE, shared_gate_T1).to(dtype)
    check_tensor("results_TKE", results_TKE, torch.float32, rows, top_k, size)
    check_tensor("weights_TK", weights_TK, torch.float32, rows, top_k)
    if shared_gate_T1 is not None:
        check_tensor("shared_gate_T1", shared_gate_T1, torch.float32, rows, 1)
    if shared_TE is not None:
        shared_TE = with_dense_rows(shared_TE)
        if shared_TE.shape != (rows, size) or shared_TE.dtype != dtype:
            raise ValueError(f"shared_TE is {list(shared_TE.shape)}; it must be {[rows, size]}, of {dtype}")
    out_TE = torch.empty(rows, size, dtype=dtype)
    return _run(out_TE, weights_TK, dtype, None, shared_TE, shared_gate_T1, results_TKE)


def _run(
    out_TE: torch.Tensor,
    weights_TK: torch.Tensor,
    dtype: torch.dtype,
    routed: tuple[ExpertsWeight, torch.Tensor, torch.Tensor] | None,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T1: torch.Tensor | None = None,
    results_TKE: torch.Tensor | None = None,
    lora: ExpertsLora | None = None,
) -> torch.Tensor:
    """Launch the C++ kernel with tensors that are checked; returns `out_TE`. It computes experts, of `routed`: them,
    activations and ids; or sums results that are given. `dtype` is that of activations."""
    call = _ExpertsCall(
        weights=weights_TK.data_ptr(), shared=pointer(shared_TE), shared_gate=pointer(shared_gate_T1),
        shared_stride=0 if shared_TE is None else shared_TE.stride(0), results=pointer(results_TKE),
        out=out_TE.data_ptr(), rows=len(out_TE), top_k=weights_TK.shape[1], hidden_size=out_TE.shape[1],
        is_float=dtype == torch.float32, out_is_float=out_TE.dtype == torch.float32,
    )  # fmt: skip
    if routed is not None:
        experts, x_TE, expert_ids = routed
        assert experts.calls is not None
        gate_up, down = experts.calls
        call.x, call.x_stride, call.expert_ids = x_TE.data_ptr(), x_TE.stride(0), expert_ids.data_ptr()
        call.expert_map, call.experts = experts.expert_map.data_ptr(), len(down)
        call.gate_up, call.down = ctypes.addressof(gate_up), ctypes.addressof(down)
        call.intermediate_size = experts.intermediate_size
    if lora is not None:
        assert lora.gate_up.layer is not None
        assert lora.down.layer is not None
        call.lora_gate_up, call.lora_down = ctypes.addressof(lora.gate_up.layer), ctypes.addressof(lora.down.layer)
        call.lora_index = lora.slots.data_ptr()
    launch("quire_experts", call)
    return out_TE


def _results_torch(
    x_TE: torch.Tensor, places_TK: torch.Tensor, experts: ExpertsWeight, lora: ExpertsLora | None = None
) -> torch.Tensor:
    """[T, K, E] float32, by the experts' places; zeros for those that are not here."""
    results_TKE = x_TE.new_zeros(*places_TK.shape, experts.hidden_size, dtype=torch.float32)
    for place in sorted(set(places_TK.flatten().tolist())):
        if place >= 0:
            tokens, ranks = torch.where(places_TK == place)
            of_gate_up = of_down = None
            if lora is not None:
                slots = lora.slots[tokens]
                slots = torch.where(slots < 0, slots, place * lora.down.max_loras + slots)
                of_gate_up, of_down = LoraRows(lora.gate_up, slots), LoraRows(lora.down, slots)
            hidden = linear(x_TE[tokens], experts.gate_up[place], lora=of_gate_up)
            results_TKE[tokens, ranks] = linear(hidden, experts.down[place], torch.float32, lora=of_down)
    return results_TKE


def combine_experts(
    results_TKE: torch.Tensor,
    weights_TK: torch.Tensor,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T1: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum at the end of `routed_experts`, float32, of results that were computed one by one, on any device.

    A token's sum has the same bits in any batch: each step of it is one operation on single numbers.
    """
    out_TE = torch.zeros_like(results_TKE[:, 0], dtype=torch.float32)
    for rank, result_TE in enumerate(results_TKE.unbind(1)):
        out_TE += weights_TK[:, rank, None] * result_TE
    if shared_TE is not None:
        out_TE += shared_TE.float() if shared_gate_T1 is None else shared_gate_T1.sigmoid() * shared_TE.float()
    return out_TE
