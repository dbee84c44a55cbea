"""The pressure on the host, from /proc and control groups as kernels with and without it show them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from quire_cli.server.host_pressure import HostPressure
from quire_client.health_details import Host
from quire_client.symptoms import SYMPTOMS, Limit

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A stand-in for /proc and the control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.groups, self.now = folder / "proc", folder / "cgroup", 100.0
        self.busy_s = 1000.0
        for path in (self.proc / "pressure", self.proc / "self", self.groups / "serve"):
            path.mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("4:memory:/x\n0::/serve\n")

    def stall(self, seconds: float, resource: str = "cpu", folder: Path | None = None) -> None:
        path = (folder or self.proc / "pressure") / (resource if folder is None else f"{resource}.pressure")
        path.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={1e6 * seconds:.0f}\nfull avg10=0 total=7\n")

    def run(self, pid: int, name: str, cpu_s: float, parent: int = 1) -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        text = f"{pid} ({name}) S {parent} {' 0' * 9} {cpu_s * TICKS:.0f} 0{' 0' * 37}\n"
        (self.proc / str(pid) / "stat").write_text(text)

    def busy(self, seconds: float) -> None:
        self.busy_s += seconds
        (self.proc / "stat").write_text(f"cpu  {self.busy_s * TICKS:.0f} 0 0 999 5 0 0 0 0 0\ncpu0 1 2\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def pressure(machine: Machine) -> HostPressure:
    return HostPressure(machine.proc, machine.groups, lambda: machine.now)


def test_who_else_takes_the_cpus_is_named_while_tasks_wait_for_them(machine: Machine) -> None:
    watch = pressure(machine)
    for second in range(5):
        machine.stall(0.9 * second)
        machine.busy(2.0)
        machine.run(os.getpid(), "quire", 10.0)
        machine.run(7, "engine (0)", 20 + 0.5 * second, parent=os.getpid())
        machine.run(8, "a neighbour", 30 + 1.5 * second)
        shown = watch.look()
        machine.now += 1.0
    assert shown.cpu_pressure == pytest.approx(0.9)
    assert shown.cpus_of_others == pytest.approx(1.5, abs=0.05)
    assert shown.busiest == "a neighbour (process 8)"
    assert shown.cpus == os.cpu_count()
    assert shown.memory_pressure is None
    for _ in range(8):  # it is over
        shown = watch.look()
        machine.now += 1.0
    assert shown == Host(cpus=os.cpu_count(), cpu_pressure=0.0)


def test_processes_are_looked_at_from_the_limit_of_the_table_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_looked_at(limit: float) -> bool:
        row = replace(SYMPTOMS["host_cpu"], limits={"looked_at": Limit(limit)})
        monkeypatch.setitem(SYMPTOMS, "host_cpu", row)
        watch = pressure(machine)
        for second in range(3):
            machine.stall(0.5 * second)
            machine.busy(2.0)
            machine.run(8, "a neighbour", 30.0 + second)
            shown = watch.look()
            machine.now += 1.0
        return shown.busiest is not None

    assert is_looked_at(0.4)
    assert not is_looked_at(0.6)


def test_without_pressure_no_process_is_looked_at(machine: Machine) -> None:
    watch = pressure(machine)
    (machine.proc / "stat").write_text("nonsense")
    for _ in range(3):
        machine.stall(1.0)
        machine.stall(0.5, "memory")
        shown = watch.look()
        machine.now += 1.0
    assert shown == Host(cpus=os.cpu_count(), cpu_pressure=0.0, memory_pressure=0.0)


def test_the_own_control_group_counts_where_the_kernel_has_one(machine: Machine) -> None:
    watch = pressure(machine)
    for second in range(3):
        machine.stall(1.0 * second)
        machine.stall(0.25 * second, folder=machine.groups / "serve")
        machine.stall(0.5 * second, "memory")
        shown = watch.look()
        machine.now += 1.0
    assert (shown.cpu_pressure, shown.memory_pressure) == (0.25, 0.5)


@pytest.mark.parametrize("content", [None, "", "some", "some avg10=1 avg60=1 avg300=1 total=x\n"])
def test_a_kernel_without_it_shows_none(machine: Machine, content: str | None) -> None:
    if content is not None:
        (machine.proc / "pressure" / "cpu").write_text(content)
    (machine.proc / "self" / "cgroup").unlink()
    watch = pressure(machine)
    watch.look()
    machine.now += 1.0
    assert watch.look() == Host(cpus=os.cpu_count())


def test_of_this_machine_it_says_something() -> None:
    now = 0.0
    watch = HostPressure(clock=lambda: now)
    watch.look()
    now += 1.0
    assert watch.look().cpus == os.cpu_count()
