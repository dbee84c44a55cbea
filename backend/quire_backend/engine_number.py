"""EngineNumber: the value of the label `engine`, which no two living engines of a model share.

A reload starts the new engine before it ends the old one, `instance_group` may ask for several at once, and every
engine has a stub process of its own. Two that wrote one series would overwrite each other's state. Worse: tritonserver
counts references to a series per stub, so the first stub that removes it frees what the other still writes to, and the
server dies.

So each engine takes its index among the replicas of its model, or else the lowest number that is free among the engines
of its model in its server: nearly always 0, 1 for its replacement, and then 0 again. A number is taken by binding an
address in the kernel's abstract socket namespace, which is freed when the process ends, however it ends, and leaves no
file.
"""

import contextlib
import hashlib
import os
import socket

MAX_ENGINES = 64
"""Engines of one model in one server. If all numbers are taken, or sockets fail, the process id is used."""


class EngineNumber:
    """Takes a number, until `release`.

    Args:
        model: the model's name.
        version: its version.
        index: of the engine, the number that it takes if that is free.
    """

    def __init__(self, model: str, version: str, index: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The stub's parent is the server. Containers that share a network share addresses, but not process ids.
        namespace = os.stat("/proc/self/ns/pid").st_ino
        name = hashlib.blake2b(f"{model}/{version}".encode(), digest_size=16).hexdigest()
        for number in (index, *range(MAX_ENGINES)):
            with contextlib.suppress(OSError):
                self._socket.bind(f"\0quire-engine-{namespace}-{os.getppid()}-{name}-{number}")
                self.label = str(number)
                """The number, as the label's value."""
                return
        self.label = f"p{os.getpid()}"

    def release(self) -> None:
        """Free the number. Idempotent."""
        self._socket.close()
