"""Makes the memory that the stub shares with the server unreadable for other users of the machine.

Prompts, answers and the introspection token go through a region in /dev/shm, which tritonserver's stub creates
world-readable, whatever the umask.
"""

import logging
import os

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm/"


def make_private() -> None:
    """Remove the permissions of other users from every file in /dev/shm that this process has open.

    Call it before the first request. A process that has opened a region before keeps its access, so `quire serve`
    starts the server in a way that makes regions private from the beginning (`quire_cli.server.private_memory`).
    """
    found = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_shared = os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SHARED_MEMORY)
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if is_shared:
            os.fchmod(descriptor, 0o600)
            found += 1
    if not found:
        logger.warning(
            "the shared memory of the server is not in %s: see to it that no other user of the machine can read it",
            _SHARED_MEMORY,
        )
