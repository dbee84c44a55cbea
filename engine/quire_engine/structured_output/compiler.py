"""The grammar compiler's process: `python -m quire_engine.structured_output.compiler`, started by `CompilerProcess`.

It loads the tokenizer once and then forks for every grammar. So each has a time and a memory limit that the kernel
enforces, even inside the library's C++; one that runs into them, or crashes, takes nobody along, and nothing has to be
loaded again::

    engine core ◄── pipes ──► this process: reads requests, waits for jobs ◄── pipe ── job: one grammar, then exits
                                                                           ◄── pipe ── job: …

When the engine core ends, however it ends, stdin ends; then this process kills its jobs and ends too.
"""

import ctypes
import os
import resource
import selectors
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from quire_engine.structured_output.protocol import (
    CancelRequest,
    CompilerArguments,
    CompileRequest,
    CompileResult,
    CompilerReady,
    read_frame,
    to_frame,
)

if TYPE_CHECKING:
    from quire_engine.structured_output.compile_job import GrammarCompiler

__all__ = ["COMPILE_SECONDS", "CompilerServer"]

COMPILE_SECONDS = 5.0
"""How long one grammar may take; usual schemas take milliseconds."""
COMPILE_MEMORY_BYTES = 1 << 30
"""How much one grammar may take beyond what this process has."""
MAX_JOBS = 4
"""Grammars compiled at once, so that one that takes all its time does not hold up the others."""
NICENESS = 5
"""Steps come first when there are not enough cores."""


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Job:
    """One forked compilation."""

    request: CompileRequest
    pid: int
    result: bytearray = field(default_factory=bytearray)


class CompilerServer:
    """Reads requests, forks jobs, passes their results on. One thread; never does any of the work itself.

    Args:
        compiler: what a job runs.
        output: descriptor that results are written to.
    """

    def __init__(self, compiler: "GrammarCompiler", output: int) -> None:
        self._compiler = compiler
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[CompileRequest] = deque()
        self._received = bytearray()

    def run(self, requests: int) -> None:
        """Serve until the descriptor `requests` ends."""
        self._selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._jobs:
                    self._read_result(key.fd)
                elif not self._read_requests(key.fd):
                    for job in self._jobs.values():
                        os.kill(job.pid, signal.SIGKILL)
                    return
            while self._waiting and len(self._jobs) < MAX_JOBS:
                self._start(self._waiting.popleft())

    def _read_requests(self, descriptor: int) -> bool:
        """Take in what has come; False at the end."""
        data = os.read(descriptor, 1 << 20)
        self._received += data
        while len(self._received) >= 4:
            end = 4 + int.from_bytes(self._received[:4], "little")
            if len(self._received) < end:
                break
            request = msgspec.msgpack.decode(self._received[4:end], type=CompileRequest | CancelRequest)
            del self._received[:end]
            if isinstance(request, CancelRequest):
                self._cancel(request.job_id)
            else:
                self._waiting.append(request)
        return bool(data)

    def _cancel(self, job_id: int) -> None:
        """Skip a job that waits; kill one that runs, whose end is then read like any other's."""
        self._waiting = deque(request for request in self._waiting if request.job_id != job_id)
        for job in self._jobs.values():
            if job.request.job_id == job_id:
                os.kill(job.pid, signal.SIGKILL)

    def _start(self, request: CompileRequest) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)  # else the engine core would not see that this process has died before its jobs did
                os.close(self._output)
                _limit_job()
                _write_all(writer, msgspec.msgpack.encode(self._compiler.compile(request)))
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        self._jobs[reader] = _Job(request, pid)
        self._selector.register(reader, selectors.EVENT_READ)

    def _read_result(self, descriptor: int) -> None:
        job = self._jobs[descriptor]
        data = os.read(descriptor, 1 << 20)
        job.result += data
        if data:
            return
        self._selector.unregister(descriptor)
        del self._jobs[descriptor]
        os.close(descriptor)
        _, status = os.waitpid(job.pid, 0)
        if status == 0:
            _write_all(self._output, to_frame(bytes(job.result)))
        else:
            _write_all(self._output, to_frame(_explain(job.request, status)))


def _limit_job() -> None:
    """Wall clock, memory, priority, no core file, and an end when this process ends, however it does."""
    os.nice(NICENESS)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)  # SIGALRM's default action ends the process, in C++ too
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + COMPILE_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _explain(request: CompileRequest, status: int) -> CompileResult:
    """What to say of a job that did not live to say it itself."""
    name = request.kind
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        error = f"the {name} takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        return CompileResult(request.job_id, error=error, cacheable=False)
    error = f"the {name} is too complex: compiling it takes too much memory or nests too deeply; simplify it"
    return CompileResult(request.job_id, error=error)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine core decides
    output = os.dup(1)
    os.dup2(2, 1)  # whatever prints something must not print it into our messages
    with os.fdopen(os.dup(0), "rb", buffering=0) as stream:
        payload = read_frame(stream)
    if payload is None:
        return
    try:
        from quire_engine.structured_output.compile_job import GrammarCompiler

        compiler = GrammarCompiler(msgspec.msgpack.decode(payload, type=CompilerArguments))
    except Exception as error:
        _write_all(output, to_frame(CompilerReady(error=f"{type(error).__name__}: {error}")))
        return
    _write_all(output, to_frame(CompilerReady(compiler.tokenizer_info.serialize_json())))
    CompilerServer(compiler, output).run(0)
    os._exit(0)  # libraries complain on stderr when Python takes them down, and there is nothing to save


if __name__ == "__main__":
    main()
