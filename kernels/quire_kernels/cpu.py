"""The C++ kernels of `kernels/csrc/`, loaded once per process and bound with ctypes.

`pip install` builds the library beside this file, on x86-64 and unless `QUIRE_BUILD_KERNELS` is 0. It holds each kernel
once per instruction set, and uses the best one that the processor supports, or the one that `QUIRE_CPU_KERNELS` names:

    amx            avx512_bf16, and tiles of int8 and bfloat16 in linear layers and in attention of encoders
                   (Sapphire Rapids and later)
    avx512_bf16    AVX-512 with bfloat16 and int8 dot products (Zen 4, Cooper Lake, Sapphire Rapids and later)
    avx512_vnni    AVX-512 with int8 dot products (Cascade Lake, Ice Lake and later)
    avx512         AVX-512 F, BW, VL and DQ (Skylake-X and later)
    avx_vnni       AVX2 with int8 dot products (Alder Lake, Zen 5 and later)
    avx2           AVX2 and FMA
    torch          no library: every op in plain torch
    triton         no library: the GPU kernels in Triton's interpreter, only with TRITON_INTERPRET=1; for tests

Without the library every op falls back to plain torch, which is correct and slow. Where the processor lacks AMX, the
tests emulate it.
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

KERNELS_VARIABLE = "QUIRE_CPU_KERNELS"
INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2")
"""Best first."""
INTERPRETER = "triton"
LIBRARY_NAME = "_cpu"
MEND = "install g++, then quire again (CXX=g++ pip install …)"
"""Advice if the library is missing."""

FLOATS = (torch.float32, torch.bfloat16)
"""Dtypes that the kernels compute with."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""By type that numbers are quantised to, the number that the largest absolute value becomes."""
GROUPS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
"""`LinearKind` of kernels/csrc/calls.h: how many elements fill 32 bits, the smallest unit of a dot product."""

# The constants of kernels/csrc/calls.h; see there.
VERSION = 8
PANEL = 32
HEAD_SIZE_STEP = 16
MAX_HEAD_SIZE = 1024
ACTIVATION_GROUP = 128
SUPER_GROUP = 256
SCALE_BYTES = 4


Kernel: TypeAlias = Callable[..., None]
"""A function of the library that takes a pointer to its call."""


class Call(ctypes.Structure):
    """Arguments or results of a kernel: a structure of kernels/csrc/calls.h, with the fields that the library states.
    `structure` makes the subclasses."""


_C_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
"""By the names in calls.h."""
_HEADER = Path(__file__).resolve().parents[1] / "csrc" / "calls.h"
"""Only in a checkout: a wheel has no source."""


class Recorder(Protocol):
    """Records kernels instead of running them (`recording.py`)."""

    def add(self, kernel: Kernel, call: Call) -> None:
        """Record a copy of the call."""


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Whether the library is used: its `instruction_set`, or None and a `reason`.

    With `interprets_triton`, the GPU kernels compute with CPU tensors instead (`uses_triton`).
    """

    instruction_set: str | None
    reason: str
    handle: ctypes.CDLL | None = None
    interprets_triton: bool = False


@functools.cache
def status() -> KernelStatus:
    """Load the library and choose an instruction set. Raises ValueError if `QUIRE_CPU_KERNELS` names something that is
    not available here."""
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
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return _missing(wanted, f"{path}: {error}")
    layout = _layout_of(handle)
    if not _agrees(layout):
        return _missing(wanted, f"{path} was built from another version of the source")
    for name, fields in _structures(layout).items():
        _declared[name] = [(field, _c_type(kind)) for kind, field in fields]
    for call in Call.__subclasses__():
        _complete(call)
    for name in (wanted,) if wanted else INSTRUCTION_SETS:
        if handle.quire_select(name.encode()):
            handle.quire_set_threads(torch.get_num_threads())
            return KernelStatus(name, f"{path.name}, {name}", handle)
    return _missing(wanted, f"this processor has no {wanted or INSTRUCTION_SETS[-1]}")


def _layout_of(handle: ctypes.CDLL) -> str:
    try:
        handle.quire_layout.restype = ctypes.c_char_p
        layout: str = handle.quire_layout().decode()
        handle.quire_threads.restype = ctypes.c_int64
        handle.quire_set_threads.argtypes = [ctypes.c_int64]
    except AttributeError:
        return ""
    return layout


def _agrees(layout: str) -> bool:
    """Whether a library has these constants and, in a checkout, the structures of its source. Its layout is
    `NAME=value` of each constant, then the declarations of kernels/csrc/calls.h."""
    constants = {
        "VERSION": VERSION, "PANEL": PANEL, "HEAD_SIZE_STEP": HEAD_SIZE_STEP, "MAX_HEAD_SIZE": MAX_HEAD_SIZE,
        "ACTIVATION_GROUP": ACTIVATION_GROUP, "SUPER_GROUP": SUPER_GROUP, "SCALE_BYTES": SCALE_BYTES,
    }  # fmt: skip
    has_constants = all(f"{name}={value} " in layout for name, value in constants.items())
    return has_constants and (not _HEADER.exists() or _structures(_HEADER.read_text()) == _structures(layout))


def _structures(declarations: str) -> dict[str, list[tuple[str, str]]]:
    text = re.sub(r"//.*|\s+", " ", declarations)
    return {
        name: re.findall(r" *([^;]+) (\w+);", fields) for name, fields in re.findall(r"struct (\w+) +\{(.*?)\};", text)
    }


_declared: dict[str, list[tuple[str, Any]]] = {}
"""Fields of the library's structures, once it is loaded."""


