"""What tritonserver is started with: its backend directory, its environment, its flags.

Without any of these details a Python-based backend fails, in ways that are hard to see in its log.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_engine.system.extras import package_folder

from quire_cli.errors import CommandError, UsageError
from quire_cli.server.tritonserver import STUB, TritonServer, libpython

PACKAGES = ("quire_cli", "quire_backend", "quire_monitoring", "quire_engine", "quire_kernels")
RESTRICTED_APIS = ("shared-memory", "trace", "logging")
"""APIs that no client of a language model needs, in tritonserver's names."""
_RESTRICTING_FLAGS = ("http-restricted-api", "grpc-restricted-protocol")
_MODEL_PY = """\
# The Python that is embedded in the stub knows its own site-packages, and ignores PYTHONPATH.
import os
import sys

sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)

from quire_backend.completion import TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags for tritonserver that the user gave after `--`. They win over ours."""

    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens and not self.tokens[0].startswith("--"):
            raise UsageError(f"unexpected argument {self.tokens[0]!r}; flags for tritonserver go after --")

    @property
    def values(self) -> dict[str, str]:
        """Flag name without its dashes → its last value, empty when it has none."""
        return dict(self._items())

    def all_values(self, name: str) -> list[str]:
        """All values of a flag, which may be given more than once."""
        return [value for given, value in self._items() if given == name]

    def _items(self) -> list[tuple[str, str]]:
        items: list[tuple[str, str]] = []
        for token in self.tokens:
            if token.startswith("--"):
                name, _, value = token[2:].partition("=")
                items.append((name, value))
            else:  # `--flag value`, which tritonserver takes as well
                items[-1] = (items[-1][0], token)
        return items

    def without(self, name: str) -> "ServerFlags":
        """All flags except those of one name."""
        kept: list[str] = []
        is_kept = True
        for token in self.tokens:
            if token.startswith("--"):
                is_kept = token[2:].partition("=")[0] != name
            if is_kept:
                kept.append(token)
        return ServerFlags(tuple(kept))

    def plus(self, *flags: tuple[str, str]) -> "ServerFlags":
        """These flags, followed by others."""
        return ServerFlags((*self.tokens, *(f"--{name}={value}" for name, value in flags)))

    def is_off(self, name: str) -> bool:
        """True when a boolean flag was given with a false value."""
        return self.values.get(name, "true").lower() in ("false", "0")

    def merge(self, defaults: Iterable[tuple[str, str]]) -> list[str]:
        """Our flags, except those that the user gave too, then the user's."""
        # These may be given more than once. A setting of a backend only replaces ours of the same name; `restrictions`
        # leaves out the APIs that the user restricts.
        given = self.values.keys() - {"backend-config", *_RESTRICTING_FLAGS}
        if any("shm-region-prefix-name" in token for token in self.tokens):
            given |= {"backend-config"}
        return [*(f"--{name}={value}" for name, value in defaults if name not in given), *self.tokens]


def compose_backends(server: TritonServer, folder: Path) -> Path:
    """Make a backend directory with our backend and the Python backend.

    ::

        backends/quire/model.py
        backends/python/…          libtriton_python.so, triton_python_backend_utils.py, triton_python_backend_stub

    Returns:
        The backend directory.
    """
    backends = folder / "backends"
    (backends / "quire").mkdir(parents=True)
    (backends / "quire" / "model.py").write_text(_MODEL_PY, encoding="utf-8")
    if not server.is_wheel:
        for backend in server.python_backend.parent.iterdir():
            if backend.name != "quire":
                (backends / backend.name).symlink_to(backend)
        return backends
    # Copies: tritonserver rejects a library that is a link out of the backend directory.
    python = backends / "python"
    python.mkdir()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(server.python_backend / name, python / name)
    shutil.copy(server.stub, python / STUB)
    return backends


def server_environment(server: TritonServer, own: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the stub runs this Python, with this Python's packages, and with `own` added.

    Raises:
        CommandError: there is no shell to start the stub with.
    """
    library = libpython()
    libraries = [*([library.parent] if isinstance(library, Path) else []), *server.library_dirs]
    environment = {**os.environ, **own}
    # The stub would otherwise load the system's libpython, and run it with this Python's standard library.
    environment["LD_LIBRARY_PATH"] = _joined(map(str, libraries), os.environ.get("LD_LIBRARY_PATH"))
    environment["PYTHONPATH"] = _joined(_package_paths(), None)
    # An embedded Python takes its prefix, and so its environment, from the first python on PATH.
    environment["PATH"] = _joined([str(Path(sys.executable).parent)], os.environ.get("PATH"))
    if shutil.which("bash", path=environment["PATH"]) is None:
        environment["PATH"] = _joined([environment["PATH"]], os.defpath)
    if shutil.which("bash", path=environment["PATH"]) is None:
        raise CommandError("there is no bash on PATH, and tritonserver starts its Python processes with it; install it")
    # Without a UTF-8 locale, which services often lack, the stub could not name a path that is not ASCII.
    environment.setdefault("PYTHONUTF8", "1")
    return environment


def restrictions(flags: ServerFlags) -> Iterator[tuple[str, str]]:
    """The flags that close `RESTRICTED_APIS`, except those that the user's own flags give a header for.

    A client that may register shared memory can name the region of a model's process, and have an output written over
    data that keeps that process alive; traces are written to files of the server's machine, and the log can be turned
    off. tritonserver restricts an API to requests that carry a header of its command line. Every user of the machine
    can read that, so a secret would not help; ours is a header that no request can carry:

    - over gRPC its name would hold capitals, which HTTP/2 forbids and gRPC rejects;
    - over HTTP/1 its value would hold a line break, which ends a header.
    """
    value = f"{secrets.token_hex(8)}\n{secrets.token_hex(8)}"
    for flag in _RESTRICTING_FLAGS:
        closed = [api for api in RESTRICTED_APIS if api not in _restricted_by(flags, flag)]
        if closed:
            yield flag, f"{','.join(closed)}:NOBODY={value}"


def shows_log(flags: ServerFlags) -> bool:
    """Whether the user's flags say what is logged, or give a header for the log's API: its effects should be seen."""
    return any(name.startswith("log-") for name in flags.values) or any(
        "logging" in _restricted_by(flags, flag) for flag in _RESTRICTING_FLAGS
    )


def _restricted_by(flags: ServerFlags, flag: str) -> set[str]:
    return {api.strip() for value in flags.all_values(flag) for api in value.partition(":")[0].split(",")}


def has_gpu() -> bool:
    """True when this machine has an NVIDIA driver."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def _package_paths() -> list[str]:
    """Entries of sys.path that hold installed packages, and the folders that our own packages are in."""
    ours = {str(folder.parent) for name in PACKAGES if (folder := package_folder(name))}
    given = {str(Path(entry)) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    found = [
        entry for entry in sys.path
        if entry in ours | given or Path(entry).name in ("site-packages", "dist-packages")
    ]  # fmt: skip
    return [*found, *sorted(ours - set(found))]


def _joined(first: Iterable[str], rest: str | None) -> str:
    entries: Sequence[str] = [*first, *([rest] if rest else [])]
    return os.pathsep.join(entries)
