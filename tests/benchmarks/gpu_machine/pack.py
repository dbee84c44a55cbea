"""Packs what a GPU machine without a network lacks into .gpu/, which git ignores, for run.sh to unpack there.

    python tests/benchmarks/gpu_machine/pack.py [--python 3.12]

The machine has torch, triton, transformers, numpy 2, grpcio, protobuf, pytest with its plugins, typer,
prometheus-client. So:

    .gpu/site.tar.xz      our other dependencies
    .gpu/server.tar.xz    a tritonserver with its Python backend, the stub of that Python and the shared libraries that
                          these load; tritonclient; numpy 1, which the stub needs. Only for the stage `server`

Wheels are fetched with pip, for that Python and manylinux on x86-64, and unpacked here.
"""

import argparse
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SITE = ["msgspec>=0.19", "pyzmq>=26", "xgrammar>=0.2.8,<0.3", "apache-tvm-ffi>=0.1.11"]
SITE_WITH_NEEDS = ["pydantic>=2"]
"""Whose own dependencies have to be of one exact version."""
SERVER = ["tritonclient>=2.60,<3", "python-rapidjson>=0.9.1", "numpy==1.26.4"]
PYTRITON = "nvidia-pytriton==0.7.0"
PLATFORMS = [
    "manylinux_2_35",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_26",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
]
SUPERFLUOUS = re.compile(r"(^|/)(tests|include|_pyinstaller|share)/|\.(a|lib|pyi|h)$")
"""In wheels: of no use to a program that runs."""
MOST_BYTES = 63 << 20
"""Of everything that travels to the machine: the tracked files and .gpu/."""


def download(requirements: Sequence[str], python: str, folder: Path, with_needs: bool = False) -> list[Path]:
    """The wheels of these."""
    platforms = [part for platform in PLATFORMS for part in ("--platform", f"{platform}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, *platforms, *([] if with_needs else ["--no-deps"]), "-d", str(folder)]
    subprocess.run([*command, *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Sequence[Path], folder: Path) -> None:
    """All files that a program needs."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not SUPERFLUOUS.search(name)]
            archive.extractall(folder, names)


def unpack_tritonserver(wheel: Path, python: str, folder: Path) -> None:
    """The server, the Python backend with one stub, and of the libraries beside them those that any of these loads."""
    server = "pytriton/tritonserver"
    wanted = re.compile(
        rf"{server}/(bin/tritonserver|backends/python/[^/]+\.(so|py)|python_backend_stubs/{re.escape(python)}/.*)"
        r"|nvidia_pytriton\.libs/.*|nvidia_pytriton-[^/]+\.dist-info/METADATA"
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if wanted.fullmatch(name)])
    libraries = folder / "nvidia_pytriton.libs"
    programs = [
        folder / server / "bin" / "tritonserver",
        folder / server / "python_backend_stubs" / python / "triton_python_backend_stub",
        folder / server / "backends" / "python" / "libtriton_python.so",
    ]
    loaded = set()
    for program in programs:
        program.chmod(0o755)
        loaded |= _libraries_of(program, libraries)
    for library in libraries.iterdir():
        if library.name not in loaded:
            library.unlink()


def _libraries_of(program: Path, folder: Path) -> set[str]:
    """Names of the libraries of a folder that a program loads, and those that these load."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    listed = subprocess.run(["ldd", str(program)], env=environment, capture_output=True, text=True, check=True).stdout
    return {name for name in re.findall(r"^\s*(\S+) => ", listed, re.MULTILINE) if (folder / name).exists()}


def archive(folder: Path, target: Path) -> None:
    """Compress what is in a folder."""
    machine_code_first = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    with lzma.open(target, "w", filters=machine_code_first) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 2**20:.1f} MiB")


def tracked_bytes() -> int:
    """Of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if (ROOT / name).is_file())


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the machine")
    arguments = parser.parse_args()
    target = ROOT / ".gpu"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site, server = (Path(folder, name) for name in ("wheels", "site", "server"))
        unpack(download(SITE, arguments.python, wheels / "site"), site)
        unpack(download(SITE_WITH_NEEDS, arguments.python, wheels / "needs", with_needs=True), site)
        unpack(download(SERVER, arguments.python, wheels / "server"), server)
        (pytriton,) = download([PYTRITON], arguments.python, wheels / "pytriton")
        unpack_tritonserver(pytriton, arguments.python, server)
        archive(site, target / "site.tar.xz")
        archive(server, target / "server.tar.xz")
    num_bytes = tracked_bytes() + sum(file.stat().st_size for file in target.iterdir())
    print(f"with the tracked files {num_bytes / 2**20:.1f} MiB")
    if num_bytes > MOST_BYTES:
        print(f"pack.py: that is more than the {MOST_BYTES / 2**20:.0f} MiB that may travel", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
