"""A port for a server that a test starts."""

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire_cli.ports import Endpoint, ReservedPorts

__all__ = ["free_port", "unused_port"]


@contextmanager
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the system gives to nobody else meanwhile; a server that names it can listen there."""
    with ReservedPorts() as ports:
        yield ports.take({"port": Endpoint("127.0.0.1", 0)})["port"].port


def unused_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at and nobody keeps; if possible one that the system gives to no connection."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choice = range(1024, first_given) or range(1024, 1 << 16)
    while True:
        port = random.SystemRandom().choice(choice)  # a seed of the tests would have all processes draw the same
        with socket.socket() as held:
            try:
                held.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
