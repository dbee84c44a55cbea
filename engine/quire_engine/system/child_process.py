"""Starts a module as a child process, and ends children with the process that started them."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping

import msgspec

_STDERR = 2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def start_module(
    module: str,
    arguments: object = None,
    *,
    stdout: int = _STDERR,
    pass_fds: Collection[int] = (),
    start_new_session: bool = False,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run `python -m module` with the import path of this process. The caller ends it and waits for it.

    Its stdin stays open while this process lives: end of file tells the child that its parent has ended.

    Args:
        module: dotted name.
        arguments: written to stdin as one line of JSON. None: nothing is written.
        stdout: where its stdout goes; by default to stderr, as this process's stdout may carry a protocol.
        pass_fds: descriptors that it inherits under the same numbers.
        start_new_session: make it the leader of a group of its own, which can be killed as a whole.
        environment: variables that override those of this process.
    """
    line = b"" if arguments is None else msgspec.json.encode(arguments) + b"\n"
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=stdout,
        pass_fds=tuple(pass_fds),
        start_new_session=start_new_session,
        env={
            # torch's threads (OpenMP) spin while they wait for each other; by default for so long that other processes
            # on the same cores (tritonserver, the clients) slow every op down. This is some tens of microseconds.
            "GOMP_SPINCOUNT": "20000",
            # torch would look for plug-ins of other devices in the metadata of all installed packages.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **os.environ,
            "PYTHONSAFEPATH": "1",  # never import from the working directory, which may be a downloaded folder
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(environment or {}),
        },
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, which the caller sees when it waits for an answer
        process.stdin.write(line)
        process.stdin.flush()
    return process


def die_with_parent(parent: int, signal_number: int) -> None:
    """In a new child: have `signal_number` sent to it when the parent's thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def end_with_stdin() -> None:
    """End this process when its parent has ended. For a child of `start_module`, once it has read its arguments.

    The parent holds the other end of stdin and never writes to it again: end of file means that the parent has ended.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="end-with-stdin", daemon=True).start()
