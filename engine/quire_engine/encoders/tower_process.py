"""Computes hidden states of images, in a process with a tower's weights: `python -m quire_engine.encoders.tower_process`.

A process of its own, so that an image that is encoded delays no step of the engine core, and one that crashes ends no
other request.
"""

import os
import sys
from pathlib import Path

import msgspec
import torch

from quire_engine.encoders.family import ImageFamily, find_family
from quire_engine.errors import CheckpointError, is_failure, one_line
from quire_engine.models.checkpoints import FLOATING, open_checkpoint
from quire_engine.system.limited_process import serve


class Job(msgspec.Struct, array_like=True):
    """An image to encode: its arrays are in the shared memory. Without any: load the weights."""

    seconds: float
    num_bytes: int = 0


class Encoded(msgspec.Struct, array_like=True):
    """What became of it: float32, [n, E], in the shared memory."""

    shape: tuple[int, int] = (0, 0)
    error: str | None = None


def load_tower(folder: Path, family: ImageFamily, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A family's tower with a checkpoint's weights.

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
    found: set[str] = set()
    for name, stored in open_checkpoint(folder).tensors.items():
        own = family.rename(name)
        target = targets.get(own or "")
        if own is None or target is None:
            continue
        if stored.shape != tuple(target.shape) or stored.dtype not in FLOATING:
            raise CheckpointError(
                f"{stored.path}: tensor {name} is {stored.dtype} {list(stored.shape)}; the model asks for floating-point "
                f"numbers of shape {list(target.shape)}"
            )
        module, _, leaf = own.rpartition(".")
        with stored.reader as reader:
            value = reader.read(stored, ()).to(device, target.dtype, copy=True)
        parent = tower.get_submodule(module)
        if leaf in parent._parameters:
            parent._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
        else:
            parent._buffers[leaf] = value
        found.add(own)
    missing = [name for name in targets if name not in found]
    if missing:
        raise CheckpointError(f"{folder}: its files hold no {', '.join(missing[:3])} of the part for images")
    for module_ in tower.modules():
        if callable(pack := getattr(module_, "pack", None)):
            pack()
    return tower.eval()


def main() -> None:
    """Entry point of the process: its first line of input names the checkpoint, dtype, device and shared memory."""
    from safetensors.torch import load

    folder, dtype, device_name, memory = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=tuple[str, str, str, int]
    )
    if device_name.startswith("auto"):
        device_name = device_name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    family = find_family(Path(folder))
    assert family is not None
    tower: torch.nn.Module | None = None

    def run(job: Job) -> Encoded:
        nonlocal tower
        try:
            if tower is None:
                tower = load_tower(Path(folder), family, getattr(torch, dtype), device)
            if not job.num_bytes:
                return Encoded()
            arrays = load(os.pread(memory, job.num_bytes, 0))
            with torch.inference_mode(), device:
                hidden = tower(**{name: value.to(device) for name, value in arrays.items()}).float().cpu().contiguous()
            os.ftruncate(memory, 0)
            os.pwrite(memory, hidden.numpy().tobytes(), 0)
            return Encoded((hidden.shape[0], hidden.shape[1]))
        except BaseException as error:
            if not is_failure(error):
                raise
            return Encoded(error=one_line(error))

    serve(Job, run)


if __name__ == "__main__":
    main()
