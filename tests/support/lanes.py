"""Which process of pytest-xdist runs which tests: two lanes.

A group's tests run in one process, one after the other, and groups in the order of the collection. The first processes,
as many as there are cores, compute. Further ones run groups that mostly wait by the clock (idle minutes, windows of
alerts, deadlines of watchdogs) and end when there are no more of them; then, and not before, the first processes take
what is left of those, too. So waiting costs no core its time, and no core has more than one process that computes::

    cores = 2, -n 4    gw0, gw1   computing groups, then waiting ones
                       gw2, gw3   waiting groups
"""

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class LaneScheduling(LoadScopeScheduling):
    """A scheduler of groups.

    `--dist loadgroup` has no effect with pytest 9.2 and pytest-xdist 3.8: it sends groups as changed node ids, and node
    ids do not change any more (pytest-xdist issue 1386).

    Args:
        config: of the session.
        log: pytest-xdist's.
        group_of: node id → group.
        waits: whether a group mostly waits.
        num_cores: processes that compute.
    """

    def __init__(
        self,
        config: pytest.Config,
        log: Any,
        group_of: Callable[[str], str],
        waits: Callable[[str], bool],
        num_cores: int,
    ) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the order is that of the collection
        self._group_of, self._waits, self._num_cores = group_of, waits, num_cores

    def _split_scope(self, nodeid: str) -> str:
        return self._group_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        found = next((group for group in self.workqueue if self._waits(group) == self._only_waits(node)), None)
        if found is not None:
            self.workqueue.move_to_end(found, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not self._only_waits(node) or any(map(self._waits, self.workqueue)):
            super()._reschedule(node)
        elif not node.shutting_down:
            node.shutdown()

    def _only_waits(self, node: WorkerController) -> bool:
        return int(node.gateway.id.removeprefix("gw")) >= self._num_cores
