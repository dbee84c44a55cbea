"""Loads a tower's weights."""

from pathlib import Path

import torch

from quire_engine.encoders.families.base import ImageFamily
from quire_engine.encoders.towers.layers import Linear
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import FLOATING, open_checkpoint
from quire_engine.models.checkpoints.weight_format import WeightFormat
from quire_engine.models.linear import linear_methods


def load_tower(
    folder: Path, family: ImageFamily, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> torch.nn.Module:
    """A family's tower with a checkpoint's weights.

    Args:
        folder: the checkpoint.
        family: its own.
        dtype: of all that is not quantised.
        device: of the weights.
        quantization: the setting. Linear layers of ours have 8 bits with `int4`, too: the tower computes many rows at a
            time, which weights of 4 bits make no faster.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            tower = family.tower()
    finally:
        torch.set_default_dtype(before)
    targets = tower.state_dict(keep_vars=True)
    parts = _parts(tower)
    wanted = {*targets} - {name for name, _ in parts.values()} | {*parts}
    found: set[str] = set()
    for name, stored in open_checkpoint(folder).tensors.items():
        own = family.rename(name)
        if own is None or own not in wanted:
            continue
        whole, rows = parts.get(own, (own, None))
        target = targets[whole] if rows is None else targets[whole][rows]
        if stored.shape != tuple(target.shape) or stored.dtype not in FLOATING:
            raise CheckpointError(
                f"{stored.path}: tensor {name} is {stored.dtype} {list(stored.shape)}; the model asks for "
                f"floating-point numbers of shape {list(target.shape)}"
            )
        module, _, leaf = whole.rpartition(".")
        with stored.reader as reader:
            value = reader.read(stored, ()).to(device, target.dtype, copy=True)
        parent = tower.get_submodule(module)
        if rows is not None:
            stacked = parent._parameters[leaf]
            assert stacked is not None
            if stacked.is_meta:
                stacked = torch.nn.Parameter(torch.empty_like(targets[whole], device=device), requires_grad=False)
                parent._parameters[leaf] = stacked
            stacked.data[rows] = value
        elif leaf in parent._parameters:
            parent._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        else:
            parent._buffers[leaf] = value
        found.add(own)
    missing = sorted(wanted - found)
    if missing:
        raise CheckpointError(f"{folder}: its files hold no {', '.join(missing[:3])} of the part for images")
    method = linear_methods(WeightFormat(), "int8" if quantization == "int4" else quantization)("", 8)
    for module_ in tower.modules():
        if isinstance(module_, Linear):
            module_.pack(method)
        elif callable(pack := getattr(module_, "pack", None)):
            pack()
    return tower.to(device).eval()


def _parts(tower: torch.nn.Module) -> dict[str, tuple[str, slice]]:
    """Name of a tensor of the checkpoint that is part of another → the name of that one, and its rows."""
    found = {}
    for path, module in tower.named_modules():
        if not isinstance(module, Linear) or not module.merges:
            continue
        size = len(module.weight) // len(module.merges)
        for leaf in ("weight",) if module.bias is None else ("weight", "bias"):
            for number, part in enumerate(module.merges):
                own = f"{path.rpartition('.')[0]}.{part}.{leaf}"
                found[own] = (f"{path}.{leaf}", slice(number * size, (number + 1) * size))
    return found
