"""Responder: tells what came of steps, in the order in which they were begun, while the next one is begun.

::

    main thread    begin 1 ─► begin 2 ─────────► begin 3 ─► …
    responder               wait for 1, tell ─► wait for 2, tell ─► …
"""

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Responder"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Responder(Generic[T]):
    """A thread that takes answers one by one.

    Args:
        respond: waits for an answer and tells it. If it raises, nobody would ever hear: this process ends.
        max_waiting: answers that may wait for their turn.
    """

    def __init__(self, respond: Callable[[T], None], max_waiting: int) -> None:
        self._respond = respond
        self._answers: queue.Queue[T] = queue.Queue(max_waiting)
        threading.Thread(target=self._run, name="responder", daemon=True).start()

    def put(self, answer: T) -> None:
        """Have it told after those before it; waits while too many wait already."""
        self._answers.put(answer)

    def wait_until_idle(self) -> None:
        """Until all that was put here has been told."""
        self._answers.join()

    def _run(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                self._respond(answer)
            except BaseException:
                logger.exception("what came of a step cannot be told")
                os._exit(1)
            self._answers.task_done()
