"""Tensors of a checkpoint that are several of the model's: projections that are fused, and experts that are stacked.

All experts of a layer are one tensor in gpt-oss, and may be one in other families (`ExpertsOptions.stack`). In mxfp4,
blocks and scales stand for it, whose matrices are not transposed::

    `interleaved`: rows gate, up, gate, up, …; matrices are transposed
        gate_up_proj        [X, E, 2 · I]       gate_up_proj_bias   [X, 2 · I]
        down_proj           [X, I, E]           down_proj_bias      [X, E]
        gate_up_proj_blocks [X, 2 · I, E / 32, 16]
        gate_up_proj_scales [X, 2 · I, E / 32]
    `halves`: the gate's rows before those of up
        gate_up_proj        [X, 2 · I, E]
        down_proj           [X, E, I]
    `transposed_halves`, or these
        gate_up_proj        [X, E, 2 · I]
        down_proj           [X, I, E]

Does not use torch.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.base import StoredTensor
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.checkpoints.weight_format import MXFP4_BLOCK
from quire_engine.models.options import ExpertsOptions

PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""By stack, its projections, whose rows alternate, or follow one another."""


def part_names(name: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The names of a tensor's parts, if it is fused of several; see `with_parts`."""
    module, projection, kind = ("", "", *name.rsplit(".", 2))[-3:]
    return [f"{module}.{part}.{kind}" for part in fused.get(projection, ())]


def with_parts(
    tensors: Mapping[str, StoredTensor], fused: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Replace fused tensors by their parts. Raises CheckpointError if a fused tensor has another number of rows than
    its parts.

    Args:
        tensors: by name.
        fused: by the name of a projection in the checkpoint, its parts in their order.
        shapes: of the model's tensors, by name.
    """
    for name, tensor in tensors.items():
        parts = part_names(name, fused)
        if not parts or any(part not in shapes for part in parts):
            yield name, tensor
            continue
        sizes = [shapes[part][0] for part in parts]
        if set(sizes) == {1} and tensor.shape[:1] == (1,):  # one row for all: the scale of a whole weight
            yield from ((part, tensor) for part in parts)
            continue
        if tensor.shape[:1] != (sum(sizes),):
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; config.json asks for {sum(sizes)} rows"
            )
        for part, size, end in zip(parts, sizes, itertools.accumulate(sizes), strict=True):
            yield part, dataclasses.replace(
                tensor, shape=(size, *tensor.shape[1:]), num_bytes=tensor.num_bytes * size // sum(sizes),
                first_row=tensor.first_row + end - size,
            )  # fmt: skip


def with_experts(
    tensors: Mapping[str, StoredTensor], config: CheckpointConfig, experts: ExpertsOptions
) -> Iterator[tuple[str, StoredTensor]]:
    """Replace stacks of experts by the tensors of single experts. Raises CheckpointError if a stack has another shape
    than `config.json` asks for, or has no scales."""
    is_mxfp4 = config.weight_format.method == "mxfp4"
    is_transposed, is_interleaved = experts.stack != "halves", experts.stack == "interleaved"
    for name, tensor in tensors.items():
        layer, _, stack = name.partition(".experts.")
        projection, _, kind = stack.partition("_proj")
        if projection not in PARTS or kind not in (("_blocks", "_scales", "_bias") if is_mxfp4 else ("", "_bias")):
            yield name, tensor
            continue
        parts, (rows, columns) = PARTS[projection], (config.hidden_size, experts.expert.intermediate_size)
        if projection == "gate_up":
            rows, columns = 2 * columns, rows
        whole, each = (experts.num_experts, rows, columns), rows // len(parts)
        whole_shape, ending, shape = {
            "": ((experts.num_experts, columns, rows) if is_transposed else whole, "weight", (each, columns)),
            "_bias": (whole[:2], "bias", (each,)),
            "_blocks": ((*whole[:2], columns // MXFP4_BLOCK, MXFP4_BLOCK // 2), "weight", (each, columns // 2)),
            "_scales": ((*whole[:2], columns // MXFP4_BLOCK), "weight_scale", (each, columns // MXFP4_BLOCK)),
        }[kind]
        # Some files have the matrices as the model computes with them, though the family's first ones do not.
        if kind == "" and not is_interleaved and tensor.shape == whole:
            own_transposed, whole_shape = is_transposed and whole == whole_shape, whole
        else:
            own_transposed = kind == "" and is_transposed
        _check_stack(tensor, whole_shape)
        if kind == "_blocks" and f"{name.removesuffix(kind)}_scales" not in tensors:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has no scales beside it, as mxfp4 has them")
        if is_mxfp4 and kind != "_bias" and tensor.dtype != "U8":
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; mxfp4 asks for U8")
        piece = dataclasses.replace(
            tensor, shape=shape, num_bytes=tensor.num_bytes // experts.num_experts // len(parts),
            row_step=len(parts) if is_interleaved else 1, is_transposed=own_transposed,
        )  # fmt: skip
        for number in range(experts.num_experts):
            for first, part in enumerate(parts):
                own = dataclasses.replace(piece, first_row=first if is_interleaved else first * each, matrix=number)
                yield f"{layer}.experts.{number}.{part}.{ending}", own


def _check_stack(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Reject another shape, and one that the file is too short for: no more parts are listed than it has bytes."""
    if tensor.shape != shape or tensor.num_bytes < math.prod(shape):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; config.json asks for {shape}"
        )
