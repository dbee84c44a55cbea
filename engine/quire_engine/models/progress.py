"""Logs how much of the weights is loaded, so that other processes that wait for it can follow the log."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""A model that loads faster logs nothing."""


class LoadProgress:
    """Logs the share of the bytes that is loaded, as "loading weights: 40% of 1234 MB", once a second, if this rank
    reports: one rank is enough."""

    def __init__(self, total_bytes: int, *, reports: bool = True) -> None:
        self._total_bytes = total_bytes
        self._reports = reports
        self._loaded_bytes = 0
        self._next = time.monotonic() + INTERVAL_S

    def add(self, num_bytes: int) -> None:
        self._loaded_bytes += num_bytes
        now = time.monotonic()
        if self._reports and now >= self._next:
            self._next = now + INTERVAL_S
            share = 100 * self._loaded_bytes // max(self._total_bytes, 1)
            logger.info("loading weights: %d%% of %.0f MB", share, self._total_bytes / 1e6)


class _Reporter(logging.Handler):
    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and isinstance(share := record.args[0], int):
            self._report(share)


@contextlib.contextmanager
def reported_progress(report: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, the share that this process has loaded, in percent, goes to a function instead of the log."""
    handler, level, propagates = _Reporter(report), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
