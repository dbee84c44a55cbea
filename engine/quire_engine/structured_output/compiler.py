"""The grammar compiler's process: `python -m quire_engine.structured_output.compiler`, started by `CompilerProcess`.

It loads the tokenizer once and then forks a process for every grammar that it is sent. So each grammar has a time and a
memory limit that the kernel enforces, even inside the library's C++; one that exceeds them, or crashes, affects no
other, and nothing has to be loaded again::

    engine core ◄── control ──► this process: forks, reports the ends ── fork ──► job: one grammar, then exits
         ▲                                                                          │
         └──────────────────────────── a file in memory ────────────────────────────┘

Which grammars are compiled, and for how long, is decided in the engine core. When that ends, however it ends, the
control socket ends; then this process kills its jobs and ends too.
"""

import contextlib
import math
import os
import selectors
import signal
import socket
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire_engine.errors import is_failure
from quire_engine.structured_output.compiler_messages import (
    COMPILE_SECONDS,
    ENDED,
    KILL,
    MAX_CONTROL_BYTES,
    OUT_OF_MEMORY,
    READY,
    START,
    CompilerArguments,
    CompileRequest,
    memory_file,
    read_file,
)
from quire_engine.system.child_process import die_with_parent
from quire_engine.system.memory import limit_memory_growth
from quire_engine.system.process_state import lower_priority

if TYPE_CHECKING:
    from quire_engine.structured_output.compile_job import GrammarCompiler

COMPILE_MEMORY_BYTES = 1 << 30
"""Memory that one grammar may take on top of this process's own."""


def serve(compiler: "GrammarCompiler", control: socket.socket) -> None:
    """Fork jobs and report their ends, until the control socket ends. One thread, which never compiles itself."""
    jobs: dict[int, tuple[int, int]] = {}  # (job id, process id), by a pipe that ends with the process
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in jobs:
                    selector.unregister(key.fd)
                    job_id, pid = jobs.pop(key.fd)
                    os.close(key.fd)
                    control.send(ENDED.pack(job_id, os.waitpid(pid, 0)[1]))
                    continue
                message, descriptors, *_ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1)
                if descriptors:
                    job_id, cpu_seconds = START.unpack(message)
                    end, pid = _fork_job(compiler, control, cpu_seconds, descriptors[0])
                    os.close(descriptors[0])
                    jobs[end] = job_id, pid
                    selector.register(end, selectors.EVENT_READ)
                    continue
                for job_id, pid in jobs.values():
                    if not message or job_id == KILL.unpack(message)[0]:
                        os.kill(pid, signal.SIGKILL)
                if not message:
                    return


def _fork_job(
    compiler: "GrammarCompiler", control: socket.socket, cpu_seconds: float, descriptor: int
) -> tuple[int, int]:
    """Returns a pipe that ends with the job, and the job's process id."""
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            control.close()  # else the engine core would not see that the parent has died before its jobs did
            _limit_job(cpu_seconds, parent)
            result = compiler.compile(msgspec.msgpack.decode(read_file(descriptor), type=CompileRequest))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.msgpack.encode(result), 0)
            os._exit(0)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    return reader, pid


def _limit_job(cpu_seconds: float, parent: int) -> None:
    """Set limits of time and memory, priority, no core file, and SIGKILL when the parent ends.

    The limit of CPU time does not depend on the machine's load.
    """
    if cpu_seconds < math.inf:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    lower_priority()
    die_with_parent(parent, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)  # SIGALRM's default action ends the process, in C++ too
    limit_memory_growth(COMPILE_MEMORY_BYTES)


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine core decides
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # prints must not go into our messages
    line = open(0, "rb", closefd=False).readline()  # noqa: SIM115
    if not line.endswith(b"\n"):
        return
    arguments = msgspec.json.decode(line, type=CompilerArguments)
    os.nice(arguments.niceness)
    with contextlib.suppress(ConnectionError):  # the engine core has ended
        try:
            from quire_engine.frontend.tokenizer import load_tokenizer

            # First: see `xgrammar`. The frontend tries the tokenizer, and ends the engine if it fails.
            tokenizer = load_tokenizer(Path(arguments.tokenizer_path), plain=True, is_tried=True)

            from quire_engine.structured_output.compile_job import GrammarCompiler

            compiler = GrammarCompiler(tokenizer, arguments)
        except BaseException as error:
            if not is_failure(error):
                raise
            control.send(f"{type(error).__name__}: {error}".encode(errors="replace")[:MAX_CONTROL_BYTES])
            return
        vocabulary = memory_file(compiler.tokenizer_info.serialize_json().encode())
        socket.send_fds(control, [READY], [vocabulary])
        os.close(vocabulary)
        serve(compiler, control)
    os._exit(0)  # libraries complain on stderr when Python takes them down, and there is nothing to save


if __name__ == "__main__":
    main()
