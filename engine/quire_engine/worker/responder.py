"""Responder: sends the results of steps, in the order in which they began, while the main thread begins the next.

::

    main thread    begin 1 ─► begin 2 ─────────► begin 3 ─► …
    responder               wait for 1, send ─► wait for 2, send ─► …
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
    """A thread that sends answers one by one.

    Args:
        respond: waits for an answer and sends it. If it raises, this process ends: the answer would never come.
        max_waiting: answers that may wait in its queue.
    """

    def __init__(self, respond: Callable[[T], None], max_waiting: int) -> None:
        self._respond = respond
        self._answers: queue.Queue[T] = queue.Queue(max_waiting)
        threading.Thread(target=self._run, name="responder", daemon=True).start()

    def put(self, answer: T) -> None:
        """Queue an answer; blocks while the queue is full."""
        self._answers.put(answer)

    def wait_until_idle(self) -> None:
        """Wait until all queued answers are sent."""
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
