"""Checkpoints in which all experts of a layer are one tensor, as gpt-oss has them::

    gate_up_proj        [X, E, 2 · I]     of each expert the transposed matrix; columns gate, up, gate, up, …
    gate_up_proj_bias   [X, 2 · I]
    down_proj           [X, I, E]         transposed
    down_proj_bias      [X, E]

In mxfp4 (OCP Microscaling Formats 1.0, section 5.2) these two stand for a weight; rows are not transposed::

    gate_up_proj_blocks [X, 2 · I, E / 32, 16]   bytes of two numbers with four bits, the lower ones first
    gate_up_proj_scales [X, 2 · I, E / 32]       exponents of 2, from -127 on

Each becomes the tensors of the single experts, which are parts of it. Does not use torch.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.experts_options import ExpertsOptions
from quire_engine.models.files import StoredTensor
from quire_engine.models.weight_format import MXFP4_BLOCK

__all__ = ["with_experts"]

PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Of each projection, whose rows take turns."""


def with_experts(
    files: Mapping[Path, Mapping[str, StoredTensor]], config: CheckpointConfig, experts: ExpertsOptions
) -> dict[Path, dict[str, StoredTensor]]:
    """The tensors of each file by name, with those of the single experts in the place of stacks.

    Args:
        files: their tensors, by name.
        config: of the checkpoint.
        experts: its experts.

    Raises:
        CheckpointError: a stack has another shape than `config.json` asks for, or has no scales.
    """
    everything = {name: tensor for file in files.values() for name, tensor in file.items()}
    return {path: dict(_split(file, everything, config, experts)) for path, file in files.items()}


def _split(
    tensors: Mapping[str, StoredTensor],
    everything: Mapping[str, StoredTensor],
    config: CheckpointConfig,
    experts: ExpertsOptions,
) -> Iterator[tuple[str, StoredTensor]]:
    """See `with_experts`; for one file, and with the tensors of all files, as scales may be in another."""
    is_mxfp4 = config.weight_format.method == "mxfp4"
    for name, tensor in tensors.items():
        layer, _, stack = name.partition(".mlp.experts.")
        projection, _, kind = stack.partition("_proj")
        if projection not in PARTS or kind not in (("_blocks", "_scales", "_bias") if is_mxfp4 else ("", "_bias")):
            yield name, tensor
            continue
        if kind == "_scales":  # go with their blocks
            continue
        parts, (rows, columns) = PARTS[projection], (config.hidden_size, experts.intermediate_size)
        if projection == "gate_up":
            rows, columns = 2 * columns, rows
        whole, scales = (experts.num_experts, rows, columns), None
        if kind == "_blocks":
            scales = _scales(tensor, everything.get(f"{name.removesuffix(kind)}_scales"), whole)
        else:
            _check_stack(tensor, whole[:2] if kind == "_bias" else (experts.num_experts, columns, rows))
        shape = (rows // len(parts),) if kind == "_bias" else (rows // len(parts), columns)
        piece = dataclasses.replace(
            tensor, shape=shape, num_bytes=tensor.num_bytes // experts.num_experts // len(parts),
            row_step=len(parts), is_transposed=kind == "", scales=scales,
        )  # fmt: skip
        ending = "bias" if kind == "_bias" else "weight"
        for number in range(experts.num_experts):
            for first, part in enumerate(parts):
                own = dataclasses.replace(piece, first_row=first, matrix=number)
                yield f"{layer}.mlp.experts.{number}.{part}.{ending}", own


def _scales(blocks: StoredTensor, scales: StoredTensor | None, whole: tuple[int, int, int]) -> StoredTensor:
    """The scales of a stack in mxfp4.

    Raises:
        CheckpointError: there are none, or one of the two has another shape or type than it must.
    """
    if scales is None:
        raise CheckpointError(f"{blocks.path}: tensor {blocks.name} has no scales beside it, as mxfp4 has them")
    experts, rows, columns = whole
    _check_stack(blocks, (experts, rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2))
    _check_stack(scales, (experts, rows, columns // MXFP4_BLOCK))
    for tensor in (blocks, scales):
        if tensor.dtype != "U8":
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; mxfp4 asks for U8")
    return scales


def _check_stack(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse another shape, and one that the file is too short for: no more parts are listed than it has bytes."""
    if tensor.shape != shape or tensor.num_bytes < math.prod(shape):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; config.json asks for {shape}"
        )
