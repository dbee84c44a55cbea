"""DrainWatch: when a server that was told to end has nothing left to do, though it does not end by itself.

tritonserver 2.51 waits for its whole timeout in two cases: a stub that died in the middle of requests, and a gRPC
stream whose client cancelled just as it ended, of which the server keeps the request for ever. Nobody is served by that
wait. What is really in flight the models' processes show on their status pages.
"""

import http.client
import json
import time
from collections.abc import Collection
from pathlib import Path

from quire_backend.status_page import StubState, StubStatus, read_status_pages

from quire_cli import process
from quire_cli.ports import Endpoint
from quire_cli.server_process import ServerProcess

__all__ = ["DrainWatch"]

_INDEX_TIMEOUT_S = 1.0
_LOADED = ("READY", "LOADING", "UNLOADING")


class DrainWatch:
    """Watches one server from before it is told to end.

    Args:
        server: the server.
        endpoint: its HTTP endpoint.
        folder: where the processes of its models have their status pages.
        given_up: names of models whose process was ended though the server still has them.
    """

    def __init__(self, server: ServerProcess, endpoint: Endpoint, folder: Path, given_up: Collection[str] = ()) -> None:
        self._folder = folder
        self._given_up = given_up
        pages = read_status_pages(folder)
        # A model that is not ours may have requests that nobody here knows of.
        models = _loaded_models(endpoint)
        self._sees_all = (
            models is not None
            and models <= {page.model for page in pages} | set(given_up)
            and server.stubs() <= {(page.pid, page.start_time) for page in pages}
        )
        self._idle_since: float | None = None

    def idle_s(self) -> float:
        """For how long nothing has been in flight, and no model been ending; call it often."""
        pages = read_status_pages(self._folder)
        is_busy = any(_lives(page) and (page.num_in_flight or page.state is StubState.ENDING) for page in pages)
        # Without pages all stubs have ended in good order, and the server is about to.
        is_ending = not pages and not self._given_up
        if is_busy or is_ending or not self._sees_all:
            self._idle_since = None
            return 0.0
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since

    def cut_off(self) -> str | None:
        """The stub that died with requests in flight, if one did; one that ends in good order takes its page along."""
        for page in read_status_pages(self._folder):
            if page.num_in_flight and not _lives(page):
                return f"the stub process {page.pid} of model {page.model!r} died"
        return None


def _lives(page: StubStatus) -> bool:
    return process.is_alive(page.pid, page.start_time)


def _loaded_models(endpoint: Endpoint) -> set[str] | None:
    """Names of the models that the server has; None when it does not say."""
    connection = http.client.HTTPConnection(endpoint.client_host, endpoint.port, timeout=_INDEX_TIMEOUT_S)
    try:
        connection.request("POST", "/v2/repository/index")
        models = json.loads(connection.getresponse().read())
        return {model["name"] for model in models if model.get("state") in _LOADED}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return None
    finally:
        connection.close()
