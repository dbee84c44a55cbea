"""RestartPolicy: when the next engine is started after one has died. Outage: why requests are rejected meanwhile."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.errors import EngineUnavailableError
from quire_engine.system.crash_loop import STABLE_SECONDS, CrashLoop


class RestartPolicy(CrashLoop):
    """Counts an engine as having worked when it sent a token, showed which request is faulty, or was ready for a while.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._ready_at: float | None = None
        self._made_progress = False

    def engine_started(self) -> None:
        """Note that an engine is about to be started."""
        self._ready_at, self._made_progress = None, False

    def engine_is_ready(self) -> None:
        """Note that it is ready. Its uptime counts from here: a large model may take minutes to load, and die then."""
        self._ready_at = self._clock()

    def note_progress(self) -> None:
        """Note that it did work which the next engine need not repeat."""
        self._made_progress = True

    def delay_after_death(self, has_worked: bool = False) -> float:
        """Seconds to wait before the next start."""
        lived_long = self._ready_at is not None and self._clock() - self._ready_at > STABLE_SECONDS
        return super().delay_after_death(has_worked or self._made_progress or lived_long)


@dataclass(slots=True)
class Outage:
    """Why requests are rejected or held: no engine core is up."""

    reason: str
    """What ended the last one."""
    what_follows: str
    """What follows, while no start has failed."""
    next_try_at: float = 0.0
    """On the monotonic clock; in the past while a start is under way."""
    num_deaths: int = 0
    """Deaths in a row without an output, once there are too many."""

    @property
    def seconds_to_next_try(self) -> float:
        return max(self.next_try_at - time.monotonic(), 0.0)

    def __str__(self) -> str:
        if not self.num_deaths:
            return f"{self.reason}; {self.what_follows}"
        seconds = math.ceil(self.seconds_to_next_try)
        when = f"in {seconds} s" if seconds else "now"
        return (
            f"the engine died {self.num_deaths} times in a row without an output; the last time: {self.reason}; "
            f"it is tried again {when}"
        )

    def error(self) -> EngineUnavailableError:
        """The error of requests that are rejected."""
        return EngineUnavailableError(f"the engine is not running: {self}", self.seconds_to_next_try)
