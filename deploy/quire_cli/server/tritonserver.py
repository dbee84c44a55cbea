"""Where `tritonserver` is, and whether this Python can run a Python-based backend in it.

Three places are searched, in this order: PATH, /opt/tritonserver/bin (NVIDIA's container), and the nvidia-pytriton
wheel, whose files are used without importing its package.
"""

import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quire_engine.system.extras import install_command, package_folder

from quire_cli.errors import CommandError

PLACES = "PATH, /opt/tritonserver/bin, and the nvidia-pytriton wheel of this environment"
INSTALL = f"install one with: {install_command('server')}"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB = "triton_python_backend_stub"
Release = tuple[int, int]
"""Major and minor version of a tritonserver."""
_WHEEL = "nvidia-pytriton"
_WHEEL_RELEASES = {"0.7.0": "2.51"}
"""The wheel's version → that of the server in it, of which no file of the wheel says it."""
_OPT = Path("/opt/tritonserver/bin/tritonserver")


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonServer:
    """One installed server."""

    binary: Path
    origin: str
    """Where it was found, in words."""
    python_backend: Path
    """Folder with libtriton_python.so and triton_python_backend_utils.py."""
    stub: Path
    """The program that runs models in Python; it may be missing, see `problem`."""
    library_dirs: tuple[Path, ...] = ()
    """Folders that the dynamic linker must search."""
    is_wheel: bool = False

    @property
    def cache_directory(self) -> Path:
        """Folder of its response caches, which may not exist. The server itself only looks in /opt/tritonserver."""
        return self.binary.parent.parent / "caches"

    @property
    def version(self) -> str:
        """The server's, or that of the wheel that carries it."""
        if self.is_wheel:
            return f"{_WHEEL} {metadata.version(_WHEEL)}"
        try:
            return (self.binary.parent.parent / "TRITON_VERSION").read_text(errors="replace").strip()
        except OSError:
            return "unknown"

    @property
    def release(self) -> Release | None:
        """The server's version; None if it is not known."""
        try:
            version = _WHEEL_RELEASES.get(metadata.version(_WHEEL), "") if self.is_wheel else self.version
        except metadata.PackageNotFoundError:  # the wheel's files alone
            return None
        match = re.match(r"(\d+)\.(\d+)", version)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def unnoticed_s(self) -> float:
        """Within how many seconds it notices that a stub has died as it started, if ever: before 25.08 it waits twice
        for a second, then twice for ten."""
        return 5.0 if self.release is not None and self.release < (2, 60) else 25.0

    @property
    def stub_python(self) -> str | None:
        """The version of the libpython that the stub asks the dynamic linker for."""
        match = re.search(rb"libpython(3\.\d+)\.so", self.stub.read_bytes())
        return match[1].decode() if match else None

    @property
    def problem(self) -> str | None:
        """Why this Python cannot run a backend in it, with the fix; None if it can."""
        if not (self.python_backend / "libtriton_python.so").is_file():
            return f"{self.binary} has no Python backend in {self.python_backend}; {INSTALL}"
        if self.is_wheel and sys.version_info >= (3, 13):
            # Its stub for 3.13 needs numpy 1, which was never built for 3.13.
            return (
                f"the {_WHEEL} wheel serves Python 3.10 to 3.12, and this is {PYTHON}; install quire with one of those"
            )
        if not self.stub.is_file():
            return f"{self.binary} has no {self.stub}; {INSTALL}"
        if self.stub_python not in (None, PYTHON):
            return f"{self.binary} runs Python {self.stub_python}, and this is {PYTHON}; install quire with that one"
        if libpython() is None:
            return (
                f"the shared library of Python {PYTHON} (libpython{PYTHON}.so.1.0) is missing; install it "
                f"(Debian and Ubuntu: apt install libpython{PYTHON}), or use a Python built with --enable-shared"
            )
        if self.is_wheel and int(metadata.version("numpy").split(".")[0]) >= 2:
            return (
                f"numpy is {metadata.version('numpy')}, but {_WHEEL}'s Python backend aborts with numpy 2; "
                f"fix it with: {sys.executable} -m pip install 'numpy<2'"
            )
        return None


def find_tritonserver() -> TritonServer:
    """The first installation that works.

    Raises:
        CommandError: there is none, or the first one found cannot be used; the message says why.
    """
    found = list(installations())
    if not found:
        raise CommandError(f"tritonserver was not found in {PLACES}; {INSTALL}")
    problems = []
    for server in found:
        problem = server.problem
        if problem is None:
            return server
        problems.append(problem)
    raise CommandError(problems[0])


def installations() -> Iterator[TritonServer]:
    """Every installation there is, in the order of preference."""
    on_path = shutil.which("tritonserver")
    wheel = package_folder("pytriton")
    wheel_binary = wheel / "tritonserver" / "bin" / "tritonserver" if wheel else None
    seen: set[Path] = set()
    for binary, origin in ((on_path, "PATH"), (_OPT, str(_OPT.parent)), (wheel_binary, f"the {_WHEEL} wheel")):
        if binary is None or not Path(binary).is_file():
            continue
        resolved = Path(binary).resolve()
        if resolved not in seen:
            seen.add(resolved)
            yield _describe(resolved, origin)


def libpython() -> Path | str | None:
    """This Python's own shared library: its path; a bare name when the dynamic linker knows it; None: it has none."""
    name = f"libpython{PYTHON}.so.1.0"
    # LIBDIR is where it was built to go; a relocated Python (uv's) has it under its prefix instead.
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    return find_library(f"python{PYTHON}")


def _describe(binary: Path, origin: str) -> TritonServer:
    root = binary.parent.parent
    python_backend = root / "backends" / "python"
    stubs = root / "python_backend_stubs"
    if stubs.is_dir():  # the wheel's layout: one stub per Python version
        return TritonServer(
            binary=binary, origin=origin, is_wheel=True, python_backend=python_backend,
            stub=stubs / PYTHON / STUB, library_dirs=(root.parent.parent / "nvidia_pytriton.libs",),
        )  # fmt: skip
    return TritonServer(
        binary=binary, origin=origin, python_backend=python_backend, stub=python_backend / STUB,
        library_dirs=(root / "lib", python_backend),
    )  # fmt: skip
