"""A companion of `quire serve`, which is started again when it ends."""

import os
import sys

from quire_cli.companion import Companion
from quire_cli.ports import Endpoint
from support.serving import wait_until


def test_what_is_started_in_its_place_has_the_same_priority() -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    companion = Companion(Endpoint("127.0.0.1", 1), command, dict(os.environ), lambda served_s: 0.0)
    try:
        first = companion.pid
        companion.lower_priority(10)
        assert os.getpriority(os.PRIO_PROCESS, first) == 10
        os.kill(first, 9)
        wait_until(lambda: companion.pid != first, "another one is started")
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, companion.pid) == 10, "its priority is low, too")
    finally:
        companion.stop()
