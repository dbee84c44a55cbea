"""DrainWatch: detects that a server which was told to end has nothing left to do, though it does not end by itself.

tritonserver 2.51 waits for its whole timeout in two cases: a stub that died in the middle of requests, and a gRPC
stream whose client cancelled just as it ended, whose request the server keeps for ever. That wait helps nobody. The
status pages of the models' processes show what is really in flight.
"""

import contextlib
import http.client
import time
from collections.abc import Collection
from pathlib import Path

from quire_backend.status_page import StubState, StubStatus, read_status_pages
from quire_engine.system import process_state

from quire_cli.loaded_models import ask_index
from quire_cli.ports import Endpoint
from quire_cli.server_process import ServerProcess, Stub

# A server without requests in flight tells its models to end within a second. They may still send something.
_IDLE_S = 1.5
# Once all stubs have ended, nothing is left to do.
_ALL_ENDED_S = 0.3
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
        self._idle_since: float | None = None
        self._knows_all_models, self._unseen = False, set[Stub]()
        with contextlib.suppress(OSError):  # no descriptor is left: nothing is known, so wait for its end
            self._look_at_all(server, endpoint)

    def _look_at_all(self, server: ServerProcess, endpoint: Endpoint) -> None:
        """Check whether there are models without status pages."""
        pages = read_status_pages(self._folder)
        # A model of another backend may have requests that are not known here.
        models = _loaded_models(endpoint)
        self._knows_all_models = models is not None and models <= {page.model for page in pages} | set(self._given_up)
        self._unseen = server.stubs() - {page.stub for page in pages}
        """Of another backend, or one of ours that is about to end: its page goes before it does."""

    def is_over(self) -> bool:
        """Whether no request was in flight for long enough, and no model was ending; call it often."""
        try:
            return self._is_over()
        except OSError:  # as above
            self._idle_since = None
            return False

    def _is_over(self) -> bool:
        pages = read_status_pages(self._folder)
        living = [page for page in pages if _lives(page)]
        is_busy = any(page.num_in_flight or page.state is StubState.ENDING for page in living)
        # Without pages all stubs have ended normally, and the server is about to.
        is_ending = not pages and not self._given_up
        sees_all = self._knows_all_models and not any(process_state.is_alive(*stub) for stub in self._unseen)
        if is_busy or is_ending or not sees_all:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > (_IDLE_S if living else _ALL_ENDED_S)

    def cut_off(self) -> str | None:
        """The stub that died with requests in flight, if one did; a stub that ends normally removes its page."""
        for page in read_status_pages(self._folder):
            if page.num_in_flight and not _lives(page):
                return f"the stub process {page.pid} of model {page.model!r} died"
        return None


def _lives(page: StubStatus) -> bool:
    return process_state.is_alive(*page.stub)


def _loaded_models(endpoint: Endpoint) -> set[str] | None:
    """Names of the models that the server has; None if it does not answer."""
    connection = http.client.HTTPConnection(endpoint.client_host, endpoint.port, timeout=_INDEX_TIMEOUT_S)
    try:
        models = ask_index(connection)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return None if models is None else {model.name for model in models if model.state in _LOADED}
