"""The command that installs an extra. Quire is in no package index, so `pip install 'quire[…]'` finds nothing."""

import json
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["install_command", "missing_package"]


def install_command(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this Python's environment, from where Quire was installed.

    pip records that place (PEP 610). Without a record, the command is for a checkout as the working directory.
    """
    try:
        record = metadata.distribution("quire").read_text("direct_url.json")
        origin = json.loads(record or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        source, is_editable = f"{url2pathname(urlsplit(url).path)}[{extra}]", origin["dir_info"].get("editable", False)
    elif url:
        prefix = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
        source, is_editable = f"quire[{extra}] @ {prefix}{url}", False
    else:
        source, is_editable = f".[{extra}]", True
    # A `pip` on PATH may be another environment's.
    command = [sys.executable or "python3", "-m", "pip", "install", *(["--editable"] if is_editable else []), source]
    return shlex.join(command)


def missing_package(extra: str, *modules: str) -> str:
    """Which of an extra's modules is not installed, and how to install it; empty if all are."""
    missing = [name for name in modules if find_spec(name) is None]
    return f"the package {missing[0]} is not installed; install it with: {install_command(extra)}" if missing else ""
