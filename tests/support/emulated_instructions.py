"""Instruction sets by choice. Where the processor lacks one, `emulated_instructions.c` emulates what traps."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire_kernels import cpu

SOURCE = Path(__file__).with_suffix(".c")
NEEDED = {"amx": "avx512_bf16", "avx_vnni": "avx2"}
"""The rest of each set, which the processor must have."""
# `cpu.status` parses the library's declarations, which a process does once, and a test for each instruction set.
cpu._structures = functools.cache(cpu._structures)


@functools.cache
def emulator() -> ctypes.CDLL | None:
    """The emulator, installed for the rest of the process; None without a C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "emulator.so"))
        subprocess.run([compiler, "-O3", "-mavx2", "-mfma", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        handle = ctypes.CDLL(library)
    handle.count.restype = ctypes.c_long
    assert handle.install() == 0
    return handle


def select(kernels: ctypes.CDLL, name: str) -> bool:
    """Take the kernels of an instruction set that the processor lacks; False if it cannot be emulated."""
    needed = NEEDED.get(name)
    if needed is None or not kernels.quire_select(needed.encode()) or emulator() is None:
        return False
    return bool(kernels.quire_select_emulated(name.encode()))


def count() -> int:
    """How many instructions were emulated so far."""
    handle = emulator()
    return 0 if handle is None else int(handle.count())


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Use an instruction set, or plain torch; skip one that the processor lacks."""
    handle = cpu.library()
    if name != "torch" and handle is None:
        pytest.skip(cpu.status().reason)
    with pytest.MonkeyPatch.context() as patch:
        if name == "torch" or handle.quire_select(name.encode()):
            patch.setenv(cpu.KERNELS_VARIABLE, name)
            cpu.status.cache_clear()
        elif name == "amx" and select(handle, name):  # AVX-VNNI would take minutes
            patch.setattr(cpu, "status", lambda: cpu.KernelStatus(name, "emulated", handle))
        else:
            pytest.skip(f"this processor has no {name}")
        try:
            yield
        finally:
            patch.undo()
            cpu.status.cache_clear()
            cpu.status()  # selects the best again, which the library remembers for the whole process
