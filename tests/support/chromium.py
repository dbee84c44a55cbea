"""Chromium for the browser tests: the one that is installed, else Debian's, unpacked into a folder of its own.

Unpacking needs no root: `apt-get download` and `dpkg -x` work for any user, with package lists of their own. Of
the libraries that Chromium depends on, those that the system lacks are unpacked too, and found by LD_LIBRARY_PATH.

    python tests/support/chromium.py FOLDER      unpack it there, unless that was done before
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Chromium", "find_chromium", "unpack"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Chromium:
    """A browser, and what it has to be started with."""

    executable: str
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def find_chromium(folder: Path = FOLDER) -> Chromium | None:
    """The browser of QUIRE_CHROMIUM, the unpacked one, or the installed one; None when there is none."""
    # Its own sandbox needs user namespaces or a setuid helper, and as root it refuses both. The pages are our own.
    arguments = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
    given = os.environ.get("QUIRE_CHROMIUM")
    if given:
        return Chromium(given, dict(os.environ), arguments)
    unpacked = folder / "usr/lib/chromium/chromium"
    if unpacked.exists():
        libraries = [str(path.parent) for path in sorted((folder / "usr/lib").glob("*-linux-gnu*/**/*.so*"))]
        path = os.pathsep.join(dict.fromkeys([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]))
        return Chromium(str(unpacked), {**os.environ, "LD_LIBRARY_PATH": path}, arguments)
    installed = next(filter(None, map(shutil.which, _NAMES)), None)
    return Chromium(installed, dict(os.environ), arguments) if installed else None


def unpack(folder: Path) -> None:
    """Unpack Debian's Chromium, and what it needs besides, into `folder`.

    Raises:
        RuntimeError: this is no Debian, or its packages cannot be reached.
    """
    folder = folder.resolve()
    if find_chromium(folder) is not None:
        return
    if shutil.which("apt-get") is None:
        raise RuntimeError("there is no apt-get here; install Chromium, or name one in QUIRE_CHROMIUM")
    downloads = folder.with_name(f"{folder.name}.download")
    shutil.rmtree(downloads, ignore_errors=True)
    for name in ("lists", "archives"):
        (downloads / "apt" / name / "partial").mkdir(parents=True)
    # Lists of packages of its own: those of a bare machine are empty, and to fill them needs root.
    settings = (f"Dir::State::Lists={downloads}/apt/lists", f"Dir::Cache={downloads}/apt", "Debug::NoLocking=1")
    apt = ["apt-get", "-q", *(word for setting in settings for word in ("-o", setting))]
    try:
        _run([*apt, "update"], downloads)
        _run([*apt, "download", *_missing_packages(apt)], downloads)
        target = downloads / "root"
        for package in sorted(downloads.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(target)], downloads)
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    finally:
        shutil.rmtree(downloads, ignore_errors=True)


def _missing_packages(apt: list[str]) -> list[str]:
    """Chromium and those of its dependencies that are not installed."""
    said = _run([*apt, "-s", "--no-install-recommends", "install", "chromium"], ROOT)
    found = re.findall(r"^Inst (\S+)", said, re.MULTILINE)
    if "chromium" not in found:
        raise RuntimeError("apt knows no chromium; name one in QUIRE_CHROMIUM")
    return found


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:3])} …: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        unpack(Path(sys.argv[1]))
    except RuntimeError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(1)
