"""Layers cut into slices, one per rank of a stage (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

`shard` decides which rank holds what: `size` units are cut into one piece per rank, or into one per unit if there are
fewer units than ranks; then several ranks hold the same piece::

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

The vocabulary is cut too: `VocabParallel`. With one rank each of them is the plain operation.

As soon as a matrix is loaded, `pack` converts it to the form that its linear method (`models/linear/`) computes with,
and frees what it was loaded into, so the model is never in memory twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from quire_kernels import LinearWeight, LoraRows, LoraTable, embedding, linear, rms_norm, weight_rows
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, INDICES
from quire_engine.models.linear import LinearMethod, LoadedLinear, MethodChoice
from quire_engine.models.mapped import mapped_zeros
from quire_engine.models.options import NormOptions


def shard(size: int, parallel: ParallelState, unit: int = 1) -> slice:
    """The part of a dimension that a rank holds. Consecutive elements of a unit stay together, such as the features of
    a head; the unit divides `size`."""
    num_units, ranks = size // unit, parallel.tensor_parallel_size
    pieces = min(num_units, ranks)
    units_each = -(-num_units // pieces)
    first = parallel.tensor_rank * pieces // ranks * units_each * unit
    return slice(min(first, size), min(first + units_each * unit, size))


def stage_layers(num_layers: int, parallel: ParallelState, num_joined: int = 0) -> range:
    """The layers of a rank's stage, by their numbers in the checkpoint; the first stages get the remainder. The last
    stage has at least the last `num_joined` layers."""
    stages = parallel.pipeline_parallel_size
    if num_joined > num_layers // stages:
        if parallel.is_last_stage:
            return range(num_layers - num_joined, num_layers)
        num_layers, stages = num_layers - num_joined, stages - 1
    each, left = divmod(num_layers, stages)
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
    """The whole tensor's."""
    index: tuple[slice, ...]
    """The rank's slice of it, one entry per dimension; empty if another rank holds the tensor."""
    stored: tuple[str, ...] = FLOATING
    """The types that it may have in the checkpoint."""
    offset: float = 0.0
    """Added to what is copied."""
    scale: float = 1.0
    """Multiplies what is copied."""
    module: "Packable | None" = None
    """The module to pack when all its targets are filled."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A rank's slice of a matrix of the checkpoint."""

    name: str
    """In the checkpoint, relative to the parent of the module; empty: the module's own."""
    shape: tuple[int, int]
    """Output and input features of the whole matrix."""
    rows: slice
    columns: slice
    scale: float = 1.0
    """Multiplies the weight and the bias, and what an adapter adds to the weight."""


class StepAdapters:
    """Where all layers of a model find the adapters of the step that is computed, recorded or captured."""

    def __init__(self) -> None:
        self.index_T: torch.Tensor | None = None
        """int64, the slot of each row's adapter, -1 without one; None: no row has any."""
        self.with_tables: set[int] = set()
        """Slots of adapters that have an embedding or a head of their own."""
        self.rows_with_tables: dict[int, torch.Tensor] = {}
        """int64, by slot, which rows of the next `embed` or `compute_logits` have such an adapter. Never set while
        steps are recorded or captured."""


