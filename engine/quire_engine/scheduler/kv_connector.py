"""KVConnector: the seam between the scheduler and whatever keeps KV blocks beside the KV cache.

::

    waiting ──► WAITING_FOR_REMOTE_KVS ──► waiting ──► running
         begin_load: its next blocks      place_loaded: they are there, checked, and
         are stored, and asked for        stand in the prefix cache like any other

A request that waits for blocks holds none, and nobody waits for it: it comes back to the front of the queue when its
blocks are there, or can not be had, and then it is admitted like all others. So a load can fail, come late or belong
to a request that has gone, and all that is lost is the time.
"""

from typing import Protocol

from quire_engine.messages import SchedulerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue, RequestQueue
from quire_engine.stats import KVConnectorStats


class KVConnector(Protocol):
    """What the scheduler asks; in each step in the order of the methods."""

    loading: FCFSRequestQueue
    """Requests that wait for blocks."""

    def has_work(self) -> bool:
        """Whether a step has something to do for it, even if it computes nothing."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Choose what is saved, before anything of the step is allocated."""

    def place_loaded(self, waiting: RequestQueue) -> bool:
        """Allocate blocks for what was loaded, file them in the prefix cache, and put the requests that waited for it
        back to the front. The blocks are referred to until `end_step`.

        Returns:
            False if a request's blocks do not fit yet: then no other request is to be admitted before it.
        """

    def begin_load(self, request: Request, num_computed_blocks: int) -> bool:
        """Asked before a waiting request is admitted.

        Args:
            request: at the front of the queue.
            num_computed_blocks: its prefix hit.

        Returns:
            Whether the blocks that follow are stored. Then it is to leave the queue, as it is in `loading` now.
        """

    def end_step(self, scheduler_output: SchedulerOutput) -> None:
        """Write into the step what its workers are to do."""

    def step_succeeded(self, step: int) -> None:
        """All blocks that this step or an earlier one computed are there."""

    def step_failed(self, waiting: RequestQueue) -> None:
        """No step is in flight, and all cached content was forgotten: end all loads, and put back the requests."""

    def make_stats(self) -> KVConnectorStats:
        """The present numbers."""

    def close(self) -> None:
        """End what it has open; nothing follows."""
