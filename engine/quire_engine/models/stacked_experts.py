"""Checkpoints in which all experts of a layer are one tensor, as gpt-oss has them::

    gate_up_proj        [X, E, 2 · I]     of each expert the transposed matrix; columns gate, up, gate, up, …
    gate_up_proj_bias   [X, 2 · I]
    down_proj           [X, I, E]         transposed
    down_proj_bias      [X, E]

Each becomes the tensors of the single experts, which are parts of it. Does not use torch.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.models.experts_options import ExpertsOptions
from quire_engine.models.files import StoredTensor

__all__ = ["with_experts"]

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def with_experts(
    tensors: Mapping[str, StoredTensor], config: CheckpointConfig, experts: ExpertsOptions
) -> Iterator[tuple[str, StoredTensor]]:
    """Tensors by name, with those of the single experts in the place of stacks.

    Args:
        tensors: by name.
        config: of the checkpoint.
        experts: its experts.

    Raises:
        CheckpointError: a stack has another shape than `config.json` asks for.
    """
    hidden, size = config.hidden_size, experts.intermediate_size
    shapes = {
        "gate_up_proj": (hidden, 2 * size),
        "gate_up_proj_bias": (2 * size,),
        "down_proj": (size, hidden),
        "down_proj_bias": (hidden,),
    }
    for name, tensor in tensors.items():
        layer, _, stack = name.partition(".mlp.experts.")
        if stack not in shapes:
            yield name, tensor
            continue
        _check_stack(tensor, (experts.num_experts, *shapes[stack]))
        parts = PARTS[stack.removesuffix("_bias")]
        is_weight, width = not stack.endswith("_bias"), tensor.shape[-1] // len(parts)
        shape = (width, tensor.shape[1]) if is_weight else (width,)
        for number in range(experts.num_experts):
            for first, part in enumerate(parts):
                piece = dataclasses.replace(
                    tensor, shape=shape, num_bytes=tensor.num_bytes // experts.num_experts // len(parts),
                    first_row=first, row_step=len(parts), matrix=number, is_transposed=is_weight,
                )  # fmt: skip
                yield f"{layer}.mlp.experts.{number}.{part}.{'weight' if is_weight else 'bias'}", piece


def _check_stack(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse another shape, and one that the file is too short for: no more parts are listed than it has bytes."""
    if tensor.shape != shape or tensor.num_bytes < math.prod(shape):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {tensor.shape}; config.json asks for {shape}"
        )
