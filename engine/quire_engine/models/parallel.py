"""Layers cut into slices, one per rank of a stage (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

One function, `shard`, decides which rank holds what: `size` units are cut into one piece per rank, or into one per unit
if there are fewer units than ranks; then several ranks hold the same piece::

                          4 ranks                                                    piece = rank · pieces // ranks
    8 query heads         │ 0 1 │ 2 3 │ 4 5 │ 6 7 │                                  units = ceil(size / pieces)
    2 KV heads            │  0  │  0  │  1  │  1  │   replicated                     first = piece · units
    515 tokens            │ 0 … │129 …│258 …│387 … 514, padding │                    end   = first + units, at most size

Half a layer, attention or feed-forward, is then two matrix multiplications, with an operation on single heads or
features in between, and one sum over the ranks::

                     ┌ weight rows of rank 0 ─► heads of rank 0 ─► weight columns of rank 0 ┐
    the same hidden ─┤                                                                      ├─ all_reduce ─► same sum
                     └ weight rows of rank 1 ─► heads of rank 1 ─► weight columns of rank 1 ┘
                        ColumnParallel, QKVParallel                 RowParallel

The vocabulary is cut too. `VocabParallel.embed` sums rows that only one rank has, and `VocabParallel.logits` gathers
the columns on the first rank. With one rank each of them is the plain operation.

As soon as a matrix is loaded, `pack` converts it to the form that `quire_kernels.linear` reads, and frees the parameter
that it was loaded into, so the model is never in memory twice.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from quire_kernels import LinearWeight, embedding, linear, pack_linear, rms_norm
from quire_kernels.dispatch import uses_triton
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.layers import Weight
from quire_engine.models.mapped import mapped_zeros

__all__ = [
    "ColumnParallel",
    "LoadTarget",
    "Packable",
    "QKVParallel",
    "RowParallel",
    "Sinks",
    "VocabParallel",
    "load_targets",
    "num_parameters",
    "receive_activations",
    "send_activations",
    "shard",
    "stage_layers",
]


def shard(size: int, parallel: ParallelState, unit: int = 1) -> slice:
    """The part of a dimension that a rank holds.

    Args:
        size: of the whole dimension.
        parallel: the rank.
        unit: consecutive elements that stay together, such as the features of a head; divides `size`.
    """
    num_units, ranks = size // unit, parallel.tensor_parallel_size
    pieces = min(num_units, ranks)
    units_each = -(-num_units // pieces)
    first = parallel.tensor_rank * pieces // ranks * units_each * unit
    return slice(min(first, size), min(first + units_each * unit, size))


def stage_layers(num_layers: int, parallel: ParallelState) -> range:
    """The layers of a rank's stage, by their numbers in the checkpoint; the first stages get the remainder."""
    each, left = divmod(num_layers, parallel.pipeline_parallel_size)
    first = parallel.stage * each + min(parallel.stage, left)
    return range(first, first + each + (parallel.stage < left))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where a rank's slice of a checkpoint's tensor goes."""

    parameter: torch.Tensor
    """A view to copy into."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    index: tuple[slice, ...]
    """The rank's slice of it, one entry per dimension; empty if another rank holds the tensor."""
    offset: float = 0.0
    """Added to what is copied."""
    module: "Packable | None" = None
    """The module to pack when all its targets are filled."""


def _rows(parameter: torch.Tensor, size: int, rows: slice) -> LoadTarget:
    """The target of a tensor whose first dimension is cut."""
    whole = parameter.shape[1:]
    return LoadTarget(parameter, (size, *whole), (rows, *(slice(0, n) for n in whole)))


class Packable(nn.Module):
    """A module whose `weight`, and `bias` if it has one, become a `LinearWeight` once they are loaded."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    gated = False
    activation = "silu"
    activation_bits = 8
    """Of a quantised weight's activations."""

    def __init__(self, out_features: int, in_features: int, int8: bool = False) -> None:
        super().__init__()
        self._packed: LinearWeight | None = None
        self._dtype = torch.get_default_dtype()
        weight = mapped_zeros((out_features, in_features), torch.int8 if int8 else self._dtype)  # freed by `pack`
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = None
        if int8:
            scale = torch.empty(out_features, 1, dtype=torch.float32)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None

    @property
    def packed(self) -> LinearWeight:
        """The packed weight."""
        assert self._packed is not None, "pack was not called"
        return self._packed

    @property
    def packed_weights(self) -> Sequence[LinearWeight]:
        """Everything that was packed."""
        return [self.packed]

    def pack(self, quantized_dtype: torch.dtype | None) -> None:
        """Pack the parameters, quantised if a dtype is given and they are not already, and free them."""
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.data
        scales = None if self.weight_scale is None else self.weight_scale.data[:, 0]
        self._packed = pack_linear(
            self.weight.data,
            bias,
            scales_N=scales,
            dtype=self._dtype,
            quantize=quantized_dtype is not None,
            quantized_dtype=quantized_dtype or torch.int8,
            activation_bits=self.activation_bits,
            gated=self.gated,
            activation=self.activation,
        )
        self.weight = self.weight_scale = self.bias = None


