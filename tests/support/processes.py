"""Child processes of tests, and what is to be seen of a process from outside."""

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from quire_engine.system.child_process import start_module
from support.fork_server import SERVER_NAME


def start_python(source: str, *arguments: str | bytes, pass_fds: Iterable[int] = ()) -> "subprocess.Popen[bytes]":
    """Run source text in a process of its own, with `sys.argv[1:]` and pipes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=tuple(pass_fds),
        env=environment,
    )


def start_forked(source: str, *arguments: str | bytes, pass_fds: Collection[int] = ()) -> "subprocess.Popen[bytes]":
    """The same, forked from the tests' fork server: for source that imports torch, which takes two seconds."""
    words = [os.fsdecode(one) for one in (textwrap.dedent(source), *arguments)]
    return start_module("support.source_process", words, stdout=subprocess.PIPE, pass_fds=pass_fds)


@contextlib.contextmanager
def ended(processes: "Iterable[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Whatever happens inside, the processes are gone afterwards."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def state(pid: int) -> str:
    """One letter, as in /proc; empty when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has taken note yet."""
    return state(pid) in ("", "Z", "X")


def parent(pid: int) -> int:
    """The process id of a process's parent; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, whichever thread started them, without the tests' own helper."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            found += map(int, (thread / "children").read_text().split())
    return [child for child in found if _name(child) != SERVER_NAME]


def command_line(pid: int) -> str:
    """The words that a process was started with; empty when there is no such process."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip())
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_seconds(*pids: int) -> float:
    """CPU time that processes have used so far; nothing for one that is gone."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


async def idles(*pids: int, most: float, seconds: float = 1.0) -> bool:
    """Whether processes use next to no CPU time.

    What else runs on the machine makes each wake-up dearer for a while, so one interval of ten is enough: a process
    that polls has none.

    Args:
        pids: of the processes.
        most: CPU seconds of all of them together; they are counted in ticks of 10 ms.
        seconds: of an interval.
    """
    for _ in range(10):
        before = cpu_seconds(*pids)
        await asyncio.sleep(seconds)  # the interval that is measured
        if cpu_seconds(*pids) - before <= most:
            return True
    return False


def cpu_seconds_by_name(pids: Iterable[int], names: Mapping[str, str]) -> Counter[str]:
    """CPU time so far of this process, as `client`, and of others by what their command lines have in them.

    Args:
        pids: of the others.
        names: part of a command line → under which name it counts; what has none of them is `other`.
    """
    seconds = Counter({"client": time.process_time()})
    for pid in pids:
        command = command_line(pid)
        name = next((name for part, name in names.items() if part in command), "other")
        seconds[name] += cpu_seconds(pid)
    return seconds


def _name(pid: int) -> str:
    """The name of a process's first thread; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> list[str]:
    """What /proc/PID/stat says, from the state on; nothing when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether a condition comes true within a time. Polls back off: most ask a server, which they slow down."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        time.sleep(min(max(0.01, waited / 10), 0.2))
    return True


def open_descriptors() -> set[str]:
    """Numbers of this process's descriptors, and what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {item for item in found if "/proc/" not in item}


def error_in_a_child(work: Callable[[], None]) -> int:
    """The number of the OSError that it raises in a process of its own; 0 if it raises none."""
    pid = os.fork()
    if not pid:
        code = 0
        try:
            work()
        except OSError as error:
            code = error.errno or 255
        except BaseException:
            code = 254
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
