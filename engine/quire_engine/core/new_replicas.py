"""NewReplicas: starts replicas beside others that serve. And whether there is memory for them.

They are started in threads, all at once, and all of them are ready in the end or none is there.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence

from quire_engine.core.supervised_client import SupervisedClient
from quire_engine.errors import ScalingError
from quire_engine.system.memory import available_memory_bytes


class NewReplicas:
    """Those that are being started, until they are."""

    def __init__(self) -> None:
        self._replicas: list[SupervisedClient] = []
        self._is_closed = False
        self._lock = threading.Lock()

    async def start(self, makers: Sequence[Callable[[], SupervisedClient]]) -> list[SupervisedClient]:
        """Start one with each of these, and wait until all are ready.

        Raises:
            Exception: what kept the first one from starting that could not; the others have ended, too.
        """
        starts = (asyncio.to_thread(self._start, make) for make in makers)
        results = await asyncio.gather(*starts, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.discard()
            raise errors[0]
        return [result for result in results if not isinstance(result, BaseException)]

    def _start(self, make: Callable[[], SupervisedClient]) -> SupervisedClient:
        replica = make()
        with self._lock:
            self._replicas.append(replica)
            is_closed = self._is_closed
        if is_closed:
            replica.shutdown()
        replica.wait_until_ready()
        return replica

    def are_taken(self) -> None:
        """The caller owns them from now on."""
        with self._lock:
            self._replicas = []

    async def discard(self) -> None:
        """End them, while the event loop goes on."""
        with self._lock:
            replicas, self._replicas = self._replicas, []
        await asyncio.gather(*(asyncio.to_thread(replica.shutdown) for replica in replicas))

    def close(self) -> list[SupervisedClient]:
        """Whatever is started from now on ends at once. Returns those that are being started, for the caller to end.

        May be called from any thread.
        """
        with self._lock:
            self._is_closed = True
            return list(self._replicas)


def require_room(replicas: Sequence[SupervisedClient], num_new: int) -> None:
    """Make sure that the machine's memory holds more replicas like these.

    What theirs may still take is not free: a KV cache on the CPU takes its pages only as it uses them.

    Raises:
        ScalingError: it does not.
    """
    cache_bytes = min(replica.ready.cpu_cache_bytes for replica in replicas)
    one = cache_bytes + max(replica.bytes_at_start for replica in replicas)
    left = available_memory_bytes() - sum(replica.unused_cache_bytes for replica in replicas)
    if num_new * one > left:
        raise ScalingError(
            f"there is no memory for {len(replicas) + num_new} replicas: another one takes about {one >> 20} MiB, "
            f"{cache_bytes >> 20} of them for a KV cache as large as that of the others, and {max(left, 0) >> 20} MiB "
            "are free beside what the caches of those may still take; end what else runs here, or lower "
            "kv_cache_memory_bytes in model.json and load the model again"
        )
