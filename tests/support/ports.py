"""A port for a server that a test starts."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

__all__ = ["free_port"]


@contextmanager
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the system gives to nobody else meanwhile.

    It stays bound, and does not listen: so a server can, if it sets SO_REUSEADDR.
    """
    with closing(socket.socket()) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
