"""Which form of an op computes with a tensor.

::

    on a GPU                                   the Triton language: `gpu/`
    on the CPU                                 C++ (`cpu.py`), and plain torch for what that has no form of
    on the CPU, with QUIRE_CPU_KERNELS=triton  the Triton language in Triton's interpreter, which is slow, and for tests
"""

import torch

from quire_kernels.cpu import status

__all__ = ["uses_triton"]


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the form in the Triton language computes with this tensor and the others of the call."""
    return tensor.is_cuda or status().interprets_triton
