"""CompilerWatch: detects that the grammar compiler's process is stopped or hung. (Its death closes its pipes.)"""

import time
from collections.abc import Callable

from quire_engine.structured_output.compiler import OVERDUE_SECONDS
from quire_engine.system import process_state

LOOK_SECONDS = 0.25
START_SECONDS = 120.0
"""How long it may take to start; usually some seconds."""
SILENCE_SECONDS = 3 * OVERDUE_SECONDS
"""While it has anything to compile, a job ends or yields at least every `OVERDUE_SECONDS`."""


class CompilerWatch:
    """Looks at one process, `LOOK_SECONDS` apart, while something is expected of it.

    Args:
        pid: the process.
        clock: seconds, monotonic.
        is_stopped: whether a process is stopped.
    """

    def __init__(
        self,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[int], bool] = process_state.is_stopped,
    ) -> None:
        self._pid = pid
        self._clock = clock
        self._is_stopped = is_stopped
        self._was_stopped = False
        self._patience = START_SECONDS
        self._moved_at = clock()

    def moved(self) -> None:
        """It has started, sent something, or has nothing to do."""
        self._patience = SILENCE_SECONDS
        self._moved_at = self._clock()

    def look(self) -> str | None:
        """What is wrong with it; None: nothing yet."""
        was_stopped, self._was_stopped = self._was_stopped, self._is_stopped(self._pid)
        if was_stopped and self._was_stopped:
            return "was stopped (SIGSTOP)"
        seconds = self._clock() - self._moved_at
        return f"has said nothing for {seconds:.0f} s" if seconds > self._patience else None
