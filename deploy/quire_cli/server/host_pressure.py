"""HostPressure: whether tasks wait for the host's CPUs or memory, and which other process takes the CPUs.

The kernel's pressure stall information (PSI, Documentation/accounting/psi.rst) counts the time in which at least one
task waited: of the control group of `quire serve` where the kernel has one, else of the host. Pressure alone does not
tell a neighbour from the server's own load, so while there is some, the CPU time of all other processes is measured,
too.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire_client.health_details import Host
from quire_client.symptoms import SYMPTOMS
from quire_engine.system.process_state import process_stat

WINDOW_S = 5.0
_SAMPLE_S = 1.0
_MICROSECOND = 1e-6
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)
"""Columns of the line `cpu` in /proc/stat: user, nice, system, irq, softirq, steal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    at: float
    cpu_s: float | None
    memory_s: float | None
    busy_ticks: int = 0
    """The sum over all CPUs, since the host started."""
    processes: Mapping[int, tuple[str, int, bool]] = field(default_factory=dict)
    """By id: name, CPU time in ticks, whether it is the server's. Empty where they were not looked at."""


class HostPressure:
    """Takes a sample a second, and compares those of the last `WINDOW_S`.

    Args:
        proc: where the kernel shows processes.
        control_groups: where it shows control groups (version 2).
        clock: seconds, monotonic.
    """

    def __init__(
        self, proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._proc, self._clock = proc, clock
        self._groups = [control_groups / group.lstrip("/") for group in _own_groups(proc)]
        self._samples: deque[_Sample] = deque()
        self._shown = Host()

    def look(self) -> Host:
        """The figures of the last `WINDOW_S` seconds; takes a sample if the last one is a second old."""
        now = self._clock()
        if not self._samples or now - self._samples[-1].at >= _SAMPLE_S:
            while self._samples and now - self._samples[0].at > WINDOW_S:
                self._samples.popleft()
            sample = _Sample(at=now, cpu_s=self._stalled_s("cpu"), memory_s=self._stalled_s("memory"))
            before = self._samples[-1] if self._samples else sample
            # A look at 300 processes takes 1 to 5 ms.
            looked_at = SYMPTOMS["host_cpu"].limits["looked_at"].begins
            if (_growth(before.cpu_s, sample.cpu_s) or 0.0) > looked_at * (now - before.at):
                sample = self._with_processes(sample)
            self._samples.append(sample)
            self._shown = self._compare()
        return self._shown

    def _compare(self) -> Host:
        first, last = self._samples[0], self._samples[-1]
        passed = last.at - first.at
        if passed <= 0:
            return Host()

        def pressure(before: float | None, now: float | None) -> float | None:
            stalled = _growth(before, now)
            return None if stalled is None else round(min(stalled / passed, 1.0), 3)

        cpus_of_others, busiest = self._others(last)
        return Host(
            cpus=os.cpu_count() or 1, cpu_pressure=pressure(first.cpu_s, last.cpu_s),
            memory_pressure=pressure(first.memory_s, last.memory_s), cpus_of_others=cpus_of_others, busiest=busiest,
        )  # fmt: skip

    def _others(self, last: _Sample) -> tuple[float | None, str | None]:
        """What the processes took since the first sample that has them: CPUs, and which took most."""
        first = next(one for one in self._samples if one.processes or one is last)
        if first is last or not last.processes:
            return None, None
        taken = {
            pid: max(ticks - first.processes.get(pid, (name, 0, is_own))[1], 0)
            for pid, (name, ticks, is_own) in last.processes.items()
        }
        own = sum(ticks for pid, ticks in taken.items() if last.processes[pid][2])
        busy_s = (last.busy_ticks - first.busy_ticks - own) / os.sysconf("SC_CLK_TCK")
        others = [pid for pid in taken if not last.processes[pid][2] and taken[pid] > 0]
        busiest = max(others, key=lambda pid: taken[pid], default=0)
        name = f"{last.processes[busiest][0]} (process {busiest})" if busiest else None
        return round(max(busy_s, 0.0) / (last.at - first.at), 2), name

    def _stalled_s(self, resource: str) -> float | None:
        """None where the kernel does not count it."""
        paths = (*(group / f"{resource}.pressure" for group in self._groups), self._proc / "pressure" / resource)
        return next((found for path in paths if (found := _total_s(path)) is not None), None)

    def _with_processes(self, sample: _Sample) -> _Sample:
        try:
            columns = (self._proc / "stat").read_text().partition("\n")[0].split()
            busy = sum(int(columns[index]) for index in _BUSY_COLUMNS)
            pids = [int(name) for name in os.listdir(self._proc) if name.isdecimal()]
            stats = {pid: stat for pid in pids if (stat := process_stat(pid, self._proc)) is not None}
        except (OSError, ValueError, IndexError):
            return sample
        own = {os.getpid()}
        # A child may have a smaller id than its parent.
        while more := {pid for pid, stat in stats.items() if stat.parent in own and pid not in own}:
            own |= more
        processes = {pid: (stat.name, stat.cpu_ticks, pid in own) for pid, stat in stats.items()}
        return replace(sample, busy_ticks=busy, processes=processes)


def _growth(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else max(now - before, 0.0)


def _total_s(path: Path) -> float | None:
    try:
        words = path.read_text().split()
        return int(words[words.index("some") + 4].removeprefix("total=")) * _MICROSECOND
    except (OSError, ValueError, IndexError):
        return None


def _own_groups(proc: Path) -> list[str]:
    """The path of this process's control group of version 2; none where there are none."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    return [line.removeprefix("0::") for line in lines if line.startswith("0::")]
