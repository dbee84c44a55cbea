"""How work on a request runs: large work in one thread, beside the event loop, which serves all others meanwhile; and
all of it only while its client is there.

The thread is one, so that large requests wait for each other. It shares the interpreter's lock with the loop: what runs
there consists of short calls. A decoder or encoder holds the lock until it returns.

Starlette's own responses notice that a client leaves in ways that differ with versions, and do not close what they
iterate over before the garbage collector does. Here the work's task is cancelled, and what it holds is closed, before
anything goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
LARGE_BYTES = 64 << 10
"""JSON of this size is read or written within a millisecond."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="gateway-large")


class ClientLeftError(Exception):
    """The client has closed its connection."""


async def run_if_large(num_bytes: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """The result of a function; it runs in the thread if it works on much, else at once.

    Args:
        num_bytes: about how many bytes it reads or writes.
        function: is called once.
        args: of the function.
        kwargs: of the function.
    """
    if num_bytes <= LARGE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.wrap_future(_THREAD.submit(function, *args, **kwargs))


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
