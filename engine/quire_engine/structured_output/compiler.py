"""The grammar compiler's process: `python -m quire_engine.structured_output.compiler`, started by `CompilerProcess`.

It loads the tokenizer once and then forks a process for every grammar that it is sent. So each grammar has a time and a
memory limit that the kernel enforces, even inside the library's C++; one that exceeds them, or crashes, affects no
other, and nothing has to be loaded again::

    engine core ◄── pipes ──► this process: forks, passes results on ◄── pipe ── job: one grammar, then exits
                                                                     ◄── pipe ── job: …

Which grammars are compiled, and for how long, is decided in the engine core. When that ends, however it ends, stdin
ends; then this process kills its jobs and ends too.
"""

import contextlib
import os
import selectors
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire_engine.errors import is_failure
from quire_engine.structured_output.compiler_messages import (
    CompilerArguments,
    CompileRequest,
    CompilerReady,
    FrameReader,
    JobEnded,
    KillJob,
    StartJob,
    to_frame,
)
from quire_engine.system.child_process import die_with_parent
from quire_engine.system.memory import limit_memory_growth

if TYPE_CHECKING:
    from quire_engine.structured_output.compile_job import GrammarCompiler

COMPILE_SECONDS = 5.0
"""Wall-clock time that one grammar may take; usual schemas take milliseconds."""
COMPILE_MEMORY_BYTES = 1 << 30
"""Memory that one grammar may take on top of this process's own."""
NICENESS = 5
"""Niceness of jobs: steps come first when there are not enough cores."""
OUT_OF_MEMORY = 2
"""Exit code of a job that reached its memory limit after it had compiled."""


@dataclass(slots=True)
class _Job:
    number: int
    pid: int
    result: bytearray = field(default_factory=bytearray)


class CompilerServer:
    """Forks jobs and passes their results on. One thread, which never compiles itself.

    Args:
        compiler: what a job runs.
        output: descriptor that results are written to.
    """

    def __init__(self, compiler: "GrammarCompiler", output: int) -> None:
        self._compiler = compiler
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        """By the descriptor that the result comes from."""

    def run(self, requests: int) -> None:
        """Serve until the descriptor `requests` ends."""
        self._selector.register(requests, selectors.EVENT_READ)
        frames, decoder = FrameReader(), msgspec.msgpack.Decoder[StartJob | KillJob](StartJob | KillJob)
        while True:
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 20)
                if key.fd != requests:
                    self._take_result(key.fd, data)
                    continue
                for payload in frames.feed(data):
                    message = decoder.decode(payload)
                    if isinstance(message, StartJob):
                        self._start(message)
                    else:
                        self._kill(message.number)
                if not data:
                    self._kill(None)
                    return

    def _kill(self, number: int | None) -> None:
        """Kill a job; None: all. Its pipe is read to the end like any other's."""
        for job in self._jobs.values():
            if number in (None, job.number):
                os.kill(job.pid, signal.SIGKILL)

    def _start(self, job: StartJob) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)  # else the engine core would not see that this process has died before its jobs did
                os.close(self._output)
                _limit_job(job.cpu_seconds)
                result = self._compiler.compile(msgspec.msgpack.decode(job.request, type=CompileRequest))
                _write_all(writer, msgspec.msgpack.encode(result))
                os._exit(0)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        self._jobs[reader] = _Job(job.number, pid)
        self._selector.register(reader, selectors.EVENT_READ)

    def _take_result(self, descriptor: int, data: bytes) -> None:
        if data:
            self._jobs[descriptor].result += data
            return
        self._selector.unregister(descriptor)
        job = self._jobs.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(job.pid, 0)
        _write_all(self._output, to_frame(JobEnded(job.number, status, b"" if status else bytes(job.result))))


def _limit_job(cpu_seconds: float | None) -> None:
    """Set limits of time and memory, priority, no core file, and SIGKILL when the parent ends.

    The limit of CPU time does not depend on the machine's load.
    """
    if cpu_seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    os.nice(max(NICENESS - os.nice(0), 0))  # a process that was itself started nice may not lower its niceness
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)  # SIGALRM's default action ends the process, in C++ too
    limit_memory_growth(COMPILE_MEMORY_BYTES)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine core decides
    output = os.dup(1)
    os.dup2(2, 1)  # prints must not go into our messages
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115  # and nothing of the frames behind it
    if not line.endswith(b"\n"):
        return
    arguments = msgspec.json.decode(line, type=CompilerArguments)
    os.nice(arguments.niceness)
    try:
        from quire_engine.frontend.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Path(arguments.tokenizer_path))  # first: see `xgrammar`

        from quire_engine.structured_output.compile_job import GrammarCompiler

        compiler = GrammarCompiler(tokenizer, arguments)
    except BaseException as error:
        if not is_failure(error):
            raise
        _write_all(output, to_frame(CompilerReady(error=f"{type(error).__name__}: {error}")))
        return
    with contextlib.suppress(BrokenPipeError):  # the engine core has ended
        _write_all(output, to_frame(CompilerReady(compiler.tokenizer_info.serialize_json())))
        CompilerServer(compiler, output).run(0)
    os._exit(0)  # libraries complain on stderr when Python takes them down, and there is nothing to save


if __name__ == "__main__":
    main()
