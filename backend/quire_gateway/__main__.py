"""`python -m quire_gateway SETTINGS`: serve until SIGTERM; SIGURG has it reject new requests from then on.

`quire openai` starts it. SETTINGS are a `GatewaySettings` as JSON, but for the keys, which come by environment.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import uvicorn
from quire_engine.system.log_lines import log_to_stderr

from quire_gateway.app import make_app
from quire_gateway.repeated_warnings import RepeatedWarnings
from quire_gateway.settings import API_KEYS_VARIABLE, GatewaySettings

SWITCH_INTERVAL_S = 0.0005
"""Python's own 5 ms are what the event loop would wait after each call of the system while a large request is read."""


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
