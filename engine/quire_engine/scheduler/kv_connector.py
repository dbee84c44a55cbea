"""KVConnector: the seam between the scheduler and a store of KV blocks beside the KV cache.

::

    waiting ──► WAITING_FOR_REMOTE_KVS ──► waiting ──► running
         begin_load: its next blocks      place_loaded: they are loaded and checked,
         are stored, and are loaded       and the prefix cache has them

A request that waits for blocks holds none, and no other request waits for it: it comes back to the front of the queue
when its blocks are loaded, or the load has failed, and then it is admitted like all others. So a load that fails, comes
late or belongs to a request that has ended costs no more than its time.
"""

from typing import Protocol

from quire_engine.messages import SchedulerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue, RequestQueue
from quire_engine.stats import KVConnectorStats


class KVConnector(Protocol):
    """Called by the scheduler; in each step in the order of the methods."""

    loading: FCFSRequestQueue
    """Requests that wait for blocks."""

    def has_work(self) -> bool:
        """Whether a step has something to do for it, even if it computes nothing."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Choose what is saved, before anything of the step is allocated."""

    def place_loaded(self, waiting: RequestQueue) -> bool:
        """Allocate blocks for loaded content, file them in the prefix cache, and put the requests that waited for it
        back to the front. The connector refers to the blocks until `end_step`.

        Returns:
            False if a request's blocks do not fit yet: then no other request is to be admitted before it.
        """

    def begin_load(self, request: Request, num_computed_blocks: int) -> bool:
        """Load the blocks of a waiting request that follow its prefix hit, if they are stored.

        Args:
            request: at the front of the queue.
            num_computed_blocks: its prefix hit.

        Returns:
            Whether they are. Then the request has to leave the queue, as it is in `loading` now.
        """

    def end_step(self, scheduler_output: SchedulerOutput) -> None:
        """Set the step's `kv_connector_metadata`."""

    def step_succeeded(self, step: int) -> None:
        """All blocks that this step or an earlier one computed are there."""

    def step_failed(self, waiting: RequestQueue) -> None:
        """No step is in flight, and all cached content was forgotten: end all loads, and put back the requests."""

    def make_stats(self) -> KVConnectorStats:
        """The present numbers."""

    def close(self) -> None:
        """End what it has open; nothing follows."""
