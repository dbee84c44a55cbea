"""Transfers: a step's inputs to the device that computes, and its results back.

On a GPU the host waits for neither. Inputs are put into pinned memory, which the device reads by DMA (a copy from
pageable memory would first wait for all work queued on the device). Results are on the host once the event that was
recorded after their copy has passed.

::

    host     upload ─► launch step N ─► launch copy, record event ─► upload ─► launch step N + 1 ─► Download.wait
    device             ─────── step N ───────────────────── copy │ event ── step N + 1 ─────────────────
"""

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

CPU = torch.device("cpu")
ALIGNMENT = 128
"""Bytes. Triton recompiles kernels for pointers that are aligned to less than 16 bytes."""

Columns = TypeVar("Columns")


def upload(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """The arrays as tensors on a device, with one copy for all of them; on the CPU without a copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    starts = [0, *ends[:-1]]
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for start, array in zip(starts, arrays, strict=True):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def upload_tensors(device: torch.device, columns: Columns) -> Columns:
    """A dataclass whose tensors are moved from the host to the device; None stays None."""
    if columns is None or device.type == "cpu":
        return columns
    names = [item.name for item in fields(columns)]  # type: ignore[arg-type]
    there = upload(device, *(getattr(columns, name).numpy() for name in names))
    uploaded: Columns = replace(columns, **dict(zip(names, there, strict=True)))  # type: ignore[type-var]
    return uploaded


class Download:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        # A non-blocking copy to the host goes to pinned memory.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """Wait for the tensors and return them. Uses no CPU while it waits. Any thread may call it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
