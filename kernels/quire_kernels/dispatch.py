"""Chooses the implementation of an op by a tensor's device.

::

    on a GPU                                   the Triton language: `gpu/`
    on the CPU                                 C++ (`cpu.py`), and plain torch for what C++ does not implement
    on the CPU, with QUIRE_CPU_KERNELS=triton  the Triton language in Triton's interpreter, which is slow; for tests
"""

import torch

from quire_kernels.cpu import status


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernels compute with this tensor and the others of the call."""
    return tensor.is_cuda or status().interprets_triton