class ColumnParallel(Packable):
    """One or several projections of the same input, stacked by output feature into one matrix multiplication.

    Each rank has a slice of each projection's output features.

    Args:
        in_features: size of the input, of which every rank has all.
        parts: the checkpoint's name of each projection, and its output size, in the order in which they are stacked.
        bias: whether each projection has one.
        parallel: the rank.
        unit: output features that stay together.
        gated: there are two parts, gate and up, and the output is `activation(gate) * up`.
        int8: the checkpoint's weights are int8 with a scale per output feature.
        activation: of the gate.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool,
        parallel: ParallelState,
        unit: int = 1,
        gated: bool = False,
        int8: bool = False,
        activation: str = "silu",
    ) -> None:
        slices = [shard(size, parallel, unit) for size in parts.values()]
        super().__init__(sum(map(_length, slices)), in_features, int8)
        self.gated, self.activation, self.parts, self.slices = gated, activation, dict(parts), slices
        self.sizes = [_length(part) for part in slices]
        """Output features of each projection that this rank has."""
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, sum of sizes], or half of it if gated."""
        return linear(x, self.packed)

    def load_targets(self) -> dict[str, LoadTarget]:
        """By name, relative to the parent of this module."""
        return {
            f"{name}.{kind}": _rows(piece, self.parts[name], rows)
            for kind, parameter in self.named_parameters()
            for name, rows, piece in zip(
                self.parts, self.slices, torch.split(parameter.data, self.sizes), strict=True
            )
        }  # fmt: skip


class QKVParallel(ColumnParallel):
    """Queries, keys and values of this rank's heads; with fewer KV heads than ranks, several ranks hold the same."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        parallel: ParallelState,
        int8: bool = False,
    ) -> None:
        q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(hidden_size, parts, bias, parallel, unit=head_size, int8=int8)
        self.num_heads, self.num_kv_heads = self.sizes[0] // head_size, self.sizes[1] // head_size
        self._group = parallel.tensor_group
        ranks, rank = parallel.tensor_parallel_size, parallel.tensor_rank
        pieces = min(num_kv_heads, ranks)
        self._has_keys_first = rank * pieces // ranks != (rank - 1) * pieces // ranks

    def norm_projections(
        self,
        query_TQ: torch.Tensor,
        key_TK: torch.Tensor,
        query_norm_Q: torch.Tensor,
        key_norm_K: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm over all heads of a token together, of queries and of keys.

        Args:
            query_TQ: of the rank's heads.
            key_TK: likewise.
            query_norm_Q: weight, of all heads.
            key_norm_K: likewise.
            eps: of both norms.

        Returns:
            The normed queries and keys of the rank's heads.
        """
        if self._group is None:
            return rms_norm(query_TQ, query_norm_Q, eps), rms_norm(key_TK, key_norm_K, eps)
        sizes = [len(query_norm_Q), len(key_norm_K)]
        whole = query_TQ.new_zeros(len(query_TQ), sum(sizes))
        query_rows, key_rows, _ = self.slices
        whole[:, query_rows] = query_TQ
        if self._has_keys_first:  # of the ranks that hold the same, one adds it
            whole[:, sizes[0] :][:, key_rows] = key_TK
        query, key = torch.split(self._group.all_reduce(whole), sizes, dim=-1)
        return rms_norm(query, query_norm_Q, eps)[:, query_rows], rms_norm(key, key_norm_K, eps)[:, key_rows]


class RowParallel(Packable):
    """A projection whose input features are sliced among the ranks; the ranks' outputs are summed.

    Args:
        in_features: size of the whole input; each rank has the slice that its `ColumnParallel` computed.
        name: the checkpoint's name of the projection.
        out_features: size of the output; every rank gets all of it.
        bias: whether it has one; only the first rank holds it, so that it is added once.
        parallel: the rank.
        int8: the checkpoint's weights are int8 with a scale per output feature.
    """

    def __init__(
        self, in_features: int, name: str, out_features: int, bias: bool, parallel: ParallelState, int8: bool = False
    ) -> None:
        columns = shard(in_features, parallel)
        super().__init__(out_features, _length(columns), int8)
        self.name, self.in_features, self.columns, self.group = name, in_features, columns, parallel.tensor_group
        self.has_bias = bias
        own_bias = bias and parallel.tensor_rank == 0
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if own_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, the rank's in] -> [T, out]."""
        out = linear(x, self.packed)
        return out if self.group is None else self.group.all_reduce(out)

    def load_targets(self) -> dict[str, LoadTarget]:
        """By name, relative to the parent of this module."""
        assert self.weight is not None
        weight, out_features = self.weight.data, len(self.weight)
        whole = (out_features, self.in_features)
        targets = {f"{self.name}.weight": LoadTarget(weight, whole, (slice(0, out_features), self.columns))}
        if self.weight_scale is not None:
            targets[f"{self.name}.weight_scale"] = _rows(self.weight_scale.data, out_features, slice(0, out_features))
        if self.has_bias:
            bias = torch.empty(0, dtype=self._dtype) if self.bias is None else self.bias.data
            targets[f"{self.name}.bias"] = LoadTarget(bias, (out_features,), (slice(0, len(bias)),))
        return targets


