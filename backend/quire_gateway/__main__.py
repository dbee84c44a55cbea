"""`python -m quire_gateway SETTINGS`: serve until SIGTERM; SIGURG has it reject new requests from then on.

`quire openai` starts it. SETTINGS are a `GatewaySettings` as JSON, but for the keys, which come by environment.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import uvicorn
from quire_engine.system.log_lines import log_to_stderr

from quire_gateway.app import make_app
from quire_gateway.settings import API_KEYS_VARIABLE, GatewaySettings

SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms are what the event loop would wait after each call of the system while a large request is read."""
WARNING_PERIOD_S = 60.0
"""A client can cause warnings at will: each text is logged once in this time, with a count of the rest."""


class RepeatedWarnings(logging.Filter):
    """Drops a warning whose text before formatting was logged within the last `WARNING_PERIOD_S`.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._num_dropped: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if record.levelno != logging.WARNING:
            return True
        text, now = str(record.msg), self._clock()
        if now - self._logged_at.get(text, -WARNING_PERIOD_S) < WARNING_PERIOD_S:
            self._num_dropped[text] = self._num_dropped.get(text, 0) + 1
            return False
        self._logged_at[text] = now
        if num_dropped := self._num_dropped.pop(text, 0):
            record.msg = f"{text} ({num_dropped} more in the last minutes)"
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway.

    Returns:
        2 for a wrong usage.
    """
    (given,) = sys.argv[1:] if arguments is None else arguments
    keys = os.environ.pop(API_KEYS_VARIABLE, "")
    try:
        settings = replace(msgspec.json.decode(given, type=GatewaySettings), api_keys=tuple(keys.splitlines()))
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    log_to_stderr("quire gateway[%(process)d] %(levelname)s: %(message)s")
    app = make_app(settings)
    signal.signal(signal.SIGURG, lambda *_: app.drain())  # ignored by a process that has not come this far
    for name in ("uvicorn.error", "quire_gateway"):
        logging.getLogger(name).addFilter(RepeatedWarnings())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what was imported is not looked through again and again
    uvicorn.run(
        app, host=settings.host, port=settings.port, http="h11", ws="none", log_config=None, log_level="warning",
        access_log=False, server_header=False, timeout_graceful_shutdown=settings.drain_timeout_s, lifespan="on",
        # Some of what is too large is read, so that it gets an answer.
        h11_max_incomplete_event_size=2 * settings.limits.max_header_bytes,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
