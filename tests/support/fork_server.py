"""Child processes of engines, forked from one that has imported the libraries already: for tests.

An engine core, its workers, and its grammar compiler each spend seconds of processor time on imports, and the tests
start hundreds of them. Within `forked_children()`, those that `start_module` starts come from a fork server::

    tests ──── Popen ────► fork server          imports torch and the like when the first child is asked for
      │ module, environment, descriptors ──►│
      │◄── process id ──────────────────────┤ fork twice: the child of one that ends is adopted by the tests
      └──────── wait, kill ────► engine core ──── fork ────► its own fork server, for its workers and its compiler

A child has the environment, directory, descriptors and command line that it would have. What libraries read when they
are loaded is that of the server, so a child whose environment differs in that is started as ever; so are all where this
is not Linux. Tests with real servers know nothing of this.

The tests wait for a child and get its exit code, so it has to be theirs: while one is started they are its subreaper
(prctl(2), PR_SET_CHILD_SUBREAPER), the process to which the kernel gives children of descendants that have ended.
"""

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["SERVER_NAME", "forked_children", "is_forked", "tokenizers_tried_once"]

TRIED_VARIABLE = "QUIRE_TESTS_TRIED"
"""The folder of what tokenizers have passed, see `tokenizers_tried_once`."""
MARK = "QUIRE_TESTS_FORK_SERVER"
"""A variable of the server alone: /proc/PID/environ of a forked child still shows the server's."""
SERVER_NAME = "fork-server"
"""As a thread's name in /proc/PID/comm, by which `support.processes.children` leaves it out."""
LIBRARIES = (
    "torch", "numpy", "zmq", "safetensors.torch", "transformers.models.auto.tokenization_auto", "xgrammar",
    "transformers.image_processing_utils",
    # Of our own modules those that read nothing of the environment and start nothing when they are imported.
    "quire_engine.frontend.tokenizer", "quire_engine.structured_output.compile_job", "quire_engine.core.build_engine",
    "quire_engine.executor.multiproc",
)  # fmt: skip
READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "TRITON", "CUDA", "HF_", "LD_", "PYTHON")
"""Beginnings of the names of variables that libraries, or Python itself, read when they are loaded."""
GIVEN_TO_EVERY_CHILD = ("PYTHONPATH", "PYTHONSAFEPATH")
OF_THE_COMPILER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""So that it starts no threads; it computes nothing with them either way."""
COMPILER = "quire_engine.structured_output.compiler"
CORES = ("quire_engine.core.core_process", "quire_engine.core.lockstep_process")
"""The children with children of their own."""
MAX_REQUEST_BYTES = 1 << 18
MAX_DESCRIPTORS = 64

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_libc = ctypes.CDLL(None, use_errno=True)


class ForkServer:
    """The parent's end: one per process that starts children, made while the process is young and has one thread."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._environment = {name: environment[name] for name in environment if name.startswith(READ_AT_IMPORT)}
        self._executable = sys.executable
        self._lock = threading.Lock()

    def serves(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a child of this command line and environment would be the same as one that is started as ever."""
        executable, _, module = words
        if executable != self._executable:
            return False
        passed = {*GIVEN_TO_EVERY_CHILD, *(OF_THE_COMPILER if module == COMPILER else ())}
        names = {name for name in environment if name.startswith(READ_AT_IMPORT)} | {*self._environment}
        return all(environment.get(name) == self._environment.get(name) for name in names - passed)

    def start(self, request: dict[str, Any], descriptors: dict[int, int]) -> int:
        """Have a child forked: its process id.

        Args:
            request: see `_become`.
            descriptors: the child's number → ours.
        """
        request = {**request, "descriptors": [*descriptors], "directory": os.getcwd(), "niceness": os.nice(0)}
        with self._lock:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], [*descriptors.values()])
                answer = self._connection.recv(64)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise OSError("the fork server of the tests has ended")
        return int(answer)


@contextlib.contextmanager
def tokenizers_tried_once(folder: Path) -> Iterator[None]:
    """Have this process, and children that are forked, not try a tokenizer.json again that has passed: engines of the
    tests would do so three times each, with a process of its own.

    Args:
        folder: for a file per tokenizer.json.
    """
    os.environ[TRIED_VARIABLE] = str(folder)
    restore = _remember_tokenizers()
    try:
        yield
    finally:
        restore()
        del os.environ[TRIED_VARIABLE]


def _remember_tokenizers() -> Callable[[], None]:
    """Returns what undoes it."""
    from quire_engine.frontend import tokenizer

    def try_once(folder: Path) -> None:
        file = folder / "tokenizer.json"
        digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "none"
        passed = Path(os.environ[TRIED_VARIABLE], digest)
        if not passed.exists():
            actual(folder)
            passed.touch()

    actual = tokenizer.try_tokenizer
    tokenizer.try_tokenizer = try_once
    return lambda: setattr(tokenizer, "try_tokenizer", actual)


@contextlib.contextmanager
def forked_children() -> Iterator[None]:
    """Have a fork server start what this process starts as `python -m module`."""
    import torch

    if sys.platform != "linux" or torch.version.cuda is not None:  # imports of a CUDA build start threads
        yield
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # As in `start_module`: a child that differs in what libraries read is not forked.
    variables = {"GOMP_SPINCOUNT": "20000", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from support.fork_server import main; main({theirs.fileno()})", *["-" * 60] * 4],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={
            **variables,
            MARK: "1",
            "OPENBLAS_NUM_THREADS": "1",  # numpy's would be threads from the start, and a fork has none of them
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )
    theirs.close()
    try:
        restore = _use(ForkServer(ours, variables))
        try:
            yield
        finally:
            restore()
    finally:
        ours.close()
        process.wait()


def is_forked(pid: int) -> bool:
    """Whether a child was forked, and not started as a user's is."""
    return f"{MARK}=1" in Path(f"/proc/{pid}/environ").read_text().split("\0")


def _use(server: ForkServer) -> Callable[[], None]:
    """Have `start_module` of this process start through a server. Returns what undoes it."""
    from quire_engine.system import child_process

    class Popen(subprocess.Popen[bytes]):
        def _execute_child(self, *arguments: Any) -> None:
            method = super()._execute_child  # type: ignore[misc]
            asked = inspect.signature(method).bind(*arguments).arguments
            if not server.serves(asked["args"], asked["env"]):
                method(*arguments)
                return
            inherited = {number: number for number in asked["pass_fds"]}
            given = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
            standard = {number: number if mine == -1 else mine for number, mine in given.items()}
            fields = {name: asked[name] for name in ("args", "env", "start_new_session")}
            self.pid = server.start(fields, {**inherited, **standard})
            self._child_created = True
            for mine, theirs in (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread")):
                if asked[theirs] != -1:
                    os.close(asked[mine])

    actual = child_process.subprocess
    child_process.subprocess = SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    return lambda: setattr(child_process, "subprocess", actual)


# -- the server --------------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Entry point of the server, and then of each of its children."""
    module = _serve(socket.socket(fileno=descriptor))
    if module is not None:
        _run(module)


def _run(module: str) -> None:
    """Run it as `python -m` does, to the end of the process: without taking down what the server has imported, which
    would copy all of that memory first. For seconds, on a busy machine."""
    code: object = None
    sys.modules.pop(module, None)  # where a library of ours has imported it, runpy would warn of it
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve(connection: socket.socket) -> str | None:
    """Serve until the other end is closed. Returns a module to run in each child, and None in the server itself."""
    _libc.prctl(_PR_SET_NAME, SERVER_NAME.encode(), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            return None
        for name in LIBRARIES:
            importlib.import_module(name)
        gc.freeze()
        sys.modules["quire_engine.system.memory"].release_code_pages()  # a child would; a fork maps none at first
        request, (has_begun, begins), (is_adopted, adopts) = json.loads(data), os.pipe(), os.pipe()
        deadline = time.monotonic() + 10  # join() returns before the kernel has ended a thread
        while len(os.listdir("/proc/self/task")) > 1:
            assert time.monotonic() < deadline, "a library has started a thread, which a child would not have"
            os.sched_yield()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(begins, str(child).encode())
                os._exit(0)
            os.close(adopts)
            os.read(is_adopted, 1)  # until its parent has ended
            if request["start_new_session"]:
                os.setsid()
            for number in (connection.detach(), has_begun, is_adopted, begins):
                os.close(number)
            return _become(request, descriptors)
        for number in (*descriptors, begins, is_adopted):
            os.close(number)
        child = os.read(has_begun, 64)
        os.waitpid(between, 0)
        os.close(adopts)
        os.read(has_begun, 1)  # until it is closed in the child: as of now its group can be killed
        os.close(has_begun)
        connection.send(child)


def _become(request: dict[str, Any], received: list[int]) -> str:
    """In a new child: take on what `python -m module` would have. Returns the module."""
    targets: list[int] = request["descriptors"]
    above = max(targets) + 1
    for target, number in zip(targets, [_moved(number, above) for number in received], strict=True):
        os.dup2(number, target)
        os.close(number)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    os.nice(max(request["niceness"] - os.nice(0), 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["args"][-1] not in (*CORES, COMPILER):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # xgrammar's handler, which no other child imports
    paths = request["env"]["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*paths, *(path for path in sys.path if path and path not in paths)]
    sys.orig_argv = request["args"]
    _set_command_line(request["args"])
    _import_site_customization()
    module = request["args"][-1]
    _libc.prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    if TRIED_VARIABLE in os.environ:
        _remember_tokenizers()
    if module in CORES:
        _have_own_server()
    return str(module)


def _import_site_customization() -> None:
    """As Python does when it starts: one that the server has not imported, since it is on this child's path only."""
    known = sys.modules.pop("sitecustomize", None)
    found = importlib.util.find_spec("sitecustomize")
    if found is not None and (known is None or found.origin != known.__file__):
        importlib.import_module("sitecustomize")
    elif known is not None:
        sys.modules["sitecustomize"] = known


def _moved(number: int, above: int) -> int:
    import fcntl

    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(number)
    return moved


def _have_own_server() -> None:
    """Fork one off while there is one thread; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _use(ForkServer(ours, os.environ))
        return
    kept = theirs.detach()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    module = _serve(socket.socket(fileno=kept))
    if module is None:
        os._exit(0)
    _run(module)


def _set_command_line(words: list[str]) -> None:
    """Write over the memory of this process's arguments, for who looks at /proc/PID/cmdline."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