class Sinks(Weight):
    """A number per query head, of which each rank has those of its heads.

    Args:
        num_heads: of all ranks.
        parallel: the rank.
    """

    def __init__(self, num_heads: int, parallel: ParallelState) -> None:
        self.num_heads, self.heads = num_heads, shard(num_heads, parallel)
        super().__init__(_length(self.heads), dtype=torch.float32)


class VocabParallel(Packable):
    """A vector per token of the vocabulary, which is sliced among the ranks: an embedding, a head, or both.

    Args:
        vocab_size: V.
        hidden_size: E.
        parallel: the rank.
        is_head: whether `logits` is used, here or on the last stage; else it stays the plain table that `embed` reads.
    """

    activation_bits = 16

    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelState, is_head: bool) -> None:
        # The last rank may have fewer tokens, but `gather` needs the same number of logits from all ranks.
        super().__init__(-(-vocab_size // parallel.tensor_parallel_size), hidden_size)
        assert self.weight is not None
        self.vocab_size, self.group, self.is_head = vocab_size, parallel.tensor_group, is_head
        self.rows = shard(vocab_size, parallel)
        self.weight.data[_length(self.rows) :].zero_()

    def pack(self, quantized_dtype: torch.dtype | None) -> None:
        """Pack a head; a table does not benefit. Where no kernel takes activations of 16 bits, the head is not
        quantised: 8 bits cost it more accuracy than they cost the layers."""
        if self.is_head:
            assert self.weight is not None
            has_kernel = quantized_dtype == torch.int8 and not uses_triton(self.weight)
            super().pack(quantized_dtype if has_kernel else None)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, E]."""
        table = self._packed if self.weight is None else self.weight
        assert table is not None
        if self.group is None:
            return embedding(token_ids_T, table)
        foreign = (token_ids_T < self.rows.start) | (token_ids_T >= self.rows.stop)
        rows = (token_ids_T - self.rows.start).masked_fill(foreign, 0)
        out = embedding(rows, table).masked_fill(foreign.unsqueeze(-1), 0)
        return self.group.all_reduce(out)

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V] float32 on the first rank of the stage, None on the others."""
        logits = linear(hidden_SE, self.packed, torch.float32)
        if self.group is None:
            return logits
        gathered = self.group.gather(logits)
        return None if gathered is None else gathered[:, : self.vocab_size].contiguous()

    def load_targets(self) -> dict[str, LoadTarget]:
        """By name, relative to this module."""
        assert self.weight is not None
        return {"weight": _rows(self.weight.data[: _length(self.rows)], self.vocab_size, self.rows)}


def load_targets(model: nn.Module) -> dict[str, LoadTarget]:
    """Where each tensor of a checkpoint goes, by its name without the leading `model.`."""
    targets: dict[str, LoadTarget] = {}
    for path, module in model.named_modules():
        if isinstance(module, Sinks):
            targets[f"{path}.weight"] = _rows(module.weight.data, module.num_heads, module.heads)
        elif isinstance(module, Weight):
            size = len(module.weight)
            target = _rows(module.weight.data, size, slice(0, size))
            targets[f"{path}.weight"] = dataclasses.replace(target, offset=module.offset)
        elif isinstance(module, VocabParallel):
            targets |= _targets_of(module, path)
        elif isinstance(module, ColumnParallel | RowParallel):
            targets |= _targets_of(module, path.rpartition(".")[0])
    return targets


def _targets_of(module: VocabParallel | ColumnParallel | RowParallel, path: str) -> dict[str, LoadTarget]:
    prefix = f"{path}." if path else ""
    return {
        f"{prefix}{name}": dataclasses.replace(target, module=module) for name, target in module.load_targets().items()
    }


def num_parameters(model: nn.Module) -> int:
    """How many parameters a rank has, packed or not."""
    modules = [module for module in model.modules() if isinstance(module, Packable) and module.weight is None]
    packed = [weight for module in modules for weight in module.packed_weights]
    return sum(p.numel() for p in model.parameters()) + sum(p.out_features * p.in_features for p in packed)


def send_activations(parallel: ParallelState, hidden_TE: torch.Tensor, residual_TE: torch.Tensor) -> None:
    """Send a stage's result to the next stage."""
    assert parallel.pipeline_group is not None
    parallel.pipeline_group.send(torch.stack((hidden_TE, residual_TE)), parallel.stage + 1)


def receive_activations(
    parallel: ParallelState, num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Receive hidden states and residual from the previous stage, each [T, E]."""
    assert parallel.pipeline_group is not None
    hidden, residual = parallel.pipeline_group.receive((2, num_tokens, hidden_size), dtype, parallel.stage - 1)
    return hidden, residual