class Weight(nn.Module):
    """A parameter that a `quire_kernels` op reads, such as the scale of a norm. Replicated on every rank. The dtype is
    the default's unless it is given; `offset` is added to what the checkpoint holds."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

    @classmethod
    def of_norm(cls, size: int, norms: NormOptions) -> "Weight":
        if norms.is_layer_norm:
            return LayerNorm(size, norms.bias, norms.offset)
        return cls(size, dtype=torch.float32 if norms.is_float32 else None, offset=norms.offset)


NORM_REACH = 3
"""How many scales of a norm a feature is from its shift, but for few tokens."""


class LayerNorm(Weight):
    """The scale of a LayerNorm, and the shift if there is one, in float32."""

    def __init__(self, size: int, has_bias: bool, offset: float = 0.0) -> None:
        super().__init__(size, dtype=torch.float32, offset=offset)
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False) if has_bias else None

    def column_factors(self) -> torch.Tensor:
        """[E] powers of two, for `pack_linear`: about the inverse root of how much larger a column of its output is
        than the median one (SmoothQuant, with the norm's own numbers in place of samples). Emulated in
        float32 with all-MiniLM-L6-v2, the least cosine of a token in int8 is 0.995 with them and 0.994 without."""
        reach = NORM_REACH * self.weight.abs() + (0 if self.bias is None else self.bias.abs())
        ratio = reach / reach.median().clamp(min=1e-10)
        return ratio.clamp(1, 4096).sqrt().log2().round().neg().exp2()


class Packable(nn.Module):
    """A linear layer. `create` allocates its tensors; once they are loaded, `pack` makes what it computes with of them.

    Args:
        projections: stacked by output feature; of the same input.
        bias: whether each projection has one.
        owns_bias: this rank holds it.
        padding: further output features, whose weights are zero.
    """

    method: LinearMethod
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    gated = False
    activation = "silu"
    activates = False
    activation_bits = 8
    """As in `LoadedLinear`, like the next two."""
    asymmetric = False
    input_norm: tuple[LayerNorm, ...] = ()
    """The norm of its input, if that decides how it is quantised. In a tuple, as it is no module of this one."""
    takes_adapters = True
    """Whether LoRA adapters may change the layer."""
    names: Sequence[str]
    """The projections' names in the checkpoint, without the leading `model.`; from `create_parameters`."""

    def __init__(
        self, projections: Sequence[Projection], bias: bool = False, owns_bias: bool = True, padding: int = 0
    ) -> None:
        super().__init__()
        self.projections, self.has_bias, self.owns_bias, self.padding = projections, bias, owns_bias, padding
        self.sizes = [_length(projection.rows) for projection in projections]
        """Output features of each projection that this rank has."""
        self.parts: list[Packable] = []
        """The projections one by one, if they have methods of their own; until they are packed."""
        self._packed: Any = None
        self.lora_table: LoraTable | None = None
        """The adapters that are in use, with those of `projections`; None if there can be none."""
        self._step_adapters = StepAdapters()

    def enable_adapters(self, step: StepAdapters, max_loras: int, max_rank: int, like: torch.Tensor) -> None:
        """Make the table, for adapters of at most this rank in so many slots. `like` is any tensor on the device, of
        the dtype of activations."""
        self._step_adapters = step
        self.lora_table = LoraTable(
            self.sizes, _length(self.projections[0].columns), like.dtype, max_loras=max_loras, max_rank=max_rank,
            device=like.device,
        )  # fmt: skip

    def adapter_slice(self, number: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank computes with of the matrices A and B of a whole projection, by its number. A layer whose
        input features are sliced multiplies its part of A; B of the ranks' sum is the sum of B of each part."""
        one = self.projections[number]
        b_NR = b_NR[one.rows]
        return a_RK[:, one.columns], b_NR if one.scale == 1 else b_NR * one.scale

    def weight_band(self, number: int, rows: slice) -> torch.Tensor:
        """[rows, K] float32: some rows of a projection of this rank, by its number, as the layer computes with them, in
        the order of `adapter_slice`. Of unquantised weights, int8 and int4."""
        first = sum(self.sizes[:number])
        ids = torch.arange(first + rows.start, first + rows.stop, device="cpu")
        band = embedding(weight_rows(self.packed, ids), self.packed).float()
        return band if self.packed.column_factors is None else band * self.packed.column_factors

    def create(self, method: LinearMethod | None = None) -> None:
        """Allocate the tensors that a method asks for; None: those of an unquantised weight."""
        self.method, self._dtype = method or LinearMethod(), torch.get_default_dtype()
        for kind, form in self.method.tensors.items():
            indices = [form.index(one.shape, one.rows, one.columns) for one in self.projections]
            num_rows = sum(_length(rows) for rows, _ in indices)
            shape = (num_rows + self.padding, _length(indices[0][1]))
            tensor = mapped_zeros(shape, form.dtype or self._dtype, huge_pages=True)  # freed by `pack`
            tensor[num_rows:].zero_()
            setattr(self, kind, nn.Parameter(tensor, requires_grad=False))
        self.bias = None
        if self.has_bias and self.owns_bias:
            self.bias = nn.Parameter(torch.zeros(sum(self.sizes) + self.padding), requires_grad=False)

    def create_parts(self, methods: Sequence[LinearMethod]) -> None:
        """Allocate the tensors of each projection, as its own method asks for."""
        self.method, self._dtype = next(one for one in methods if one.is_joinable), torch.get_default_dtype()
        self.weight = self.bias = None
        self.parts = [Packable([one], self.has_bias, self.owns_bias) for one in self.projections]
        for part, method in zip(self.parts, methods, strict=True):
            part.activation_bits = self.activation_bits
            part.create(method)

    @property
    def packed(self) -> LinearWeight:
        """The packed weight, of a method that makes one of these."""
        assert self._packed is not None, "pack was not called"
        packed: LinearWeight = self._packed
        return packed

    @property
    def packed_weight(self) -> Any:
        """What `packed_of` has returned; None before, and of a table that is not packed."""
        return self._packed

    @property
    def packs_late(self) -> bool:
        """Whether it is packed once all tensors are loaded, its `input_norm` among them."""
        return bool(self.input_norm) and self.method.requantizes

    @property
    def num_parameters(self) -> int:
        """Weights of this rank, as many as the model has before it is quantised."""
        return sum(_length(one.rows) * _length(one.columns) for one in self.projections)

    def packed_bytes(self, like: torch.Tensor) -> int:
        """About how many bytes the packed layer takes. To be called before `pack`.

        Args:
            like: any tensor on the device, of the model's dtype.
        """
        if self.parts:
            return sum(part.packed_bytes(like) for part in self.parts)
        bits = self.method.packed_bits(self.activation_bits, like)
        own = sum(one.nbytes for one in self.parameters(recurse=False))
        return own if bits is None else int(self.num_parameters * bits / 8)

    def pack(self) -> None:
        """Pack the tensors, and free them."""
        if self.parts:
            parts = [(part.method, part.loaded()) for part in self.parts]
            biases = [loaded.bias for _, loaded in parts if loaded.bias is not None]
            whole = replace(self.loaded(), bias=torch.cat(biases) if biases else None)
            self.use_packed(self.method.pack_joined(parts, whole))
        else:
            self.use_packed(self.packed_of(self.loaded()))

    def use_packed(self, packed: Any) -> None:
        """Compute with what `packed_of` has returned, here or in an earlier process, and free the tensors."""
        self._packed, self.parts = packed, []
        for kind in ("weight", "bias", *self.method.tensors):
            setattr(self, kind, None)

    def loaded(self) -> LoadedLinear:
        return LoadedLinear(
            tensors={} if self.parts else {kind: getattr(self, kind).data for kind in self.method.tensors},
            sizes=self.sizes, bias=None if self.bias is None else self.bias.data, dtype=self._dtype,
            activation_bits=self.activation_bits, gated=self.gated, activation=self.activation,
            activates=self.activates, asymmetric=self.asymmetric, first_column=self.projections[0].columns.start,
            column_factors=self.input_norm[0].column_factors() if self.packs_late else None,
        )  # fmt: skip

    def packed_of(self, loaded: LoadedLinear) -> Any:
        """What the layer computes with."""
        return self.method.pack(loaded)

    def apply_linear(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, K] -> [T, N], or half of it if gated; this rank's part."""
        lora, index_T = self.lora_table, self._step_adapters.index_T
        if lora is None or index_T is None:
            return self.method.apply(x, self._packed, out_dtype)
        return self.method.apply(x, self._packed, out_dtype, lora=LoraRows(lora, index_T))

    def load_targets(self) -> dict[str, LoadTarget]:
        """By name, relative to the parent of this module."""
        if self.parts:
            own = (target for part in self.parts for target in part.load_targets().items())
            return {name: replace(target, module=self) for name, target in own}
        targets = {}
        scaled = "weight_scale" if "weight_scale" in self.method.tensors else "weight"
        for kind, form in self.method.tensors.items():
            first, tensor = 0, getattr(self, kind).data
            for one in self.projections:
                index = form.index(one.shape, one.rows, one.columns)
                whole = form.index(one.shape, *map(slice, (0, 0), one.shape))
                end = first + _length(index[0])
                targets[_join(one.name, kind)] = LoadTarget(
                    tensor[first:end], (whole[0].stop, whole[1].stop), index, form.stored,
                    scale=one.scale if kind == scaled else 1.0, module=self,
                )  # fmt: skip
                first = end
        if self.has_bias:
            bias = torch.empty(0, dtype=self._dtype) if self.bias is None else self.bias.data
            pieces = torch.split(bias[: sum(self.sizes)], self.sizes if self.owns_bias else [0] * len(self.sizes))
            for one, piece in zip(self.projections, pieces, strict=True):
                rows = one.rows if self.owns_bias else slice(0, 0)
                targets[_join(one.name, "bias")] = LoadTarget(
                    piece, one.shape[:1], (rows,), scale=one.scale, module=self
                )
        return targets


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


class ColumnParallel(Packable):
    """One or several projections of the same input, stacked by output feature into one matrix multiplication.

    Each rank has a slice of each projection's output features.

    Args:
        in_features: size of the input, of which every rank has all.
        parts: the checkpoint's name of each projection, and its output size, in the order in which they are stacked.
        bias: whether each projection has one.
        parallel: the rank.
        unit: output features that stay together; of each part by name, where it is not 1 for all.
        gated: there are two parts, gate and up, and the output is `activation(gate) * up`.
        activation: of the gate, or of the output.
        activates: the output is `activation(output)`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool,
        parallel: ParallelState,
        unit: int | Mapping[str, int] = 1,
        gated: bool = False,
        activation: str = "silu",
        activates: bool = False,
    ) -> None:
        columns, units = slice(0, in_features), dict.fromkeys(parts, unit) if isinstance(unit, int) else unit
        slices = [
            (name, (size, in_features), shard(size, parallel, units.get(name, 1)), columns)
            for name, size in parts.items()
        ]
        super().__init__([Projection(*one) for one in slices], bias)
        self.gated, self.activation, self.activates = gated, activation, activates
        self.order: torch.Tensor | None = None
        """int64, which of this rank's output features of the checkpoint comes at each place, each within its own
        projection; set before `pack`. None: all stay."""

    def pack(self) -> None:
        first = 0
        for part in self.parts or [self]:
            size = sum(part.sizes)
            for parameter in part.parameters():
                if self.order is not None and len(parameter) == size:  # else it is one for each projection
                    own = self.order[first : first + size] - first
                    parameter.data = parameter.data[own.to(parameter.device)]
            first += size
        super().pack()

    def adapter_slice(self, number: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a_RK, b_NR = super().adapter_slice(number, a_RK, b_NR)
        if self.order is None:
            return a_RK, b_NR
        first = sum(self.sizes[:number])
        own = self.order[first : first + self.sizes[number]] - first
        return a_RK, b_NR[own.to(b_NR.device)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, sum of sizes], or half of it if gated."""
        return self.apply_linear(x)


class QKVParallel(ColumnParallel):
    """Queries, keys and values of this rank's heads; with fewer KV heads than ranks, several ranks hold the same. There
    may be no projection of values, or none of keys and values. With a `fused_name` (`AttentionOptions`) each rank holds
    whole groups of heads. With gates (`AttentionOptions.output_gate`), they follow the queries of all heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool,
        parallel: ParallelState,
        kv_names: Sequence[str] = ("k_proj", "v_proj"),
        fused_name: str | None = None,
        has_gates: bool = False,
    ) -> None:
        q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
        if fused_name is None:
            parts = {"q_proj": q_size * (1 + has_gates), **dict.fromkeys(kv_names, kv_size)}
            units = {"q_proj": head_size * (1 + has_gates), **dict.fromkeys(kv_names, head_size)}
            super().__init__(hidden_size, parts, bias, parallel, unit=units)
            self.num_heads = self.sizes[0] // units["q_proj"]
            self.num_kv_heads = _length(shard(kv_size, parallel, head_size)) // head_size
            if has_gates:
                order = torch.arange(sum(self.sizes), device="cpu")
                queries, others = order[: self.sizes[0]], order[self.sizes[0] :]
                self.order = torch.cat((queries.view(-1, 2, head_size).transpose(0, 1).flatten(), others))
        else:
            size, queries_each = q_size + 2 * kv_size, num_heads // num_kv_heads
            super().__init__(hidden_size, {fused_name: size}, bias, parallel, unit=size // num_kv_heads)
            self.num_kv_heads = self.sizes[0] // (size // num_kv_heads)
            self.num_heads = self.num_kv_heads * queries_each
            places = torch.arange(self.sizes[0], device="cpu").view(self.num_kv_heads, queries_each + 2, head_size)
            parts_of_groups = torch.split(places, [queries_each, 1, 1], dim=1)
            self.order = torch.cat([part.flatten() for part in parts_of_groups])
        self.heads = [self.num_heads * (1 + has_gates), *[self.num_kv_heads] * len(kv_names)]
        """Heads of queries and gates, keys and values."""
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
        """RMSNorm over all heads of a token together, of queries and of keys; the norms' weights are of all heads.
        Takes and returns queries and keys of the rank's heads."""
        if self._group is None:
            return rms_norm(query_TQ, query_norm_Q, eps), rms_norm(key_TK, key_norm_K, eps)
        sizes = [len(query_norm_Q), len(key_norm_K)]
        whole = query_TQ.new_zeros(len(query_TQ), sum(sizes))
        query_rows, key_rows, _ = (projection.rows for projection in self.projections)
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
        out_features: size of the output; every rank has all of it.
        bias: whether it has one; only the first rank holds it, so that it is added once.
        parallel: the rank.
    """

    def __init__(self, in_features: int, name: str, out_features: int, bias: bool, parallel: ParallelState) -> None:
        whole, columns = (out_features, in_features), shard(in_features, parallel)
        super().__init__([Projection(name, whole, slice(0, out_features), columns)], bias, parallel.tensor_rank == 0)
        self.group = parallel.tensor_group

    def forward(self, x: torch.Tensor, sums_ranks: bool = True) -> torch.Tensor:
        """[T, the rank's in] -> [T, out]; this rank's part unless `sums_ranks`."""
        out = self.apply_linear(x)
        return out if self.group is None or not sums_ranks else self.group.all_reduce(out)


class SlicedWeight(Weight):
    """float32 numbers of heads or channels, of which each rank has those of its own; or of several parts, one below the
    other.

    Args:
        parts: the checkpoint's name of each, relative to the parent of the module, and how many rows it has; the name
            is empty if it is the module's own.
        parallel: the rank.
        rest: the other dimensions.
        unit: as of `ColumnParallel`.
        kind: the last part of the names in the checkpoint.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        parallel: ParallelState,
        *rest: int,
        unit: Mapping[str, int] | None = None,
        kind: str = "weight",
    ) -> None:
        self.parts = {name: (size, shard(size, parallel, (unit or {}).get(name, 1))) for name, size in parts.items()}
        self.kind = kind
        super().__init__(sum(_length(rows) for _, rows in self.parts.values()), *rest, dtype=torch.float32)

    def load_targets(self, path: str) -> dict[str, LoadTarget]:
        """By name, of the module at a path."""
        sizes, rest = [_length(rows) for _, rows in self.parts.values()], self.weight.shape[1:]
        others, pieces = tuple(slice(0, n) for n in rest), torch.split(self.weight.data, sizes)
        return {
            _join(path.rpartition(".")[0] if name else path, name, self.kind): LoadTarget(
                piece, (size, *rest), (rows, *others)
            )
            for (name, (size, rows)), piece in zip(self.parts.items(), pieces, strict=True)
        }


@dataclass(frozen=True, slots=True)
class OwnTable:
    """A table that an adapter has in place of the model's."""

    weight: Any
    """This rank's tokens, [V, E], zeros for those that it does not have; of a head, packed."""
    num_tokens: int
    """How many tokens of the whole vocabulary it has."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """LoRA of a table."""

    a: Any
    """Of an embedding, this rank's tokens, [V, R]; of a head, packed."""
    b: LinearWeight
    """Of a head, this rank's tokens."""


class VocabParallel(Packable):
    """A vector per token of the vocabulary, which is sliced among the ranks: an embedding, a head, or both. If `logits`
    is used neither here nor on the last stage, it stays the plain table that `embed` reads. A stage may have only some
    columns."""

    activation_bits = 16
    takes_adapters = False
    """Not as other layers do: see `own_embeddings` and `own_heads`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: ParallelState,
        is_head: bool,
        bias: bool = False,
        columns: slice | None = None,
    ) -> None:
        # The last rank may have fewer tokens, but `gather` needs the same number of logits from all ranks.
        rows = shard(vocab_size, parallel)
        padding = -(-vocab_size // parallel.tensor_parallel_size) - _length(rows)
        projection = Projection("", (vocab_size, hidden_size), rows, columns or slice(0, hidden_size))
        super().__init__([projection], bias, padding=padding)
        self.rows = rows
        self.vocab_size, self.group, self.is_head = vocab_size, parallel.tensor_group, is_head
        self.own_embeddings: dict[int, OwnTable | TableChange] = {}
        """By slot, what an adapter has in place of the embedding, or adds to it."""
        self.own_heads: dict[int, OwnTable | TableChange] = {}
        """The same of the head, which may be this table, too."""

    @property
    def _is_packed(self) -> bool:
        """A head is packed, and what is quantised; another table does not benefit."""
        return self.is_head or any(form.dtype is not None for form in self.method.tensors.values())

    def packed_bytes(self, like: torch.Tensor) -> int:
        return super().packed_bytes(like) if self._is_packed else sum(one.nbytes for one in self.parameters())

    def pack(self) -> None:
        if self._is_packed:
            super().pack()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, E]."""
        table = self._packed if self.weight is None else self.weight
        assert table is not None
        if self.group is None:
            return self._embed(token_ids_T, table)
        foreign = (token_ids_T < self.rows.start) | (token_ids_T >= self.rows.stop)
        rows = (token_ids_T - self.rows.start).masked_fill(foreign, 0)
        out = self._embed(rows, table).masked_fill(foreign.unsqueeze(-1), 0)
        return self.group.all_reduce(out)

    def _embed(self, rows_T: torch.Tensor, table: Any) -> torch.Tensor:
        out_TE = embedding(rows_T, table)
        for slot, rows in self._step_adapters.rows_with_tables.items():
            own = self.own_embeddings.get(slot)
            if isinstance(own, OwnTable):
                out_TE[rows] = embedding(rows_T[rows], own.weight)
            elif own is not None:
                change = linear(embedding(rows_T[rows], own.a), own.b, torch.float32)
                out_TE[rows] = (out_TE[rows] + change).to(out_TE.dtype)
        return out_TE

    def enable_tables(self, step: StepAdapters) -> None:
        """Take what adapters change of this table, or have in its place."""
        self._step_adapters = step
        self.own_embeddings.clear()
        self.own_heads.clear()

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, E] -> [S, V] float32 on the first rank of the stage, None on the others."""
        logits = self.apply_linear(hidden_SE, torch.float32)
        for slot, rows in self._step_adapters.rows_with_tables.items():
            own = self.own_heads.get(slot)
            if isinstance(own, OwnTable):
                logits[rows] = linear(hidden_SE[rows], own.weight, torch.float32)
            elif own is not None:
                logits[rows] += linear(linear(hidden_SE[rows], own.a), own.b, torch.float32)
        if self.group is None:
            return logits
        gathered = self.group.gather(logits)
        return None if gathered is None else gathered[:, : self.vocab_size].contiguous()


def load_targets(model: nn.Module) -> dict[str, LoadTarget]:
    """Where each tensor of a checkpoint goes, by its name without the leading `model.`."""
    targets: dict[str, LoadTarget] = {}
    for path, module in model.named_modules():
        if isinstance(module, SlicedWeight):
            targets |= module.load_targets(path)
        elif isinstance(module, Weight):
            size, rest = len(module.weight), module.weight.shape[1:]
            rows, whole = slice(0, size), tuple(slice(0, n) for n in rest)
            stored = INDICES if module.weight.dtype == torch.int64 else FLOATING
            targets[f"{path}.weight"] = LoadTarget(
                module.weight.data, (size, *rest), (rows, *whole), stored, module.offset
            )
            if isinstance(module, LayerNorm) and module.bias is not None:
                targets[f"{path}.bias"] = LoadTarget(module.bias.data, (size,), (rows,))
        elif isinstance(module, Packable):
            targets |= {_join(_parent(path, module), name): one for name, one in module.load_targets().items()}
    return targets


def create_parameters(model: nn.Module, choose: MethodChoice) -> None:
    """Give each linear layer its method, and allocate its tensors. Raises CheckpointError if projections that are
    computed as one are quantised in different ways."""
    for path, module in model.named_modules():
        if isinstance(module, Packable):
            module.names = [_join(_parent(path, module), one.name) for one in module.projections]
            methods = [choose(name, module.activation_bits) for name in module.names]
            if all(type(one) is type(methods[0]) and one.tensors == methods[0].tensors for one in methods):
                module.create(methods[0])
            elif any(one.is_joinable for one in methods):
                module.create_parts(methods)
            else:
                raise CheckpointError(
                    f"{', '.join(module.names)} are quantised in different ways; they are computed as one"
                )


def scale_projections(model: nn.Module, scaled: Mapping[str, float]) -> None:
    """Let projections be multiplied when they are loaded, by the endings of their names in the model."""
    for path, module in model.named_modules() if scaled else ():
        if isinstance(module, Packable):
            module.projections = [
                replace(
                    one,
                    scale=math.prod(
                        scale
                        for ending, scale in scaled.items()
                        if _join(_parent(path, module), one.name).endswith(ending)
                    ),
                )
                for one in module.projections
            ]


def _parent(path: str, module: Packable) -> str:
    """What the names of a module's projections are relative to."""
    return path if module.projections[0].name == "" else path.rpartition(".")[0]


def num_parameters(model: nn.Module) -> int:
    """The number of parameters that a rank has, packed or not."""
    weights = [one.numel() for module in model.modules() if isinstance(module, Weight) for one in module.parameters()]
    return sum(weights) + sum(module.num_parameters for module in model.modules() if isinstance(module, Packable))


def packed_bytes(model: nn.Module, like: torch.Tensor) -> int:
    """About how many bytes the weights of a rank take once they are packed, as of `Packable.packed_bytes`."""
    weights = [one.nbytes for module in model.modules() if isinstance(module, Weight) for one in module.parameters()]
    return sum(weights) + sum(one.packed_bytes(like) for one in model.modules() if isinstance(one, Packable))


def send_activations(parallel: ParallelState, *activations_TE: torch.Tensor) -> None:
    assert parallel.pipeline_group is not None
    parallel.pipeline_group.send(torch.stack(activations_TE), parallel.stage + 1)


def receive_activations(
    parallel: ParallelState, number: int, num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Receive so many activations from the previous stage, each [T, E]."""
    assert parallel.pipeline_group is not None
    return parallel.pipeline_group.receive((number, num_tokens, hidden_size), dtype, parallel.stage - 1).unbind()
