"""Work on large requests and answers: in one thread, beside the event loop, which serves all others meanwhile.

The thread is one, so that large requests wait for each other. It shares the interpreter's lock with the loop: what runs
here consists of short calls. A decoder or encoder holds the lock until it returns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
LARGE_BYTES = 64 << 10
"""JSON of this size is read or written within a millisecond."""
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="gateway-large")


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
