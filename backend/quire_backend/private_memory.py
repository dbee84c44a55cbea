"""Keeps what the server's stub shares with the server from other users of the machine.

Prompts, answers and the introspection token go through a region in /dev/shm, which the stub of tritonserver makes
readable for everybody, whatever the umask.
"""

import logging
import os

__all__ = ["make_private"]

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm/"


def make_private() -> None:
    """Take the rights of other users from every file in /dev/shm that this process has open.

    Call it before the first request. Whoever has opened a region before keeps what he has: `quire serve` starts the
    server so that the regions are private from the beginning (`quire_cli.private_memory`).
    """
    found = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_shared = os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SHARED_MEMORY)
        except FileNotFoundError:  # the one that listed the others
            continue
        if is_shared:
            os.fchmod(descriptor, 0o600)
            found += 1
    if not found:
        logger.warning(
            "the shared memory of the server is not in %s: see to it that no other user of the machine can read it",
            _SHARED_MEMORY,
        )
