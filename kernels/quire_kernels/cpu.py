"""The C++ kernels of `kernels/csrc/`, loaded once per process and bound with ctypes.

`pip install` builds the library beside this file when there is a C++ compiler. It holds each kernel once per
instruction set; the best one that the processor has is taken, or the one that `QUIRE_CPU_KERNELS` names:

    avx512_bf16    AVX-512 with bfloat16 and int8 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later)
    avx512         AVX-512 F, BW, VL and DQ (Skylake-X and later)
    avx2           AVX2 and FMA
    torch          no library: every op in plain torch
    triton         no library: the kernels of GPUs in Triton's interpreter, with TRITON_INTERPRET=1 only; for tests

Without the library every op falls back to plain torch, which is right and slow.
"""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path

import torch

__all__ = [
    "INSTRUCTION_SETS",
    "KERNELS_VARIABLE",
    "Call",
    "KernelStatus",
    "library",
    "library_for",
    "pointer",
    "status",
    "with_dense_rows",
]

KERNELS_VARIABLE = "QUIRE_CPU_KERNELS"
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2")
"""Best first."""
INTERPRETER = "triton"
LIBRARY_NAME = "_cpu"
MEND = "install g++, then quire again (CXX=g++ pip install …)"
"""Of a library that is not there."""


VERSION = 1
"""Of the interface, as in kernels/csrc/calls.h."""


class Call(ctypes.Structure):
    """What a kernel is called with: each subclass mirrors the structure of its name (but for a leading underscore) in
    kernels/csrc/calls.h, field by field."""


class KernelStatus:
    """What became of the library: `instruction_set` when it is used, else None, and then `reason` says why.

    With `interprets_triton`, CPU tensors are computed with by the kernels of GPUs instead (`dispatch.py`).
    """

    def __init__(
        self,
        instruction_set: str | None,
        reason: str,
        handle: ctypes.CDLL | None = None,
        interprets_triton: bool = False,
    ) -> None:
        self.instruction_set = instruction_set
        self.reason = reason
        self.handle = handle
        self.interprets_triton = interprets_triton


@functools.cache
def status() -> KernelStatus:
    """Load the library and choose an instruction set.

    Raises:
        ValueError: `QUIRE_CPU_KERNELS` names nothing that there is here.
    """
    wanted = os.environ.get(KERNELS_VARIABLE, "")
    if wanted not in ("", "torch", INTERPRETER, *INSTRUCTION_SETS):
        known = ", ".join((*INSTRUCTION_SETS, INTERPRETER))
        raise ValueError(f"{KERNELS_VARIABLE} is {wanted!r}; known are {known} and torch")
    if wanted in ("torch", INTERPRETER):
        return KernelStatus(None, f"{KERNELS_VARIABLE}={wanted}", interprets_triton=wanted == INTERPRETER)
    folder = Path(__file__).parent
    paths = [folder / f"{LIBRARY_NAME}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return _missing(wanted, "the C++ kernels were not built when quire was installed")
    try:
        # torch is loaded by now, and with it its OpenMP runtime, which the library finds by name: one pool of threads.
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return _missing(wanted, f"{path}: {error}")
    if _layout_of(handle) != _layout():
        return _missing(wanted, f"{path} was built from another version of the source")
    for name in (wanted,) if wanted else INSTRUCTION_SETS:
        if handle.quire_select(name.encode()):
            return KernelStatus(name, f"{path.name}, {name}", handle)
    return _missing(wanted, f"this processor has no {wanted or INSTRUCTION_SETS[-1]}")


def _layout_of(handle: ctypes.CDLL) -> str:
    try:
        handle.quire_layout.restype = ctypes.c_char_p
        layout: str = handle.quire_layout().decode()
    except AttributeError:
        return ""
    return layout


def _layout() -> str:
    """Version of the interface and size of each structure: a library that says otherwise would read wild memory."""
    sizes = (f"{call.__name__.lstrip('_')}={ctypes.sizeof(call)}" for call in Call.__subclasses__())
    return " ".join([str(VERSION), *sorted(sizes)])


def _missing(wanted: str, reason: str) -> KernelStatus:
    if wanted:
        raise ValueError(f"{KERNELS_VARIABLE} is {wanted}, but {reason}")
    return KernelStatus(None, reason)


def library() -> ctypes.CDLL | None:
    """The library, or None where ops are to use plain torch."""
    return status().handle


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's data is, for a structure's field."""
    return None if tensor is None else tensor.data_ptr()


def library_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library, if it computes with these tensors: all float32 or all bfloat16, and on the CPU."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device.type != "cpu":
            return None
    return library()


def with_dense_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself, unless the elements of a row have gaps between them."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
