"""The scheduler: chooses what runs in the next step. Knows tokens and blocks, never tensors."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.scheduler.request_queue import FCFSRequestQueue, PriorityRequestQueue
    from quire_engine.scheduler.scheduler import Scheduler

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "Scheduler"]

_HOMES = {
    "FCFSRequestQueue": "quire_engine.scheduler.request_queue",
    "PriorityRequestQueue": "quire_engine.scheduler.request_queue",
    "Scheduler": "quire_engine.scheduler.scheduler",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the grammar compiler imports `grammar` alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
