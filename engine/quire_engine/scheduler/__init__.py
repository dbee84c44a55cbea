"""The scheduler: chooses what runs in the next step. Knows tokens and blocks, never tensors."""

from quire_engine.scheduler.request_queue import FCFSRequestQueue, PriorityRequestQueue
from quire_engine.scheduler.scheduler import Scheduler

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "Scheduler"]
