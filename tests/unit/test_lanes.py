"""How the tests' own scheduler deals groups out to processes."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.lanes import LaneScheduling

CORES = 2
TESTS = [f"{group}::{number}" for group in ("w-1", "a", "w-2", "b", "c") for number in range(4)]


class Node:
    """A process of pytest-xdist that remembers what it was sent."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.indexes: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        assert not self.shutting_down
        self.indexes += indexes

    def shutdown(self) -> None:
        self.shutting_down = True


def ran(num_nodes: int, tests: list[str], slowest: int = -1) -> list[list[str]]:
    """The groups of each process in their order; a test takes one turn, and the slowest process runs one in ten."""
    config: Any = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True, tx=[f"{num_nodes}*popen"]))
    config.getvalue = lambda name: config.option.tx
    log = SimpleNamespace(loadscopesched=lambda *words: None)
    scheduler = LaneScheduling(
        config, log, lambda name: name.partition("::")[0], lambda group: group.startswith("w"), num_cores=CORES
    )
    nodes: list[Any] = [Node(number) for number in range(num_nodes)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    done = [0] * num_nodes
    for turn in range(1000):
        for number, node in enumerate(nodes):
            # A process runs a test once it has the next one, or knows that there is none.
            is_next = done[number] + (not node.shutting_down) < len(node.indexes)
            if is_next and (number != slowest or turn % 10 == 0):
                done[number] += 1
                scheduler.mark_test_complete(node, node.indexes[done[number] - 1])
    assert not scheduler.has_pending
    assert sorted(index for node in nodes for index in node.indexes) == list(range(len(tests)))
    return [list(dict.fromkeys(tests[index].partition("::")[0] for index in node.indexes)) for node in nodes]


def test_further_processes_run_what_waits_and_the_first_ones_all_else() -> None:
    first, second, third, fourth = ran(4, TESTS)
    assert {*first, *second} == {"a", "b", "c"}
    assert (third, fourth) == (["w-1"], ["w-2"])


def test_the_first_processes_help_with_what_waits_once_there_is_nothing_else() -> None:
    first, second, third = ran(3, TESTS, slowest=2)
    assert third == ["w-1"]
    assert {*first, *second} == {"a", "b", "c", "w-2"}
    assert "w-2" in (first[-1], second[-1])


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_all_tests_run_whatever_there_is(num_nodes: int) -> None:
    ran(num_nodes, [test for test in TESTS if test.startswith("w")])
    ran(num_nodes, [test for test in TESTS if not test.startswith("w")])
    ran(num_nodes, TESTS)
    ran(num_nodes, TESTS[:1])
