"""Computes hidden states of images, with a tower's weights: `python -m quire_engine.encoders.tower_process`.

A process of its own, so that an image that is encoded delays no step of the engine core, and one that crashes ends no
other request.
"""

import os
import sys
from pathlib import Path

import msgspec

from quire_engine.encoders.families.base import NoImagesError
from quire_engine.encoders.family import find_family
from quire_engine.errors import is_failure, one_line
from quire_engine.system.limited_process import serve
from quire_engine.system.process_state import lower_priority


class Job(msgspec.Struct, array_like=True):
    """An image to encode: its arrays are in the shared memory, and hidden states are written after them. Without any:
    load the weights."""

    seconds: float = 0.0
    memory: int = -1
    start: int = 0
    num_bytes: int = 0


class Encoded(msgspec.Struct, array_like=True):
    """What became of it: float32, [n, E], in the shared memory."""

    shape: tuple[int, int] = (0, 0)
    error: str | None = None
    is_final: bool = False
    """Whether no image of this checkpoint can be encoded, now or later."""


def main() -> None:
    """Entry point of the process: its first line of input names the checkpoint, dtype, device and quantisation."""
    lower_priority()
    import torch
    from safetensors.torch import load

    from quire_engine.encoders.towers.loading import load_tower

    folder, dtype, device_name, quantization = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=tuple[str, str, str, str | None]
    )
    if device_name.startswith("auto"):
        device_name = device_name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of a tower in float32 keep all bits
    family = find_family(Path(folder))
    assert family is not None
    tower: torch.nn.Module | None = None

    def run(job: Job) -> Encoded:
        nonlocal tower
        try:
            if tower is None:
                tower = load_tower(Path(folder), family, getattr(torch, dtype), device, quantization)
            if not job.num_bytes:
                return Encoded()
            arrays = load(os.pread(job.memory, job.num_bytes, job.start))
            with torch.inference_mode(), device:
                hidden = tower(**{name: value.to(device) for name, value in arrays.items()}).float().cpu().contiguous()
            os.pwrite(job.memory, hidden.numpy(), job.start + job.num_bytes)
            return Encoded((hidden.shape[0], hidden.shape[1]))
        except BaseException as error:
            if not is_failure(error):
                raise
            return Encoded(error=one_line(error), is_final=isinstance(error, NoImagesError))

    serve(Job, run)


if __name__ == "__main__":
    main()
