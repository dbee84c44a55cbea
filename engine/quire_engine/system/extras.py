"""How to install an extra of Quire, which is in no package index, so that `pip install 'quire[…]'` finds nothing; where
packages are; and where Quire keeps files that it has made or downloaded."""

import json
import os
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def install_command(extra: str) -> str:
    """The command that installs an extra of pyproject.toml from Quire's own source.

    That is the checkout that this file is in, else the place that pip has recorded (PEP 610). Without either, the
    command is for a checkout as the working directory.
    """
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        source = ["--editable", f"{checkout}[{extra}]"]
    elif record := _record():
        prefix = f"{record['vcs_info']['vcs']}+" if "vcs_info" in record else ""
        source = [f"quire[{extra}] @ {prefix}{record['url']}"]
    else:
        source = ["--editable", f".[{extra}]"]
    # A `pip` on PATH may be another environment's.
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *source])


def cache_folder(name: str) -> Path | None:
    """A folder of Quire in `$XDG_CACHE_HOME` or `~/.cache`; None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "quire", name) if os.path.isabs(base) else None


def package_folder(name: str) -> Path | None:
    """The folder of an installed package, which is not imported. None if there is none of this name.

    Args:
        name: without a dot, or else the packages around it would be imported.
    """
    spec = find_spec(name)
    return next(map(Path, (spec and spec.submodule_search_locations) or ()), None)


def missing_package(extra: str, *modules: str) -> str:
    """Which of an extra's modules is not installed, and how to install it; empty if all are."""
    missing = [name for name in modules if find_spec(name) is None]
    return f"the package {missing[0]} is not installed; install it with: {install_command(extra)}" if missing else ""


def _record() -> dict[str, dict[str, str]]:
    try:
        record: dict[str, dict[str, str]] = json.loads(
            metadata.distribution("quire").read_text("direct_url.json") or "{}"
        )
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return record
