"""A companion of `quire serve`, which is started again when it ends."""

import os
import sys

from quire_cli.companion import Companion
from quire_cli.ports import Endpoint
from support.serving import wait_until


class StartedAgain(Companion):
    def on_end(self, served_s: float) -> float:
        return 0.0


def test_what_is_started_in_its_place_has_the_same_priority() -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with StartedAgain("toy", Endpoint("127.0.0.1", 1), command, dict(os.environ), 19) as companion:
        first = companion.pid
        assert os.getpriority(os.PRIO_PROCESS, first) == 19
        os.kill(first, 9)

        def is_another() -> bool:
            companion.look()
            return companion.pid != first

        wait_until(is_another, "another one is started")
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, companion.pid) == 19, "its priority is low, too")
