"""Work that ends when its client leaves.

Starlette's own responses notice it in ways that differ with versions, and do not close what they iterate over before
the garbage collector does. Here the work's task is cancelled, and what it holds is closed, before anything goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

_T = TypeVar("_T")


class ClientLeftError(Exception):
    """The client has closed its connection."""


async def unless_client_leaves(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, _T]
) -> _T:
    """The result of some work, which is cancelled when the client of a request disconnects.

    Args:
        receive: ASGI's, of a request whose body was read.
        work: is run as a task.

    Raises:
        ClientLeftError: the client has left.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_until_it_leaves(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _until_it_leaves(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
