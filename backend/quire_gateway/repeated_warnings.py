"""A filter for warnings that a client can cause at will: each text once a minute, with a count of the rest."""

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0


class RepeatedWarnings(logging.Filter):
    """Drops a warning whose text before formatting was logged within the last minute.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_dropped: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if record.levelno != logging.WARNING:
            return True
        text, now = str(record.msg), self._clock()
        if now - self._logged_at.get(text, -PERIOD_S) < PERIOD_S:
            self._num_dropped[text] = self._num_dropped.get(text, 0) + 1
            return False
        self._logged_at[text] = now
        if num_dropped := self._num_dropped.pop(text, 0):
            record.msg = f"{text} ({num_dropped} more in the last minutes)"
        return True
