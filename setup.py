"""The C++ kernels of the package; pyproject.toml has all else.

They are for x86-64, in one library for all its instruction sets, so the processor of the build does not matter.
Elsewhere, and with QUIRE_BUILD_KERNELS=0, the package has none and computes in plain torch.
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError

VARIABLE = "QUIRE_BUILD_KERNELS"
SOURCES = sorted(glob("kernels/csrc/*.cpp"))
KERNELS = Extension(
    "quire_kernels._cpu",
    SOURCES,
    depends=sorted({*glob("kernels/csrc/*")} - {*SOURCES}),
    extra_compile_args=[
        "-O3",
        "-g0",  # else Python's own flags ask for 40 MB of debugging information
        "-std=c++17",
        "-pthread",
        "-fvisibility=hidden",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
    extra_link_args=["-pthread"],
)


class BuildKernels(build_ext):
    """Compiles the sources at the same time, and says what to do when the compiler fails, whose own words are above."""

    def build_extension(self, ext: Extension) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                objects = threads.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for (path,) in objects]

        self.compiler.compile = compile_at_once
        try:
            super().build_extension(ext)
        except CCompilerError as error:
            advice = f"install g++ (CXX=g++ names it), or build without the C++ kernels, which is slow: {VARIABLE}=0"
            raise CompileError(f"{error}\n{advice}") from error


if (wanted := os.environ.get(VARIABLE, "1")) not in ("0", "1"):
    raise SystemExit(f"{VARIABLE} is {wanted!r}; known are 0 and 1")
has_kernels = wanted == "1" and platform.machine() in ("x86_64", "AMD64")
setup(ext_modules=[KERNELS] if has_kernels else [], cmdclass={"build_ext": BuildKernels})
