"""The C++ kernels of the package; pyproject.toml has all else.

They are for x86-64, in one file for all its instruction sets, so the processor of the build does not matter. Elsewhere,
and with QUIRE_BUILD_KERNELS=0, the package has none and computes in plain torch.
"""

import os
import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

VARIABLE = "QUIRE_BUILD_KERNELS"
SOURCE = "kernels/csrc/quire_kernels.cpp"
KERNELS = Extension(
    "quire_kernels._cpu",
    [SOURCE],
    depends=sorted({*glob("kernels/csrc/*")} - {SOURCE}),
    extra_compile_args=[
        "-O3",
        "-std=c++17",
        "-pthread",
        "-fvisibility=hidden",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
    extra_link_args=["-pthread"],
)


class BuildKernels(build_ext):
    """Says what to do when the compiler fails, whose own words are above."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CCompilerError as error:
            advice = f"install g++ (CXX=g++ names it), or build without the C++ kernels, which is slow: {VARIABLE}=0"
            raise CompileError(f"{error}\n{advice}") from error


if (wanted := os.environ.get(VARIABLE, "1")) not in ("0", "1"):
    raise SystemExit(f"{VARIABLE} is {wanted!r}; known are 0 and 1")
has_kernels = wanted == "1" and platform.machine() in ("x86_64", "AMD64")
setup(ext_modules=[KERNELS] if has_kernels else [], cmdclass={"build_ext": BuildKernels})