def _c_type(kind: str) -> Any:
    if "*" in kind:
        return ctypes.c_void_p
    if kind in _C_TYPES:
        return _C_TYPES[kind]
    _complete(structure(kind))  # a structure that was declared before
    return structure(kind)


@functools.cache
def structure(name: str) -> type[Call]:
    """The structure of this name. It has no fields before the library is loaded."""

    class Structure(Call):
        pass

    Structure.__name__ = name
    _complete(Structure)
    return Structure


def _complete(call: type[Call]) -> None:
    if call.__name__ in _declared:
        with contextlib.suppress(AttributeError):  # it has them already
            call._fields_ = _declared[call.__name__]


def _missing(wanted: str, reason: str) -> KernelStatus:
    if wanted:
        raise ValueError(f"{KERNELS_VARIABLE} is {wanted}, but {reason}")
    return KernelStatus(None, reason)


def library() -> ctypes.CDLL | None:
    """The library, or None if ops use plain torch."""
    return status().handle


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels in the Triton language (`gpu/`) compute with this tensor and the others of the call: on a
    GPU, and in tests on the CPU."""
    return tensor.is_cuda or status().interprets_triton


def set_num_threads(num_threads: int, *, torch_computes: bool = False) -> None:
    """Set how many threads compute, including the caller's own. The default is torch's number of threads. The library
    has a pool of its own; with `torch_computes` torch gets as many, as it always does without the library. Leave it
    False if torch has little to compute: two pools take the cores from each other while their threads wait."""
    handle = library()
    if handle is not None:
        handle.quire_set_threads(num_threads)
    torch.set_num_threads(num_threads if handle is None or torch_computes else 1)


def get_num_threads() -> int:
    """How many threads compute."""
    handle = library()
    return torch.get_num_threads() if handle is None else int(handle.quire_threads())


def launch(name: str, call: Call) -> None:
    """Run the library's kernel of this name with a call, which may be reused afterwards."""
    kernel, recorder = getattr(library(), name), _thread.recorder
    if recorder is None:
        kernel(ctypes.byref(call))
    else:
        recorder.add(kernel, call)


def is_recording() -> bool:
    """Whether this thread's kernels go to a recording."""
    return _thread.recorder is not None


@contextlib.contextmanager
def recording_to(recorder: Recorder) -> Iterator[None]:
    """Kernels that this thread launches inside the block go to `recorder`, and are not run."""
    assert _thread.recorder is None, "recordings do not nest"
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's data, for a structure's field."""
    return None if tensor is None else tensor.data_ptr()


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Reject an argument where a kernel would read or write beyond the tensor: TypeError if it is of another dtype, or
    not on the CPU; ValueError if it is of another shape, or there are gaps between its elements."""
    if tensor.dtype is not dtype or not tensor.is_cpu:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}; it must be {dtype} on the CPU")
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}; it must be {list(shape)}, "
            "without gaps"
        )


def check_written_rows(name: str, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Reject a matrix that rows like those of another cannot be written to: TypeError if it is of another dtype, or on
    another device; ValueError if its rows have another length, or gaps between their elements. It may be a part of a
    wider one."""
    if out.dtype != rows.dtype or out.device != rows.device:
        raise TypeError(f"{name} is {out.dtype} on {out.device}; it must be {rows.dtype} on {rows.device}")
    if out.dim() != 2 or out.shape[1] != rows.shape[-1] or out.stride(1) != 1:
        raise ValueError(
            f"{name} has shape {list(out.shape)} and strides {list(out.stride())}; its rows must be {rows.shape[-1]} "
            "elements without gaps"
        )


def library_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library, if it computes with these tensors: all float32 or all bfloat16, and on the CPU."""
    dtype = tensors[0].dtype
    if dtype not in FLOATS:
        return None
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_cpu:
            return None
    return library()


def with_dense_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself, unless the elements of a row have gaps between them. ValueError if it has another number of
    dimensions."""
    if matrix.dim() != 2:
        raise ValueError(f"a tensor of shape {list(matrix.shape)} is given; it must have two dimensions")
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def with_dense_heads(x_THD: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The tensor itself, unless the elements of a head have gaps between them; and its strides of tokens and heads."""
    token_stride, head_stride, stride = x_THD.stride()
    if stride != 1:
        x_THD = x_THD.contiguous()
        token_stride, head_stride, _ = x_THD.stride()
    return x_THD, token_stride, head_stride
